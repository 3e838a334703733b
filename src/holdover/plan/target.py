"""What is asked for in words: a quality such as `psnr>=40`, a budget such as `4x`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError, did_you_mean

METRICS = ("psnr", "ssim")
_TARGET = re.compile(r"\s*(\w+)\s*>=\s*(\d+(?:\.\d+)?)\s*(?:dB)?\s*")
_SPEED = re.compile(r"\s*(\d+(?:\.\d+)?)\s*x\s*")


@dataclass(frozen=True)
class Target:
    """A metric and the least value it may have."""

    metric: str
    least: float

    @classmethod
    def parsed(cls, text: str) -> Target:
        """From `psnr>=40` or `ssim>=0.98`."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ConfigError(f"A target looks like 'psnr>=40' or 'ssim>=0.98', not {text!r}.")
        metric, least = match[1].lower(), float(match[2])
        if metric not in METRICS:
            raise ConfigError(f"There is no metric {match[1]!r}.{did_you_mean(metric, METRICS)} Known: psnr, ssim.")
        if metric == "ssim" and least > 1:
            raise ConfigError(f"SSIM is at most 1, so {text!r} cannot be met.")
        return cls(metric, least)

    def __str__(self) -> str:
        return f"{self.metric}>={self.least:g}"


def steps_for(budget: int | str, steps: int) -> int:
    """The number of steps a budget computes of `steps`: itself, or a part of them for `4x`."""
    if isinstance(budget, int):
        return min(budget, steps)
    return max(1, int(steps / speed_up(budget)))


def speed_up(budget: str) -> float:
    """The factor in `4x`."""
    match = _SPEED.fullmatch(budget)
    if match is None or float(match[1]) < 1:
        raise ConfigError(
            f"A budget is a number of computed steps or a speed-up of at least 1x like '4x', not {budget!r}."
        )
    return float(match[1])
