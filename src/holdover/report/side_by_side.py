"""The predicted and the measured frontier in two panels with the same axes: computed steps, and PSNR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..compare import Results, Row
from .colours import NAMES, colours, series_of
from .prediction import Prediction
from .svg import INK, Inks, drawing

PLAN = "plan"
_DASHED = (0, (5, 2.5))
_BASELINES: dict[str, Any] = {"fewer_steps": (0, (1, 1.6)), "second_order": (0, (6, 2, 1, 2))}
_SHAPES = "s^vDPX*phd<>"


@dataclass(frozen=True)
class Line:
    """One series: computed steps, and the most that nine pictures in ten keep with so many; from few steps to many."""

    series: str
    places: tuple[tuple[float, float], ...]


def measured(results: Results) -> list[Line]:
    """Every series that has a place; a row has none that failed or whose computed steps nobody knows."""
    rows = [row for row in results.rows if row.error is None and row.computed_steps is not None]
    finite = [row.summary("psnr").p10 for row in rows if math.isfinite(row.summary("psnr").p10)]
    top = max(finite, default=50.0) + 5
    of_series: dict[str, dict[float, float]] = {}
    for row in rows:
        computed, kept = _place(row, top)
        places = of_series.setdefault(series_of(row), {})
        places[computed] = max(kept, places.get(computed, kept))
    return [Line(series, tuple(sorted(places.items()))) for series, places in of_series.items()]


def _place(row: Row, top: float) -> tuple[float, float]:
    """Equal pictures stand a little above the best of the others."""
    assert row.computed_steps is not None
    return row.computed_steps, min(row.summary("psnr").p10, top)


def side_by_side(results: Results, prediction: Prediction, width: float, height: float, salt: str) -> str:
    """Both panels as an SVG element, beside each other where it is wide and one below the other where it is not."""
    inks, lines, wide = Inks(colours(results) | {PLAN: "rose"}), measured(results), width > height
    with drawing(width, height, salt) as (figure, svg):
        left, right = figure.subplots(*((1, 2) if wide else (2, 1)), sharex=True, sharey=True)
        left.set_title("predicted, from the profile alone", loc="left", size=11, weight="bold")
        count = len(results.reference.seconds)
        right.set_title(f"measured on {count} picture{'' if count == 1 else 's'}", loc="left", size=11, weight="bold")
        for axes in (left, right):
            axes.grid(True)
            axes.set_axisbelow(True)
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set(xlabel=f"computed steps of {prediction.steps}", ylabel="PSNR nine of ten pictures keep, dB")
        _draw_predicted(left, prediction, inks.marks[PLAN])
        _draw_measured(right, lines, prediction, inks.marks)
        for axes in (left, right):
            _draw_target(axes, prediction)
        if wide:
            _name_ends(figure, right, lines, inks.marks)
        return inks.of_page(svg())


def _draw_predicted(axes: Any, prediction: Prediction, colour: str) -> None:
    """Every budget, and a star on the one that is certified."""
    if prediction.keeps:
        axes.plot(*zip(*prediction.keeps, strict=True), color=colour, ls=_DASHED, lw=2, marker="o", ms=4.5, mew=0)
    else:
        axes.text(0.5, 0.5, "this profile predicts no dB", transform=axes.transAxes, ha="center")
    expected = prediction.at(prediction.certified)
    if expected is not None:
        _star(axes, prediction, expected, colour)


def _draw_measured(axes: Any, lines: Sequence[Line], prediction: Prediction, marks: dict[str, str]) -> None:
    """Every series, plans last and broadest; the prediction behind them, and the plans that were tried as rings."""
    if prediction.keeps:
        axes.plot(*zip(*prediction.keeps, strict=True), color=marks[PLAN], ls=_DASHED, lw=1.2, alpha=0.6)
    for index, line in enumerate(sorted(lines, key=lambda line: line.series == PLAN)):
        own = line.series == PLAN
        style = {"ls": _BASELINES.get(line.series, "-"), "lw": 2.6 if own else 1.3, "mew": 0, "ms": 6 if own else 5}
        shape = "o" if own else _SHAPES[index % len(_SHAPES)]
        axes.plot(*zip(*line.places, strict=True), color=marks[line.series], marker=shape, **style)
    if prediction.target.metric == "psnr":
        _draw_trials(axes, prediction, marks[PLAN])


def _draw_trials(axes: Any, prediction: Prediction, colour: str) -> None:
    for trial in prediction.trials:
        if not math.isfinite(trial.kept):
            continue
        if trial.passed and trial.computed == prediction.certified:
            _star(axes, prediction, trial.kept, colour)
        else:
            face = {"mfc": "none", "ms": 9} if trial.passed else {"ms": 8}
            axes.plot([trial.computed], [trial.kept], "o" if trial.passed else "x", color=colour, mew=1.6, **face)


def _star(axes: Any, prediction: Prediction, height: float, colour: str) -> None:
    """The certified plan, and at the foot of the panel how many steps it computes."""
    steps = prediction.certified
    axes.plot([steps], [height], "*", color=colour, ms=17, mec=INK, mew=0.8, zorder=5)
    axes.annotate(
        "", (steps, height), (steps, 0), xycoords="data", textcoords=("data", "axes fraction"), **_stem(colour)
    )
    place: Any = {"xytext": (5, 5), "textcoords": "offset points", "weight": "bold", "color": colour}
    axes.annotate(f"certified: {steps}", (steps, 0), xycoords=("data", "axes fraction"), **place)


def _stem(colour: str) -> dict[str, Any]:
    return {"arrowprops": {"arrowstyle": "-", "color": colour, "lw": 1, "shrinkA": 0, "shrinkB": 8}}


def _draw_target(axes: Any, prediction: Prediction) -> None:
    target = prediction.target
    if target.metric != "psnr":
        return
    axes.axhline(target.least, color=INK, lw=1, ls=(0, (2, 2)), alpha=0.75)
    where: Any = {"xytext": (4, 4), "textcoords": "offset points", "size": 9}
    axes.annotate(f"target {target.least:g} dB", (0, target.least), xycoords=("axes fraction", "data"), **where)


def _name_ends(figure: Any, axes: Any, lines: Sequence[Line], marks: dict[str, str]) -> None:
    """Write each name right of its line's end, in one column, moved apart where they would touch."""
    if not lines:
        return
    column = 1.08 * max(line.places[-1][0] for line in lines)
    axes.set_xlim(0, max(axes.get_xlim()[1], column / 0.6))
    figure.canvas.draw()
    low, high = axes.get_ylim()
    row = (high - low) * 15 / axes.get_window_extent().height * figure.dpi / 72
    upward = sorted(lines, key=lambda line: line.places[-1][1])
    for height, line in zip(_apart([line.places[-1][1] for line in upward], row), upward, strict=True):
        colour, weight = marks[line.series], "bold" if line.series == PLAN else "normal"
        end = line.places[-1]
        axes.plot([end[0], column], [end[1], height], color=colour, lw=0.6, alpha=0.6)
        name = NAMES.get(line.series, line.series)
        axes.text(column, height, f" {name}", color=colour, size=9, va="center", weight=weight)
    axes.set_ylim(low, high)


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Ascending heights at least so far from each other, moved as little as is simple, and no lower than they must."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + least) if placed else height)
    surplus = placed[-1] - heights[-1]
    return [height - surplus / 2 for height in placed]
