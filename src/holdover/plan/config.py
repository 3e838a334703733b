"""Settings of the planned cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import Config, setting
from ..errors import ConfigError
from ..profiles import Profile
from .target import Target, speed_up

DEFAULT_BUDGET = "3x"


@dataclass(frozen=True)
class PlanConfig(Config):
    """Hold by a plan that is made before the first step.

    One of `budget`, `target` and `schedule` says what is wanted; without any it is `budget="3x"`. `profile` is what
    `holdover.calibrate` measured: the object, a file, or the name of a shipped one. Without one the shipped profile of
    this very model is used, and where there is none, Newton's extrapolation on a growing window.
    """

    method: ClassVar[str] = "plan"
    color: ClassVar[str] = "rose"
    vllm_omni: ClassVar[str] = "holdover_plan"

    profile: Profile | str | None = setting(None, doc="what was measured: a Profile, a file, or a shipped one's name")
    budget: int | str | None = setting(None, doc='computed steps, or a speed-up such as "4x"')
    target: str | None = setting(None, doc='least quality, such as "psnr>=40" or "ssim>=0.98"')
    schedule: tuple[int, ...] | None = setting(None, doc="the computed steps themselves, counted from 0")
    predictor: str = setting(
        "auto", choices=("auto", "hold", "newton", "least_squares"), doc="what a held step is made of"
    )
    quantity: str = setting("output", choices=("output", "seam"), doc="what is held: the model's output, or residuals")
    guard: bool = setting(True, doc="compute more where a generation is harder than those measured")

    @property
    def batchable(self) -> bool:
        return not self.guard

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("budget", "target", "schedule") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"PlanConfig takes one of budget, target and schedule, not {' and '.join(given)}.")
        _check_budget(self.budget)
        if self.target is not None:
            Target.parsed(self.target)
        if self.schedule is not None:
            _check_schedule(self.schedule)


def _check_budget(budget: int | str | None) -> None:
    if isinstance(budget, int) and budget < 1:
        raise ConfigError(f"PlanConfig.budget must be at least 1 computed step, not {budget}.")
    if isinstance(budget, str):
        speed_up(budget)


def _check_schedule(schedule: tuple[int, ...]) -> None:
    if not schedule or min(schedule) < 0 or len(set(schedule)) < len(schedule):
        raise ConfigError(f"PlanConfig.schedule must be distinct steps counted from 0, not {list(schedule)}.")
