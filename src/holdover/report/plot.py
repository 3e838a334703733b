"""Speed against quality as SVG, in the colours of the page it stands in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..compare import Results, Row
from .colours import colours, series_of
from .svg import INK, Inks, drawing


@dataclass(frozen=True)
class Point:
    """One candidate in the plane: how much faster, how near, and how near at worst."""

    label: str
    series: str
    kind: str
    speed: float
    mean: float
    worst: float


def points(results: Results) -> list[Point]:
    """The candidates that have a place; equal pictures stand a little above the best of the others."""
    rows = [row for row in results.rows if row.error is None]
    finite = [row.summary("psnr").mean for row in rows if math.isfinite(row.summary("psnr").mean)]
    top = max(finite, default=50.0) + 5
    return [_point(results, row, top) for row in rows]


def _point(results: Results, row: Row, top: float) -> Point:
    psnr = row.summary("psnr")
    short = str(row.steps) if row.kind in ("fewer_steps", "second_order") else row.label
    return Point(short, series_of(row), row.kind, results.speedup(row), min(psnr.mean, top), min(psnr.worst, top))


def frontier(found: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both speed and mean PSNR, from slow to fast."""
    best: list[Point] = []
    for point in sorted(found, key=lambda p: (-p.speed, -p.mean)):
        if not best or point.mean > best[-1].mean:
            best.append(point)
    return best[::-1]


def plot(results: Results, width: float, height: float, salt: str) -> str:
    """The plane of speed and PSNR as an SVG element; `salt` keeps its ids apart from another plot's."""
    found, inks = points(results), Inks(colours(results))
    with drawing(width, height, salt) as (figure, svg):
        axes = figure.add_subplot()
        axes.grid(True)
        axes.set_axisbelow(True)
        axes.set(xlabel="times faster than uncached", ylabel="PSNR to uncached, dB (line: down to the worst)")
        _draw(axes, found, inks.marks)
        _name(figure, axes, found, inks.marks)
        return inks.of_page(svg())


def _draw(axes: Any, found: Sequence[Point], marks: dict[str, str]) -> None:
    best = frontier(found)
    axes.plot([p.speed for p in best], [p.mean for p in best], color=INK, lw=7, alpha=0.09, solid_capstyle="round")
    for kind, style in (("fewer_steps", (0, (1, 2))), ("second_order", (0, (5, 3)))):
        line = sorted((p for p in found if p.kind == kind), key=lambda p: p.speed)
        if line:
            axes.plot([p.speed for p in line], [p.mean for p in line], color=marks[kind], lw=1.3, ls=style)
    for p in found:
        cached = p.kind not in ("fewer_steps", "second_order")
        if cached:
            axes.plot([p.speed, p.speed], [p.worst, p.mean], color=marks[p.series], lw=1.6, alpha=0.5)
        shape, area = ("o", 9) if cached else ("D" if p.kind == "second_order" else "s", 5)
        axes.plot([p.speed], [p.mean], shape, color=marks[p.series], ms=area, mew=0)
    axes.margins(x=0.12, y=0.08)


def _name(figure: Any, axes: Any, found: Sequence[Point], marks: dict[str, str]) -> None:
    """Write each name beside its point, and move it up or down until it covers no other."""
    figure.canvas.draw()
    taken = [_around(axes, point) for point in found]
    for p in sorted(found, key=lambda p: (p.kind in ("fewer_steps", "second_order"), -p.mean)):
        cached = p.kind not in ("fewer_steps", "second_order")
        text = axes.annotate(
            p.label,
            (p.speed, p.mean),
            xytext=(8, 4),
            textcoords="offset points",
            color=marks[p.series],
            weight="bold" if cached else "normal",
            size=10 if cached else 8,
        )
        _settle(axes, text, taken)


def _around(axes: Any, point: Point) -> Any:
    """The box of a point's mark."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform((point.speed, point.mean))
    return Bbox([[x - 5, y - 5], [x + 5, y + 5]])


def _settle(axes: Any, text: Any, taken: list[Any]) -> None:
    inside = axes.get_window_extent()
    sides = ((8, "left"), (-8, "right"))
    for lift in (4, -11, 14, -21, 24, -31):
        for offset, side in sides:
            text.set_position((offset, lift))
            text.set_horizontalalignment(side)
            box = text.get_window_extent()
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                return
    taken.append(text.get_window_extent())
