"""Settings of the planned cache: a budget such as `4x`, a target such as `psnr>=40`, a quality by name, a schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..config import Config, setting
from ..errors import ConfigError
from ..metrics import psnr, ssim
from ..profiles import Profile
from ..profiles.targets import QUALITY_TARGETS, Target

DEFAULT_BUDGET = "3x"
NO_PROFILE = "none"  # as `profile`: plan without measurements
METRICS = {"psnr": psnr, "ssim": ssim}
_SPEED_UP = re.compile(r"\s*(\d+(?:\.\d+)?)\s*x\s*")


def steps_for(budget: int | str, steps: int) -> int:
    """The number of computed steps that a budget (`10` or `"4x"`) allows in a generation of `steps` steps."""
    if isinstance(budget, int) and not isinstance(budget, bool):
        return min(budget, steps)
    match = _SPEED_UP.fullmatch(budget) if isinstance(budget, str) else None
    if match is None or float(match[1]) < 1:
        raise ConfigError(
            f"A budget is a number of computed steps or a speed-up of at least 1x like '4x', not {budget!r}."
        )
    return max(1, int(steps / float(match[1])))


@dataclass(frozen=True)
class PlanConfig(Config):
    """Compute and hold steps according to a plan that is made before the first step.

    Set one of `budget`, `target`, `quality` and `schedule`; the default is `budget="3x"`. `profile` is the result of
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
    quality: str | None = setting(
        None, choices=(None, *QUALITY_TARGETS), doc="minimum quality by name: a target that the profile may set"
    )
    schedule: tuple[int, ...] | None = setting(None, doc="the computed steps, counted from 0")
    predictor: str = setting(
        "auto", choices=("auto", "hold", "newton", "least_squares"), doc="how a held step is predicted"
    )
    quantity: str = setting("output", choices=("output", "seam"), doc="what is held: the model's output, or residuals")

    @property
    def batchable(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("budget", "target", "quality", "schedule") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"PlanConfig takes one of budget, target, quality and schedule, not {' and '.join(given)}."
            )
        if isinstance(self.budget, int) and self.budget < 1:
            raise ConfigError(f"PlanConfig.budget must be at least 1 computed step, not {self.budget}.")
        if isinstance(self.budget, str):
            steps_for(self.budget, 1)
        if self.target is not None:
            Target.parsed(self.target)
        steps = self.schedule
        if steps is not None and (not steps or min(steps) < 0 or len(set(steps)) < len(steps)):
            raise ConfigError(f"PlanConfig.schedule must be distinct steps counted from 0, not {list(steps)}.")
