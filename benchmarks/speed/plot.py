"""The growth plot: overhead per step beside the time of a computed step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

TITLES = {"resolution": "side of the picture, pixels", "batch": "batch at 512x512", "steps": "steps at 512x512"}


def draw(path: Path, into: Path) -> Path:
    """Draw the growth rows of a result file."""
    rows = [row for row in json.loads(path.read_text("utf-8"))["rows"] if row["section"] == "growth"]
    rows = [row for row in rows if "raised" not in row]
    axes_shown = [axis for axis in TITLES if any(row["mode"] == axis for row in rows)]
    if not axes_shown:
        raise SystemExit(f"{path} has no growth rows: run `python -m benchmarks.speed --only growth` first.")
    figure, panels = pyplot.subplots(1, len(axes_shown), figsize=(4 * len(axes_shown), 3.4), squeeze=False, sharey=True)
    for axis, panel in zip(axes_shown, panels[0], strict=True):
        _panel(panel, axis, [row for row in rows if row["mode"] == axis])
    panels[0][0].set_ylabel("milliseconds a step")
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    into.mkdir(parents=True, exist_ok=True)
    written = into / "growth.svg"
    with matplotlib.rc_context({"svg.hashsalt": written.stem}):  # the same rows, the same file
        figure.savefig(written, metadata={"Date": None})
    return written


def _panel(panel: Axes, axis: str, rows: Sequence[dict[str, Any]]) -> None:
    for label in dict.fromkeys(row["label"] for row in rows):
        points = sorted(
            (place(row), row["gpu_ms"]["computed"], row["overhead_ms_per_step"])
            for row in rows
            if row["label"] == label
        )
        places, computed, overhead = zip(*points, strict=True)
        (drawn,) = panel.plot(
            places, [max(ms, 1e-3) for ms in overhead], marker="o", label=f"{label}: beyond the ideal"
        )
        panel.plot(
            places, computed, marker=".", linestyle=":", color=drawn.get_color(), label=f"{label}: computed step"
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sorted({place(row) for row in rows}), [str(p) for p in sorted({place(row) for row in rows})])
    panel.minorticks_off()
    panel.set_xlabel(TITLES[axis])
    panel.grid(alpha=0.3)


def place(row: dict[str, Any]) -> int:
    """Where a row lies on its axis."""
    return int(row["shape"].split("x")[0]) if row["mode"] == "resolution" else int(row[row["mode"]])
