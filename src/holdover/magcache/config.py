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

    `mag_ratios` are measured constants of the model, one per step, or one list per branch. By default they come from
    `profile`, else from a registered strategy, else from the shipped profile that matches the model. If they were
    measured with another number of steps, `interpolation` resamples the magnitude curve (`"log"`) or takes the nearest
    ratio, as the published code does (`"nearest"`).
    """

    method: ClassVar[str] = "mag_cache"
    color: ClassVar[str] = "violet"
    constants: ClassVar[str] = "mag_ratios"
    vllm_omni: ClassVar[str] = "holdover_mag_cache"

    profile: Profile | str | None = setting(
        None, doc="measured constants: a Profile, a file, or the name of a shipped profile"
    )
    interpolation: str = setting("log", choices=("log", "nearest"), doc="how ratios are adapted to another step count")
    calibration_path: str | None = setting(None, doc="file in which a calibration is saved as a profile")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="storage of held residuals")

    @property
    def batchable(self) -> bool:
        return True

    @property
    def calibrating(self) -> bool:
        """Whether to measure the ratios; the setting has two documented names."""
        return self.calibrate or self.mag_calibrate
