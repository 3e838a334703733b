"""Quality targets such as `psnr>=40`, and the names that stand for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, did_you_mean

QUALITY_TARGETS = {  # 50 dB: the root-mean-square difference is below one level of an 8-bit image
    "lossless": "psnr>=50",
    "high": "psnr>=40",
    "balanced": "psnr>=35",
    "draft": "psnr>=30",
}
_METRICS = ("psnr", "ssim")
_PATTERN = re.compile(r"\s*(\w+)\s*>=\s*(\d+(?:\.\d+)?)\s*(?:dB)?\s*")


@dataclass(frozen=True)
class Target:
    """A quality metric and its minimum value."""

    metric: str
    least: float

    @classmethod
    def parsed(cls, text: str) -> Target:
        """Parse a target such as `psnr>=40` or `ssim>=0.98`."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(f"A target looks like 'psnr>=40' or 'ssim>=0.98', not {text!r}.")
        metric, least = match[1].lower(), float(match[2])
        if metric not in _METRICS:
            raise ConfigError(f"There is no metric {match[1]!r}.{did_you_mean(metric, _METRICS)} Known: psnr, ssim.")
        if metric == "ssim" and least > 1:
            raise ConfigError(f"SSIM is at most 1, so {text!r} cannot be met.")
        return cls(metric, least)

    def __str__(self) -> str:
        return f"{self.metric}>={self.least:g}"

    def implies(self, other: Target) -> bool:
        """Whether an image that meets this target also meets the other one."""
        return self.metric == other.metric and self.least >= other.least

    def misses(self, values: Sequence[float]) -> int:
        """How many values are below the target."""
        return sum(not value >= self.least for value in values)


def check_quality(name: str) -> None:
    """Raise ConfigError for a name that stands for no target; names the nearest one."""
    if name not in QUALITY_TARGETS:
        known = ", ".join(QUALITY_TARGETS)
        raise ConfigError(f"There is no quality {name!r}.{did_you_mean(name, QUALITY_TARGETS)} Known: {known}.")
