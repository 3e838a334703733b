"""Drawings as SVG elements in the colours and the font of the page they stand in."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INK, FAINT = "#010203", "#040506"
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "grid.color": FAINT,
    "grid.alpha": 0.22,
}


@contextmanager
def drawing(width: float, height: float, salt: str) -> Iterator[tuple[Any, Callable[[], str]]]:
    """A figure of so many inches, and a function that gives it as SVG; `salt` makes its ids its own."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)

        def svg() -> str:
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            return buffer.getvalue()

        yield figure, svg


class Inks:
    """Stand-in colours to draw with, one a series; the page's own take their places."""

    def __init__(self, palette: dict[str, str]) -> None:
        self.marks = {name: f"#0a0b{index:02x}" for index, name in enumerate(palette)}
        self._names = {self.marks[name]: colour for name, colour in palette.items()} | {FAINT: "faint"}

    def of_page(self, svg: str) -> str:
        """The element alone, with the page's colours, its font, and no fixed size."""
        svg = svg[svg.index("<svg") :]
        for stand_in, name in self._names.items():
            svg = svg.replace(stand_in, f"var(--{name})")
        svg = svg.replace(INK, "currentColor")
        svg = re.sub(r"font: ((?:bold |700 )?)([\d.]+px)[^;\"]*", r"font: \g<1>\2 var(--font)", svg)
        return re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"([^>]*?) (?:width|height)="[^"]*"', r"\1\2", svg, count=1)
