"""Settings of MagCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import MagCacheSettings
from ..config import setting
from ..profiles import Profile


@dataclass(frozen=True)
class MagCacheConfig(MagCacheSettings):
    """Hold while the accumulated magnitude error is at most `mag_threshold`.

    `mag_ratios` are measured constants of the model, one a step, or one list a branch; without them they come from a
    registered strategy, from `profile`, or from the profile that fits the model. For another step count `interpolation`
    keeps the magnitude curve (`"log"`) or takes the nearest ratio as the published code does (`"nearest"`).
    """

    method: ClassVar[str] = "mag_cache"
    color: ClassVar[str] = "violet"
    constants: ClassVar[str] = "mag_ratios"
    vllm_omni: ClassVar[str] = "holdover_mag_cache"

    profile: Profile | str | None = setting(None, doc="what was measured: a Profile, a file, or a shipped one's name")
    interpolation: str = setting("log", choices=("log", "nearest"), doc="how ratios are taken to another step count")
    calibration_path: str | None = setting(None, doc="where a calibration is saved as a profile")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="where residuals are held, and in what form")

    @property
    def batchable(self) -> bool:
        return True

    @property
    def calibrating(self) -> bool:
        """Whether the ratios are being measured, under either name."""
        return self.calibrate or self.mag_calibrate
