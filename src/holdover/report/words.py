"""Figures as a person reads them."""

from __future__ import annotations

import math

from ..metrics import METRICS


def figure(metric: str, value: float) -> str:
    """A metric's value with its own number of digits; `equal` where nothing differs."""
    return "equal" if math.isinf(value) else f"{value:.{METRICS[metric].digits}f}"


def decibels(value: float) -> str:
    """`28.0 dB`, or `equal`."""
    return "equal" if math.isinf(value) else f"{value:.1f} dB"


def seconds(value: float) -> str:
    """Three digits that matter: `12.5 s`, `0.41 s`, `85 ms`."""
    if value < 0.1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} s"


def steps(value: float) -> str:
    """`9`, or `11.5` where the branches or batches differ."""
    return f"{value:.1f}".removesuffix(".0")


def size(count: int) -> str:
    """`2.2 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B" if count else ""
