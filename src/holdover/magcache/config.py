"""Settings of MagCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Ratios, check_ratios, ratios_by_branch
from ..config import Config, setting


@dataclass(frozen=True)
class MagCacheConfig(Config):
    """Hold while the accumulated magnitude error is at most `mag_threshold`.

    `mag_ratios` are measured constants of the model, one a step, or one list a branch; without them they come from a
    registered strategy, from `profile`, or from the profile that fits the model. For another step count `interpolation`
    keeps the magnitude curve (`"log"`) or takes the nearest ratio as the published code does (`"nearest"`).
    """

    method: ClassVar[str] = "mag_cache"

    mag_threshold: float = setting(0.24, ge=0, doc="hold while the accumulated error is at most this")
    mag_max_skip_steps: int = setting(5, ge=0, doc="hold at most this many steps in a row")
    mag_retention_ratio: float = setting(0.1, ge=0, le=1, doc="part of the steps at the start that is always computed")
    num_inference_steps: int = setting(28, ge=1, doc="number of steps where no scheduler says it")
    mag_ratios: Ratios | None = setting(None, doc="magnitude ratios, one a step; by branch where they differ")
    calibrate: bool = setting(False, doc="hold nothing and measure the magnitude ratios")
    mag_calibrate: bool = setting(False, doc="the same under its other documented name")
    profile: str | None = setting(None, doc="name of a shipped profile, or path of a saved one")
    interpolation: str = setting("log", choices=("log", "nearest"), doc="how ratios are taken to another step count")
    calibration_path: str | None = setting(None, doc="where a calibration is saved as a profile")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="where residuals are held, and in what form")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratios(self.mag_ratios, type(self).__name__)

    @property
    def calibrating(self) -> bool:
        """Whether the ratios are being measured, under either name."""
        return self.calibrate or self.mag_calibrate

    @property
    def ratios_by_branch(self) -> dict[str, tuple[float, ...]]:
        """The given ratios; the branch is `""` where one list serves all."""
        return ratios_by_branch(self.mag_ratios)
