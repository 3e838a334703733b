"""How near cached pictures stay to the uncached ones: `python -m benchmarks.quality --device cuda`.

A second run with the same file goes on where the first ended. `python -m benchmarks.quality plot` draws the frontier
and writes the table from a file that is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from holdover.errors import HoldoverWarning

from .. import RESULTS, ROOT
from .scale import QUICK, Scale
from .words import markdown


def main() -> int:
    """Measure, or draw what was measured; the exit status is the number of parts that failed."""
    options = _options()
    out: Path = options.out or RESULTS / ("quality_quick.json" if options.quick else "quality.json")
    if options.what == "run":
        _run(options, out)
    figures: dict[str, Any] = json.loads(out.read_text())
    if options.what == "plot":
        from .plot import plot

        drawn = plot(figures, options.into, out.stem)
        print(*drawn, sep="\n")
    text = markdown(figures)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(figures["verdict"]))
    return sum("error" in part for part in figures["parts"].values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "plot"), default="run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=None, help="how many of the 128 test prompts")
    parser.add_argument("--batch", type=int, default=None, help="pictures that are drawn at once")
    parser.add_argument("--quick", action="store_true", help="a little of everything, to see that it runs")
    parser.add_argument("--out", type=Path, default=None, help="result file; one that is there is taken up again")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "assets", help="where plots go")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no part begins")
    parser.add_argument("--part", action="append", default=[], help="only parts with this in their name; repeatable")
    return parser.parse_args()


def _run(options: argparse.Namespace, out: Path) -> None:
    import torch

    from .parts import measure

    torch.set_num_threads(1)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", HoldoverWarning)
    measure(_scale(options), options.device, out, options.limit, options.part)


def _scale(options: argparse.Namespace) -> Scale:
    given = {name: getattr(options, name) for name in ("prompts", "batch")}
    scale = dataclasses.replace(
        QUICK if options.quick else Scale(), **{name: value for name, value in given.items() if value is not None}
    )
    return scale


if __name__ == "__main__":
    sys.exit(main())
