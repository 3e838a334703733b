"""Settings of TeaCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import TeaCacheSettings
from ..config import setting
from ..profiles import Profile

UNNAMED = "QwenImageTransformer2DModel"  # the documented default, which stands for the transformer's own class


@dataclass(frozen=True)
class TeaCacheConfig(TeaCacheSettings):
    """Hold while the accumulated, rescaled change of the signal stays below `rel_l1_thresh`.

    `coefficients` are the rescaling polynomial, highest power first; without them they come from `profile` (what
    `holdover.calibrate` measured, a file, or a shipped one's name), else from the profile that fits the model. `signal`
    chooses among a model's signals (Wan has `e` and `e0`). `transformer_type` is the class whose constants are
    used; a backend fills it in. `read="late"` waits for the change at computed steps alone, and takes it for that of
    the held steps that follow.
    """

    method: ClassVar[str] = "tea_cache"
    color: ClassVar[str] = "teal"
    constants: ClassVar[str] = "coefficients"
    vllm_omni: ClassVar[str] = "holdover_tea_cache"

    transformer_type: str = setting(UNNAMED, doc="class whose constants are used")
    profile: Profile | str | None = setting(None, doc="what was measured: a Profile, a file, or a shipped one's name")
    signal: str | None = setting(None, doc="which of the model's signals to compare")
    read: str = setting("now", choices=("now", "late"), doc="wait for each step's change, or only for computed steps'")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="where residuals are held, and in what form")
