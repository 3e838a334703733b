"""The plots of the report as SVG, in the colors and the font of the page: speed and quality, predicted and measured."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any, Self

from ..compare import Results, Row
from ..metrics import Summary
from ..plan import TuningResult
from ..plan.planner import search_profile
from ..profiles import Profile
from ..profiles.targets import Target
from ..selector import config_class, methods

PLAN = "plan"
BASELINES = {"fewer_steps": "fewer steps", "second_order": "fewer steps, second-order solver"}  # names on the page
_BASELINE_COLORS = {"fewer_steps": "grey", "second_order": "slate"}
_OTHER_COLORS = ("blue", "green", "indigo", "brown", "pink", "olive", "cyan")
_INK, _FAINT = "#010203", "#040506"  # placeholders that the colors of the page replace
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.22,
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _FAINT),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "text.color"), _INK),
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


@contextmanager
def themed_figure(
    colors: dict[str, str], width: float, height: float, salt: str
) -> Iterator[tuple[Any, dict[str, str], Callable[[], str]]]:
    """A figure with a size in inches, the color of each series, and a function that returns it as an SVG element.

    The colors become variables of the style sheet; `salt` makes the element's ids unique.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    marks = {series: f"#0a0b{index:02x}" for index, series in enumerate(colors)}
    variables = {_INK: "currentColor", _FAINT: "var(--faint)"}
    variables |= {marks[series]: f"var(--{color})" for series, color in colors.items()}
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)

        def to_svg() -> str:
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            svg = buffer.getvalue()
            for placeholder, variable in variables.items():
                svg = svg.replace(placeholder, variable)
            svg = re.sub(r"font: ((?:bold |700 )?)([\d.]+px)[^;\"]*", r"font: \g<1>\2 var(--font)", svg)
            head, rest = svg[svg.index("<svg") :].split(">", 1)
            return re.sub(r' (?:width|height)="[^"]*"', "", head) + ">" + rest

        yield figure, marks, to_svg


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
        return self.kind in BASELINES


def measure_points(results: Results) -> list[Point]:
    """The points of all candidates that did not fail; equal images are placed slightly above the best other."""
    rows = [row for row in results.rows if row.error is None]
    top = max((v for v in (row.summary("psnr").mean for row in rows) if math.isfinite(v)), default=50.0) + 5
    points = []
    for row in rows:
        psnr, speed = row.summary("psnr"), results.speedup(row)
        label = str(row.steps) if row.kind in BASELINES else row.label
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
    points = measure_points(results)
    with themed_figure(assign_colors(results), width, height, salt) as (figure, marks, to_svg):
        axes = figure.add_subplot()
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
    """Write each label next to its point where there is room for it; the best points come first.

    A label covers no point and no other label and stays within the axes. One without room is left out: the color shows
    its series, and the table has all.
    """
    from matplotlib.transforms import Bbox

    figure.canvas.draw()
    inside = axes.get_window_extent()
    places = axes.transData.transform([(p.speed, p.mean) for p in points])
    taken = [Bbox([[x - 5, y - 5], [x + 5, y + 5]]) for x, y in places]
    best = set(find_frontier(points))
    for p in sorted(points, key=lambda p: (p not in best, p.is_baseline, -p.mean)):
        font = {"weight": "normal", "size": 8} if p.is_baseline else {"weight": "bold", "size": 9}
        where: Any = {"xytext": (8, 4), "textcoords": "offset points", "color": marks[p.series]}
        label = p.label.removeprefix(p.series).strip() or p.label  # the color shows the series
        text = axes.annotate(label, (p.speed, p.mean), **where, **font)
        for lift, (offset, side) in product((4, -11, 14, -21), ((8, "left"), (-8, "right"))):
            text.set_position((offset, lift))
            text.set_horizontalalignment(side)
            box = text.get_window_extent().padded(1)
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if within and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            text.remove()


# Predicted and measured.


@dataclass(frozen=True)
class Trial:
    """One plan on held-out prompts: the expected PSNR, and what was measured of the metric of the target."""

    computed: int
    expected: float | None
    p10: float
    worst: float
    images: int
    passed: bool


@dataclass(frozen=True)
class Prediction:
    """The frontier that a profile predicts: `psnr` is the 10th percentile of PSNR for every budget below all steps.

    `certified` is the number of computed steps of the plan that is certified for `target`; `words` describe it.
    """

    steps: int
    psnr: tuple[tuple[int, float], ...]
    target: Target
    trials: tuple[Trial, ...] = ()
    certified: int | None = None
    words: str = ""

    @classmethod
    def of(cls, tuned: TuningResult, target: str) -> Self:
        """The prediction of a profile, with the outcome of tuning it to a target."""
        trials = tuple(
            Trial(len(tried.computed), tried.expected, summary.p10, summary.worst, summary.count, tried.passed)
            for tried, summary in ((tried, Summary.of(tried.values)) for tried in tuned.tried)
        )
        certified = None if tuned.certificate is None else len(tuned.certificate.computed)
        steps = len(tuned.profile.facts.noise)
        return cls(steps, predict_psnr(tuned.profile), Target.parsed(target), trials, certified, str(tuned))

    def at(self, computed: float | None) -> float | None:
        """The expected PSNR of a plan with this number of computed steps; None where it is unknown."""
        return next((value for count, value in self.psnr if count == computed), None)


def predict_psnr(profile: Profile) -> tuple[tuple[int, float], ...]:
    """The expected 10th percentile of PSNR by computed steps; empty for a profile without an offset to dB."""
    offset = profile.facts.psnr_offset
    if offset is None:
        return ()
    frontier = search_profile(profile).frontier
    return tuple((count, choice.psnr(offset)) for count, choice in frontier.items() if choice.cost > 0)


_DASHED = (0, (5, 2.5))
_BASELINE_STYLES: dict[str, Any] = {"fewer_steps": (0, (1, 1.6)), "second_order": (0, (6, 2, 1, 2))}
_SHAPES = "s^vDPX*phd<>"
Points = tuple[tuple[float, float], ...]  # computed steps and PSNR


def measure_curves(results: Results) -> dict[str, Points]:
    """The curve of every series: the best 10th percentile of PSNR at each known number of computed steps."""
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
    return {series: tuple(sorted(points.items())) for series, points in curves.items()}


def plot_prediction(results: Results, prediction: Prediction, width: float, height: float, salt: str) -> str:
    """The predicted and the measured frontier in two panels, next to each other or in a column, as an SVG element."""
    colors = assign_colors(results) | {PLAN: config_class(PLAN).color}
    curves, wide = measure_curves(results), width > height
    with themed_figure(colors, width, height, salt) as (figure, marks, to_svg):
        left, right = figure.subplots(*((1, 2) if wide else (2, 1)), sharex=True, sharey=True)
        left.set_title("predicted, from the profile alone", loc="left", size=11, weight="bold")
        count = len(results.reference.seconds)
        right.set_title(f"measured on {count} image{'' if count == 1 else 's'}", loc="left", size=11, weight="bold")
        if prediction.psnr:
            line: Any = {"color": marks[PLAN], "ls": _DASHED, "lw": 2, "marker": "o", "ms": 4.5, "mew": 0}
            left.plot(*zip(*prediction.psnr, strict=True), **line)
        else:
            left.text(0.5, 0.5, "this profile predicts no PSNR", transform=left.transAxes, ha="center")
        expected = prediction.at(prediction.certified)
        if expected is not None:
            _plot_certified(left, prediction, expected, marks[PLAN])
        _plot_measured(right, curves, prediction, marks)
        for axes in (left, right):
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set(xlabel=f"computed steps of {prediction.steps}", ylabel="PSNR, 10th percentile, dB")
            if prediction.target.metric == "psnr":
                least = prediction.target.least
                axes.axhline(least, color=_INK, lw=1, ls=(0, (2, 2)), alpha=0.75)
                where: Any = {"xytext": (4, 4), "textcoords": "offset points", "size": 9}
                axes.annotate(f"target {least:g} dB", (0, least), xycoords=("axes fraction", "data"), **where)
        _limit_axes(left, curves, prediction)
        if wide and curves:
            _label_curves(figure, right, curves, marks)
        return to_svg()


def _limit_axes(axes: Any, curves: dict[str, Points], prediction: Prediction) -> None:
    """Show both panels, which share their axes, up to slightly more steps than anything measured computed."""
    measured = [point for points in curves.values() for point in points]
    measured += [(trial.computed, trial.p10) for trial in prediction.trials if prediction.target.metric == "psnr"]
    if not measured:
        return
    most = 1.1 * max(computed for computed, _ in measured)
    psnr = [value for computed, value in (*measured, *prediction.psnr) if computed <= most and math.isfinite(value)]
    psnr += [prediction.target.least] if prediction.target.metric == "psnr" else []
    room = 0.06 * (max(psnr) - min(psnr))
    axes.set(xlim=(0, most), ylim=(min(psnr) - room, max(psnr) + room))


def _plot_measured(axes: Any, curves: dict[str, Points], prediction: Prediction, marks: dict[str, str]) -> None:
    """Every series with plans on top, the prediction behind them, and the plans that were tried as rings."""
    color = marks[PLAN]
    if prediction.psnr:
        axes.plot(*zip(*prediction.psnr, strict=True), color=color, ls=_DASHED, lw=1.2, alpha=0.6)
    for index, series in enumerate(sorted(curves, key=lambda series: series == PLAN)):
        width, size, marker = (2.6, 6, "o") if series == PLAN else (1.3, 5, _SHAPES[index % len(_SHAPES)])
        style: Any = {"ls": _BASELINE_STYLES.get(series, "-"), "marker": marker, "mew": 0, "color": marks[series]}
        axes.plot(*zip(*curves[series], strict=True), lw=width, ms=size, **style)
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


def _label_curves(figure: Any, axes: Any, curves: dict[str, Points], marks: dict[str, str]) -> None:
    """Write each name to the right of the end of its curve, in one column, spaced where names would overlap."""
    ends = {series: points[-1] for series, points in sorted(curves.items(), key=lambda item: item[1][-1][1])}
    column = 1.08 * max(computed for computed, _ in ends.values())
    axes.set_xlim(0, max(axes.get_xlim()[1], column / 0.6))
    figure.canvas.draw()
    low, high = axes.get_ylim()
    spacing = (high - low) * 15 / axes.get_window_extent().height * figure.dpi / 72
    heights = _spread([psnr for _, psnr in ends.values()], spacing, low + spacing / 2, high - spacing / 2)
    for height, (series, end) in zip(heights, ends.items(), strict=True):
        color, weight, name = marks[series], "bold" if series == PLAN else "normal", BASELINES.get(series, series)
        axes.plot([end[0], column], [end[1], height], color=color, lw=0.6, alpha=0.6)
        axes.text(column, height, f" {name}", color=color, size=9, va="center", weight=weight)
    axes.set_ylim(low, high)


def _spread(wanted: Sequence[float], spacing: float, low: float, high: float) -> list[float]:
    """Increasing heights moved apart to at least `spacing`, between two limits if they fit there."""
    heights: list[float] = []
    for height in wanted:
        heights.append(max(height, low, *(h + spacing for h in heights[-1:])))
    for index in reversed(range(len(heights))):
        above = heights[index + 1] - spacing if index + 1 < len(heights) else high
        heights[index] = min(heights[index], above)
    return heights
