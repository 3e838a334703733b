"""The growth plot: the time of a computed step above, overhead per step below."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

TITLES = {"resolution": "side of the picture, pixels", "batch": "batch at 1024x1024", "steps": "steps at 1024x1024"}


def draw(path: Path, into: Path) -> Path:
    """Draw the growth rows of a result file."""
    rows = [row for row in json.loads(path.read_text("utf-8"))["rows"] if row["section"] == "growth"]
    rows = [row for row in rows if "raised" not in row]
    axes_shown = [axis for axis in TITLES if any(row["mode"] == axis for row in rows)]
    if not axes_shown:
        raise SystemExit(f"{path} has no growth rows: run `python -m benchmarks.speed --only growth` first.")
    figure, panels = pyplot.subplots(
        2, len(axes_shown), figsize=(4 * len(axes_shown), 5), squeeze=False, sharex="col", sharey="row"
    )
    for column, axis in enumerate(axes_shown):
        of_axis = [row for row in rows if row["mode"] == axis]
        _panel(panels[0][column], of_axis, lambda row: row["gpu_ms"]["computed"])
        _panel(panels[1][column], of_axis, lambda row: row["overhead_ms_per_step"])
        panels[0][column].set_yscale("log")
        panels[1][column].set_xlabel(TITLES[axis])
    panels[0][0].set_ylabel("a computed step, ms")
    panels[1][0].set_ylabel("beyond the ideal, ms a step")
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    into.mkdir(parents=True, exist_ok=True)
    written = into / "growth.svg"
    with matplotlib.rc_context({"svg.hashsalt": written.stem}):  # the same rows, the same file
        figure.savefig(written, metadata={"Date": None})
    return written


def _panel(panel: Axes, rows: Sequence[dict[str, Any]], height: Callable[[dict[str, Any]], float]) -> None:
    """A line for each method over what grows."""
    for label in dict.fromkeys(row["label"] for row in rows):
        points = sorted((place(row), height(row)) for row in rows if row["label"] == label)
        panel.plot(*zip(*points, strict=True), marker="o", label=label)
    places = sorted({place(row) for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [str(p) for p in places])
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def place(row: dict[str, Any]) -> int:
    """Where a row lies on its axis."""
    return int(row["shape"].split("x")[0]) if row["mode"] == "resolution" else int(row[row["mode"]])
