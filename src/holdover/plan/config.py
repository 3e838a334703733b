"""Settings of the planned cache: a budget such as `4x`, a quality target such as `psnr>=40`, or a schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..config import Config, setting
from ..errors import ConfigError, did_you_mean
from ..metrics import psnr, ssim
from ..profiles import Profile

DEFAULT_BUDGET = "3x"
NO_PROFILE = "none"  # as `profile`: plan without measurements
METRICS = {"psnr": psnr, "ssim": ssim}
_TARGET = re.compile(r"\s*(\w+)\s*>=\s*(\d+(?:\.\d+)?)\s*(?:dB)?\s*")
_SPEED_UP = re.compile(r"\s*(\d+(?:\.\d+)?)\s*x\s*")


@dataclass(frozen=True)
class Target:
    """A quality metric and its minimum value."""

    metric: str
    least: float

    @classmethod
    def parsed(cls, text: str) -> Target:
        """Parse a target such as `psnr>=40` or `ssim>=0.98`."""
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

    def implies(self, other: Target) -> bool:
        """Whether an image that meets this target also meets the other one."""
        return self.metric == other.metric and self.least >= other.least

    def misses(self, values: Sequence[float]) -> int:
        """How many values are below the target."""
        return sum(not value >= self.least for value in values)


def steps_for(budget: int | str, steps: int) -> int:
    """The number of computed steps that a budget (`10` or `"4x"`) allows in a generation of `steps` steps."""
    if isinstance(budget, int):
        return min(budget, steps)
    match = _SPEED_UP.fullmatch(budget)
    if match is None or float(match[1]) < 1:
        raise ConfigError(
            f"A budget is a number of computed steps or a speed-up of at least 1x like '4x', not {budget!r}."
        )
    return max(1, int(steps / float(match[1])))


@dataclass(frozen=True)
class PlanConfig(Config):
    """Compute and hold steps according to a plan that is made before the first step.

    Set one of `budget`, `target` and `schedule`; the default is `budget="3x"`. `profile` is the result of
    `holdover.calibrate`: the object, a file, an address on the Hub (hf://owner/name), or the name of a shipped profile.
    Without one, the shipped profile of this model is used; if there is none, the model is refused unless `schedule`
    names the computed steps. `profile="none"` plans without measurements: by default only single late steps are held,
    and with a `budget` the computed steps are a growing window.
    """

    method: ClassVar[str] = "plan"
    color: ClassVar[str] = "rose"
    vllm_omni: ClassVar[str] = "holdover_plan"

    profile: Profile | str | None = setting(
        None, doc='a Profile, a file, hf://owner/name or a shipped name; "none": unmeasured'
    )
    budget: int | str | None = setting(None, doc='computed steps, or a speed-up such as "4x"')
    target: str | None = setting(None, doc='minimum quality, such as "psnr>=40" or "ssim>=0.98"')
    schedule: tuple[int, ...] | None = setting(None, doc="the computed steps, counted from 0")
    predictor: str = setting(
        "auto", choices=("auto", "hold", "newton", "least_squares"), doc="how a held step is predicted"
    )
    quantity: str = setting("output", choices=("output", "seam"), doc="what is held: the model's output, or residuals")
    guard: bool = setting(True, doc="compute more steps where a generation is harder than the measured ones")

    @property
    def batchable(self) -> bool:
        return not self.guard

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("budget", "target", "schedule") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"PlanConfig takes one of budget, target and schedule, not {' and '.join(given)}.")
        if isinstance(self.budget, int) and self.budget < 1:
            raise ConfigError(f"PlanConfig.budget must be at least 1 computed step, not {self.budget}.")
        if isinstance(self.budget, str):
            steps_for(self.budget, 1)
        if self.target is not None:
            Target.parsed(self.target)
        steps = self.schedule
        if steps is not None and (not steps or min(steps) < 0 or len(set(steps)) < len(steps)):
            raise ConfigError(f"PlanConfig.schedule must be distinct steps counted from 0, not {list(steps)}.")
