"""The command: `python -m benchmarks.speed` measures, `... table` prints Markdown, `... plot` draws the growth plot."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .. import RESULTS, ROOT

SECTIONS = ("flux", "qwen", "wan", "flux2", "klein", "growth", "box")


def main() -> int:
    """Do what was asked."""
    options = parser().parse_args()
    name = "speed_cpu.json" if options.cpu else "speed.json"
    out = options.out or (Path(tempfile.gettempdir()) / "speed-tiny.json" if options.tiny else RESULTS / name)
    if options.what == "table":
        from .table import markdown, processor

        print(processor(out) if options.cpu else markdown(out))
    elif options.what == "plot":
        from .plot import draw

        print(draw(out, options.into))
    else:
        return measure(options, out)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    made.add_argument("what", nargs="?", choices=("measure", "table", "plot"), default="measure")
    made.add_argument("--out", type=Path, help="the result file; rows it has are not measured again")
    made.add_argument("--into", type=Path, default=ROOT / "docs" / "assets", help="where plots go")
    made.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {','.join(SECTIONS)}")
    made.add_argument("--budget-seconds", type=float, default=float("inf"), help="stop before a row once it is spent")
    made.add_argument("--again", action="store_true", help="measure rows again that the file has")
    made.add_argument("--whole", action="store_true", help="compiled as a whole, too")
    made.add_argument(
        "--cpu", action="store_true", help="the model in the box on two cores, and nothing else; has a file of its own"
    )
    made.add_argument(
        "--tiny", action="store_true", help="tiny models and six steps on the processor: does every row run?"
    )
    return made


def measure(options: argparse.Namespace, out: Path) -> int:
    """Run the sections that were asked for; 3 where the budget ended first."""
    from . import box, run
    from .processor import on_the_processor
    from .results import OutOfTimeError, Results

    if options.cpu:
        on_the_processor(out)
        return 0
    results = Results(out, options.budget_seconds, options.again)
    try:
        for section in options.only.split(","):
            if section == "growth":
                run.growth(run.Options(options.tiny), results)
            elif section == "box":
                box.graphs(results, options.tiny)
            else:
                run.Table(section, run.Options(options.tiny, options.whole), results).run()
    except OutOfTimeError:
        print(f"The budget is spent; run the same again to go on. {out}")
        return 3
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
