"""PSNR over computed steps, every method a line; needs matplotlib."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from .verdict import ours, rows_of

_TITLES = {"mean": "mean over the pictures", "p10": "10th percentile"}
_OURS = ("#b3261e", "#e8710a", "#7b1fa2", "#c2185b", "#8d6e63")
_OTHERS = (
    "#9aa0a6",
    "#5f6368",
    "#202124",
    "#1a73e8",
    "#3949ab",
    "#4fc3f7",
    "#188038",
    "#7cb342",
    "#00838f",
    "#a142f4",
    "#b39ddb",
)
_MARKS = "osD^vP*Xhd<>"
_STYLE: Any = {"svg.fonttype": "none", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def plot(figures: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Draw one file for each number of steps."""
    import matplotlib
    from matplotlib.figure import Figure

    written = []
    for steps in (figures["scale"]["steps"], figures["scale"]["fewer_steps"]):
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
            figure = Figure(figsize=(14, 6.5), layout="constrained", facecolor="white")
            for axes, quantity in zip(figure.subplots(1, 2, sharey=True), _TITLES, strict=True):
                _draw(axes, rows_of(figures, steps), quantity, steps)
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside right upper", frameon=False)
            written.append(folder / f"{name}_{steps}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
    return written


def _draw(axes: Any, rows: list[dict[str, Any]], quantity: str, steps: int) -> None:
    methods = {row["method"]: ours(row) for row in rows}
    colours = {True: cycle(_OURS), False: cycle(_OTHERS)}
    for index, (method, own) in enumerate(methods.items()):
        points = {(r["computed"], r["psnr"][quantity]) for r in rows if r["method"] == method}
        found = sorted(point for point in points if point[1] is not None)
        style = {"lw": 2.4 if own else 1.3, "ls": "-" if own else "--"}
        mark, size = _MARKS[index % len(_MARKS)], 8 if own else 5
        axes.plot(*zip(*found, strict=True), label=method, color=next(colours[own]), marker=mark, ms=size, **style)
    axes.set(title=_TITLES[quantity], xlabel=f"computed steps of {steps}", ylabel="PSNR to the uncached pictures, dB")
    axes.grid(alpha=0.25)
