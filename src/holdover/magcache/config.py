"""Settings of MagCache."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from ..base import MagCacheSettings
from ..config import setting
from ..errors import ConfigError
from ..profiles import Profile


@dataclass(frozen=True)
class MagCacheConfig(MagCacheSettings):
    """Hold while the accumulated magnitude error is at most `mag_threshold`.

    `mag_ratios` are measured constants of the model, one per step, or one list per branch. By default they come from
    `profile`, else from a registered strategy, else from the shipped profile that matches the model. If they were
    measured with another number of steps, `interpolation` resamples the magnitude curve (`"log"`) or takes the nearest
    ratio, as the published code does (`"nearest"`). `transformer_type` is the class whose strategy and ratios are used,
    by default the transformer's own.

    `threshold`, `max_skip_steps` and `retention_ratio`, the names in diffusers and vLLM-Omni, are accepted too.
    """

    method: ClassVar[str] = "mag_cache"
    color: ClassVar[str] = "violet"
    constants: ClassVar[str] = "mag_ratios"
    vllm_omni: ClassVar[str] = "holdover_mag_cache"

    profile: Profile | str | None = setting(
        None, doc="measured: a Profile, a file, hf://owner/name/file or a shipped name"
    )
    interpolation: str = setting("log", choices=("log", "nearest"), doc="how ratios are adapted to another step count")
    calibration_path: str | None = setting(None, doc="file in which a calibration is saved as a profile")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="storage of held residuals")
    transformer_type: str = setting(
        "", doc="class whose strategy and ratios are used; by default the transformer's own"
    )

    @property
    def batchable(self) -> bool:
        return True

    @property
    def calibrating(self) -> bool:
        """Whether to measure the ratios; the setting has two documented names."""
        return self.calibrate or self.mag_calibrate

    @property
    def threshold(self) -> float:
        """`mag_threshold` under its name in diffusers and vLLM-Omni."""
        return self.mag_threshold

    @property
    def max_skip_steps(self) -> int:
        """`mag_max_skip_steps` under its name in diffusers and vLLM-Omni."""
        return self.mag_max_skip_steps

    @property
    def retention_ratio(self) -> float:
        """`mag_retention_ratio` under its name in diffusers and vLLM-Omni."""
        return self.mag_retention_ratio


def _accept_short_names(init: Any) -> Any:
    """The `__init__` of MagCacheConfig, also for settings without the prefix `mag_`."""

    @functools.wraps(init)
    def __init__(self: MagCacheConfig, *args: Any, **settings: Any) -> None:  # noqa: N807
        for short in ("threshold", "max_skip_steps", "retention_ratio"):
            if short in settings:
                if f"mag_{short}" in settings:
                    raise ConfigError(f"{short} and mag_{short} are the same setting: give one of them.")
                settings[f"mag_{short}"] = settings.pop(short)
        init(self, *args, **settings)

    return __init__


MagCacheConfig.__init__ = _accept_short_names(MagCacheConfig.__init__)  # type: ignore[method-assign]
