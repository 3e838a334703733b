"""The plots of the report as SVG, in the colors and the font of the page: speed and quality, predicted and measured."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from ..compare import Results, Row
from ..selector import config_class, methods
from .prediction import Prediction

PLAN = "plan"
BASELINES = {"fewer_steps": "fewer steps", "second_order": "fewer steps, second-order solver"}
"""The series of the baselines and their names on the page."""

_BASELINE_COLORS = {"fewer_steps": "grey", "second_order": "slate"}
_OTHER_COLORS = ("blue", "green", "brown", "pink", "olive")
_INK, _FAINT = "#010203", "#040506"  # placeholders that the colors of the page replace
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "text.color": _INK,
    "grid.color": _FAINT,
    "grid.alpha": 0.22,
}


# Series and colors.


def get_series(row: Row) -> str:
    """The series of a row: the one it names, else its method or its label; for a baseline, its kind."""
    series = row.candidate.get("series") or row.candidate.get("name", row.label)
    return str(series) if row.kind in ("method", "custom") else row.kind


def assign_colors(results: Results) -> dict[str, str]:
    """A color of the style sheet for every series: the first series of a method has the color of the method."""
    first: dict[str, str] = {}
    for row in results.rows:
        name, series = row.candidate.get("name"), get_series(row)
        if row.kind == "method" and name in methods() and (name not in first or series == name):
            first[name] = series
    fixed = {series: config_class(name).color for name, series in first.items()} | _BASELINE_COLORS
    others = cycle([color for color in _OTHER_COLORS if color not in fixed.values()] or _OTHER_COLORS)
    found = dict.fromkeys(get_series(row) for row in results.rows)
    return {series: fixed.get(series) or next(others) for series in found}


class Palette:
    """Placeholder colors for matplotlib, one per series, that become variables of the style sheet in the SVG."""

    def __init__(self, colors: dict[str, str]) -> None:
        self.marks = {series: f"#0a0b{index:02x}" for index, series in enumerate(colors)}
        self._variables = {self.marks[series]: color for series, color in colors.items()} | {_FAINT: "faint"}

    @contextmanager
    def figure(self, width: float, height: float, salt: str) -> Iterator[tuple[Any, Callable[[], str]]]:
        """A figure with a size in inches, and a function that returns it as an SVG element; `salt` makes ids unique."""
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}):
            figure = Figure(figsize=(width, height), layout="constrained")
            FigureCanvasSVG(figure)

            def to_svg() -> str:
                buffer = io.StringIO()
                figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
                return self._replace(buffer.getvalue())

            yield figure, to_svg

    def _replace(self, svg: str) -> str:
        """The element alone, with the colors and the font of the page, and no fixed size."""
        svg = svg[svg.index("<svg") :]
        for placeholder, name in self._variables.items():
            svg = svg.replace(placeholder, f"var(--{name})")
        svg = svg.replace(_INK, "currentColor")
        svg = re.sub(r"font: ((?:bold |700 )?)([\d.]+px)[^;\"]*", r"font: \g<1>\2 var(--font)", svg)
        return re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"([^>]*?) (?:width|height)="[^"]*"', r"\1\2", svg, count=1)


# Speed and quality.


@dataclass(frozen=True)
class Point:
    """One candidate in the plot: speed-up, mean PSNR and worst PSNR."""

    label: str
    series: str
    kind: str
    speed: float
    mean: float
    worst: float

    @property
    def is_baseline(self) -> bool:
        """Whether it has fewer steps instead of a cache."""
        return self.kind in BASELINES


def measure_points(results: Results) -> list[Point]:
    """The points of all candidates that did not fail; equal images are placed slightly above the best other."""
    rows = [row for row in results.rows if row.error is None]
    top = max((v for v in (row.summary("psnr").mean for row in rows) if math.isfinite(v)), default=50.0) + 5
    points = []
    for row in rows:
        psnr, label = row.summary("psnr"), str(row.steps) if row.kind in BASELINES else row.label
        speed = results.speedup(row)
        points.append(Point(label, get_series(row), row.kind, speed, min(psnr.mean, top), min(psnr.worst, top)))
    return points


def find_frontier(points: Iterable[Point]) -> list[Point]:
    """The points that no other point beats in both speed and mean PSNR, from slow to fast."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.speed, -p.mean)):
        if not best or point.mean > best[-1].mean:
            best.append(point)
    return best[::-1]


def plot_speed(results: Results, width: float, height: float, salt: str) -> str:
    """PSNR over speed-up as an SVG element."""
    points, palette = measure_points(results), Palette(assign_colors(results))
    marks = palette.marks
    with palette.figure(width, height, salt) as (figure, to_svg):
        axes = figure.add_subplot()
        axes.grid(True)
        axes.set_axisbelow(True)
        axes.set(xlabel="times faster than uncached", ylabel="PSNR to uncached, dB (line: down to the worst)")
        best = find_frontier(points)
        axes.plot([p.speed for p in best], [p.mean for p in best], color=_INK, lw=7, alpha=0.09, solid_capstyle="round")
        for kind, style in (("fewer_steps", (0, (1, 2))), ("second_order", (0, (5, 3)))):
            line = sorted((p for p in points if p.kind == kind), key=lambda p: p.speed)
            if line:
                axes.plot([p.speed for p in line], [p.mean for p in line], color=marks[kind], lw=1.3, ls=style)
        for p in points:
            if not p.is_baseline:
                axes.plot([p.speed, p.speed], [p.worst, p.mean], color=marks[p.series], lw=1.6, alpha=0.5)
            shape, area = ("D" if p.kind == "second_order" else "s", 5) if p.is_baseline else ("o", 9)
            axes.plot([p.speed], [p.mean], shape, color=marks[p.series], ms=area, mew=0)
        axes.margins(x=0.12, y=0.08)
        _label_points(figure, axes, points, marks)
        return to_svg()


def _label_points(figure: Any, axes: Any, points: Sequence[Point], marks: dict[str, str]) -> None:
    """Write each label next to its point, moved up or down until it covers no other."""
    from matplotlib.transforms import Bbox

    figure.canvas.draw()
    inside = axes.get_window_extent()
    places = axes.transData.transform([(p.speed, p.mean) for p in points])
    taken = [Bbox([[x - 5, y - 5], [x + 5, y + 5]]) for x, y in places]

    def place(text: Any) -> None:
        for lift in (4, -11, 14, -21, 24, -31):
            for offset, side in ((8, "left"), (-8, "right")):
                text.set_position((offset, lift))
                text.set_horizontalalignment(side)
                box = text.get_window_extent()
                if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in taken):
                    return

    for p in sorted(points, key=lambda p: (p.is_baseline, -p.mean)):
        font = {"weight": "normal", "size": 8} if p.is_baseline else {"weight": "bold", "size": 10}
        where: Any = {"xytext": (8, 4), "textcoords": "offset points", "color": marks[p.series]}
        text = axes.annotate(p.label, (p.speed, p.mean), **where, **font)
        place(text)
        taken.append(text.get_window_extent())


# Predicted and measured.

_DASHED = (0, (5, 2.5))
_BASELINE_STYLES: dict[str, Any] = {"fewer_steps": (0, (1, 1.6)), "second_order": (0, (6, 2, 1, 2))}
_SHAPES = "s^vDPX*phd<>"


@dataclass(frozen=True)
class Curve:
    """One series: the best 10th percentile of PSNR at each number of computed steps, from few steps to many."""

    series: str
    points: tuple[tuple[float, float], ...]


def measure_curves(results: Results) -> list[Curve]:
    """The curve of every series; rows that failed or whose computed steps are unknown are left out.

    Equal images are placed slightly above the best other.
    """
    found = [
        (get_series(row), row.computed_steps, row.summary("psnr").p10)
        for row in results.rows
        if row.error is None and row.computed_steps is not None
    ]
    top = max((psnr for _, _, psnr in found if math.isfinite(psnr)), default=50.0) + 5
    curves: dict[str, dict[float, float]] = {}
    for series, computed, psnr in found:
        points = curves.setdefault(series, {})
        points[computed] = max(min(psnr, top), points.get(computed, -math.inf))
    return [Curve(series, tuple(sorted(points.items()))) for series, points in curves.items()]


def plot_prediction(results: Results, prediction: Prediction, width: float, height: float, salt: str) -> str:
    """The predicted and the measured frontier in two panels with the same axes, as an SVG element.

    The panels are next to each other in a wide figure, and below each other in a tall one.
    """
    palette = Palette(assign_colors(results) | {PLAN: config_class(PLAN).color})
    curves, wide, color = measure_curves(results), width > height, palette.marks[PLAN]
    with palette.figure(width, height, salt) as (figure, to_svg):
        left, right = figure.subplots(*((1, 2) if wide else (2, 1)), sharex=True, sharey=True)
        left.set_title("predicted, from the profile alone", loc="left", size=11, weight="bold")
        count = len(results.reference.seconds)
        right.set_title(f"measured on {count} image{'' if count == 1 else 's'}", loc="left", size=11, weight="bold")
        for axes in (left, right):
            axes.grid(True)
            axes.set_axisbelow(True)
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set(xlabel=f"computed steps of {prediction.steps}", ylabel="PSNR, 10th percentile, dB")
        _plot_predicted(left, prediction, color)
        _plot_measured(right, curves, prediction, palette.marks)
        for axes in (left, right):
            if prediction.target.metric == "psnr":
                least = prediction.target.least
                axes.axhline(least, color=_INK, lw=1, ls=(0, (2, 2)), alpha=0.75)
                where: Any = {"xytext": (4, 4), "textcoords": "offset points", "size": 9}
                axes.annotate(f"target {least:g} dB", (0, least), xycoords=("axes fraction", "data"), **where)
        if wide and curves:
            _label_curves(figure, right, curves, palette.marks)
        return to_svg()


def _plot_predicted(axes: Any, prediction: Prediction, color: str) -> None:
    """Every budget, with a star at the certified one."""
    if prediction.psnr:
        axes.plot(*zip(*prediction.psnr, strict=True), color=color, ls=_DASHED, lw=2, marker="o", ms=4.5, mew=0)
    else:
        axes.text(0.5, 0.5, "this profile predicts no PSNR", transform=axes.transAxes, ha="center")
    expected = prediction.at(prediction.certified)
    if expected is not None:
        _plot_certified(axes, prediction, expected, color)


def _plot_measured(axes: Any, curves: Sequence[Curve], prediction: Prediction, marks: dict[str, str]) -> None:
    """Every series with plans on top, the prediction behind them, and the plans that were tried as rings."""
    color = marks[PLAN]
    if prediction.psnr:
        axes.plot(*zip(*prediction.psnr, strict=True), color=color, ls=_DASHED, lw=1.2, alpha=0.6)
    for index, curve in enumerate(sorted(curves, key=lambda curve: curve.series == PLAN)):
        own = curve.series == PLAN
        shape = "o" if own else _SHAPES[index % len(_SHAPES)]
        style = {"lw": 2.6, "ms": 6} if own else {"lw": 1.3, "ms": 5}
        style |= {"ls": _BASELINE_STYLES.get(curve.series, "-"), "mew": 0}
        axes.plot(*zip(*curve.points, strict=True), color=marks[curve.series], marker=shape, **style)
    for trial in prediction.trials if prediction.target.metric == "psnr" else ():
        if not math.isfinite(trial.p10):
            continue
        if trial.passed and trial.computed == prediction.certified:
            _plot_certified(axes, prediction, trial.p10, color)
        else:
            face = {"marker": "o", "mfc": "none", "ms": 9} if trial.passed else {"marker": "x", "ms": 8}
            axes.plot([trial.computed], [trial.p10], color=color, mew=1.6, **face)


def _plot_certified(axes: Any, prediction: Prediction, psnr: float, color: str) -> None:
    """A star at the certified plan, and the number of steps it computes at the bottom of the panel."""
    steps = prediction.certified
    axes.plot([steps], [psnr], "*", color=color, ms=17, mec=_INK, mew=0.8, zorder=5)
    stem = {"arrowprops": {"arrowstyle": "-", "color": color, "lw": 1, "shrinkA": 0, "shrinkB": 8}}
    axes.annotate("", (steps, psnr), (steps, 0), xycoords="data", textcoords=("data", "axes fraction"), **stem)
    where: Any = {"xytext": (5, 5), "textcoords": "offset points", "weight": "bold", "color": color}
    axes.annotate(f"certified: {steps}", (steps, 0), xycoords=("data", "axes fraction"), **where)


def _label_curves(figure: Any, axes: Any, curves: Sequence[Curve], marks: dict[str, str]) -> None:
    """Write each name to the right of the end of its curve, in one column, spaced where names would overlap."""
    column = 1.08 * max(curve.points[-1][0] for curve in curves)
    axes.set_xlim(0, max(axes.get_xlim()[1], column / 0.6))
    figure.canvas.draw()
    low, high = axes.get_ylim()
    spacing = (high - low) * 15 / axes.get_window_extent().height * figure.dpi / 72
    upward = sorted(curves, key=lambda curve: curve.points[-1][1])
    heights: list[float] = []
    for curve in upward:
        heights.append(max(curve.points[-1][1], heights[-1] + spacing) if heights else curve.points[-1][1])
    shift = (heights[-1] - upward[-1].points[-1][1]) / 2
    for height, curve in zip((height - shift for height in heights), upward, strict=True):
        color, end = marks[curve.series], curve.points[-1]
        axes.plot([end[0], column], [end[1], height], color=color, lw=0.6, alpha=0.6)
        name, weight = BASELINES.get(curve.series, curve.series), "bold" if curve.series == PLAN else "normal"
        axes.text(column, height, f" {name}", color=color, size=9, va="center", weight=weight)
    axes.set_ylim(low, high)
