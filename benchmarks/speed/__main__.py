"""`python -m benchmarks.speed` measures, `... table` prints Markdown tables, `... plot` writes the growth plot."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .. import RESULTS, ROOT

SECTIONS = ("flux", "qwen", "wan", "flux2", "klein", "growth", "box", "float8", "call", "training")


def main() -> int:
    """Measure, print tables, or plot."""
    options = parser().parse_args()
    name = "speed_cpu.json" if options.cpu else "speed.json"
    out = options.out or (Path(tempfile.gettempdir()) / "speed-tiny.json" if options.tiny else RESULTS / name)
    if options.what == "table":
        from .table import markdown, processor

        print(processor(out) if options.cpu else markdown(out))
    elif options.what == "plot":
        from .table import plot

        print(plot(out, options.into))
    else:
        return measure(options, out)
    return 0


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    options.add_argument("what", nargs="?", choices=("measure", "table", "plot"), default="measure")
    options.add_argument("--out", type=Path, help="result file; its rows are not measured again")
    options.add_argument("--into", type=Path, default=ROOT / "docs" / "assets", help="folder for plots")
    options.add_argument("--only", default=",".join(SECTIONS), help=f"comma-separated sections of {','.join(SECTIONS)}")
    options.add_argument(
        "--budget-seconds", type=float, default=float("inf"), help="start no row after this many seconds"
    )
    options.add_argument("--again", action="store_true", help="measure existing rows again")
    options.add_argument("--whole", action="store_true", help="also compile models as a whole")
    options.add_argument(
        "--cpu", action="store_true", help="only the built-in model on two CPU cores, into its own result file"
    )
    options.add_argument(
        "--tiny", action="store_true", help="tiny models and six steps on the CPU, to check that every row runs"
    )
    return options


def measure(options: argparse.Namespace, out: Path) -> int:
    """Run the given sections; returns 3 if the budget ends first."""
    from . import box, call, run, training
    from .measure import OutOfTimeError, Results

    if options.cpu:
        box.measure_on_cpu(out)
        return 0
    results = Results(out, options.budget_seconds, options.again)
    try:
        for section in options.only.split(","):
            if section == "growth":
                run.measure_growth(run.Options(options.tiny), results)
            elif section == "call":
                call.measure_calls(run.Options(options.tiny), results)
            elif section == "training":
                training.measure_training(run.Options(options.tiny), results)
            elif section == "float8":
                run.Table("flux", run.Options(options.tiny), results, ("float8",)).run()
            elif section == "box":
                box.measure_on_card(results, options.tiny)
            else:
                modes = ("eager", "compiled", "whole") if options.whole else ("eager", "compiled")
                run.Table(section, run.Options(options.tiny), results, modes).run()
    except OutOfTimeError:
        print(f"The budget is spent; run the same command again to continue. {out}")
        return 3
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
