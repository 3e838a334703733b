"""How close cached images stay to uncached ones: `python -m benchmarks.quality --device cuda`.

A run with an existing result file continues it, and `--jobs 12` runs parts next to each other. With an existing file,
`python -m benchmarks.quality time` adds the CPU seconds of each row; `plot` plots the frontiers and writes the table.
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
from holdover.zoo import MODELS

from .. import RESULTS, ROOT
from .verdict import markdown, plot


def main() -> int:
    """Measure, or plot an existing file; the exit status is the number of parts that failed."""
    options = _options()
    name = "quality" if options.model == "emoji" else f"quality_{options.model}"
    out: Path = options.out or RESULTS / (f"{name}_quick.json" if options.quick else f"{name}.json")
    if options.what == "run":
        _run(options, out)
    figures: dict[str, Any] = json.loads(out.read_text())
    if options.what == "time":
        from .timing import add_seconds

        add_seconds(figures)
        out.write_text(json.dumps(figures, indent=1) + "\n")
    if options.what == "plot":
        print(*plot(figures, options.into, out.stem), sep="\n")
    text = markdown(figures)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(figures["verdict"]))
    return sum("error" in part for part in figures["parts"].values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "time", "plot"), default="run")
    parser.add_argument("--model", default="emoji", choices=MODELS, help="a built-in model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=None, help="how many of the 128 test prompts")
    parser.add_argument("--batch", type=int, default=None, help="images per batch")
    parser.add_argument("--quick", action="store_true", help="a small version of every part, to check that it runs")
    parser.add_argument("--out", type=Path, default=None, help="result file; an existing one is continued")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "assets", help="folder for plots")
    parser.add_argument("--limit", type=float, default=float("inf"), help="start no part after this many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure parts next to each other")
    parser.add_argument(
        "--part", action="append", default=[], help="run only parts whose name contains this; repeatable"
    )
    return parser.parse_args()


def _run(options: argparse.Namespace, out: Path) -> None:
    import torch

    from .bench import QUICK, Scale
    from .parts import measure, measure_side_by_side

    torch.set_num_threads(1)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", HoldoverWarning)
    given = {name: value for name in ("model", "prompts", "batch") if (value := getattr(options, name)) is not None}
    scale = dataclasses.replace(QUICK if options.quick else Scale(), **given)
    if options.jobs > 1:
        measure_side_by_side(scale, sys.argv[1:], out, options.part, options.jobs)
    else:
        measure(scale, options.device, out, options.limit, options.part)


if __name__ == "__main__":
    sys.exit(main())
