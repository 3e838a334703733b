"""How close cached images stay to uncached ones: `python -m benchmarks.quality --device cuda`.

A run with an existing result file continues it, and `--jobs 12` runs parts next to each other. With an existing file,
`python -m benchmarks.quality time` adds the CPU seconds of each row, and `plot` writes the plots and the documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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

        add_seconds(figures, lambda: out.write_text(json.dumps(figures, indent=1) + "\n"))
    if options.what == "plot":
        print(*plot(figures, options.into, out.stem), sep="\n")
        subprocess.run([sys.executable, ROOT / "docs" / "generate.py"], check=True)
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
    parser.add_argument("--budgets", type=_numbers, default=None, help="computed steps of 50, such as 6,8,10")
    parser.add_argument("--searched", type=int, default=None, help="prompts that settings are searched on")
    parser.add_argument("--tries", type=int, default=None, help="settings tried of each kind")
    parser.add_argument("--effort-prompts", type=int, default=None, help="prompts of an effort's calibration")
    parser.add_argument("--tf32", action="store_true", default=None, help="matrix products in TF32, uncached ones too")
    parser.add_argument("--quick", action="store_true", help="a small version of every part, to check that it runs")
    parser.add_argument("--out", type=Path, default=None, help="result file; an existing one is continued")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "assets", help="folder for plots")
    parser.add_argument("--limit", type=float, default=float("inf"), help="start no part after this many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure parts side by side")
    parser.add_argument(
        "--part", action="append", default=[], help="run only parts whose name contains this; repeatable"
    )
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _run(options: argparse.Namespace, out: Path) -> None:
    from .bench import QUICK, Scale
    from .parts import measure

    names = ("model", "prompts", "batch", "searched", "tries", "effort_prompts", "tf32")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.budgets:
        given |= {"budgets": options.budgets, "beyond": ()}
    scale = dataclasses.replace(QUICK if options.quick else Scale(), **given)
    measure(scale, options.device, out, options.limit, options.part, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
