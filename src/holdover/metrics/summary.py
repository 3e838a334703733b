"""Many values of one metric in four figures. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

PSNR_CAP = 100.0
"""The most a PSNR counts for beside smaller ones, in decibels: nobody can see the difference far below that."""


@dataclass(frozen=True)
class Metric:
    """One metric as it is shown: its name, its unit, and which end is the good one."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    digits: int


METRICS = {
    metric.name: metric
    for metric in (
        Metric("psnr", "PSNR", "dB", True, 1),
        Metric("ssim", "SSIM", "", True, 3),
        Metric("nonwhite_error", "error, drawn pixels", "", False, 4),
        Metric("lpips", "LPIPS", "", False, 4),
    )
}


@dataclass(frozen=True)
class Summary:
    """Mean, the 10th percentile counted from the bad end, the worst, and how many pictures.

    Equal pictures have an infinite PSNR. Among others they count for `PSNR_CAP`; where all are equal, the summary is
    infinite. In JSON an infinite value is `null`.
    """

    mean: float
    p10: float
    worst: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], higher_is_better: bool = True) -> Self:
        """The summary of one metric over all pictures."""
        if not values:
            raise ValueError("There is nothing to summarise.")
        if all(map(math.isinf, values)):
            return cls(values[0], values[0], values[0], len(values))
        from_bad = sorted((min(v, PSNR_CAP) for v in values), reverse=not higher_is_better)
        return cls(math.fsum(from_bad) / len(from_bad), _at(from_bad, 0.1), from_bad[0], len(from_bad))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        figures = {"mean": self.mean, "p10": self.p10, "worst": self.worst}
        return {name: finite_or_none(value) for name, value in figures.items()} | {"count": self.count}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Back from JSON."""
        mean, p10, worst = (none_to_infinite(values[name]) for name in ("mean", "p10", "worst"))
        return cls(mean, p10, worst, int(values["count"]))


def finite_or_none(value: float) -> float | None:
    """JSON knows no infinity: None stands for it."""
    return value if math.isfinite(value) else None


def none_to_infinite(value: float | None) -> float:
    """The inverse of `finite_or_none`."""
    return math.inf if value is None else float(value)


def _at(ordered: Sequence[float], fraction: float) -> float:
    """The value at that fraction of the way, with a straight line between neighbours."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
