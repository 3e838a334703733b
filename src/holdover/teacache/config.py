"""Settings of TeaCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import TeaCacheSettings
from ..config import setting
from ..profiles import Profile

OWN_CLASS = ("auto", "QwenImageTransformer2DModel")  # both mean the transformer's own; the second is documented
DEFAULT_THRESHOLD = 0.2
# What `rel_l1_thresh=None` means for a class, if not 0.2. From vllm-omni 0.30.0, diffusion/cache/teacache/config.py:97
MODEL_THRESHOLDS = {"MiniMaxH3DiTModel": 0.17, "MiniMaxH3Transformer3DModel": 0.17}


@dataclass(frozen=True)
class TeaCacheConfig(TeaCacheSettings):
    """Hold while the accumulated, rescaled change of the signal stays below `rel_l1_thresh`.

    `coefficients` are the rescaling polynomial, highest power first. By default they come from `profile`: a Profile
    object, a file, or the name of a shipped profile; else from the shipped profile that matches the model. `signal`
    selects one of the model's signals (Wan has `e` and `e0`). `transformer_type` is the class whose constants are used:
    by default, and for `"auto"`, the transformer's own; an extractor registered for it is used. `read="late"` reads the
    change of the signal at computed steps only and uses it for the held steps that follow. `clamp=False` and
    `compute_last=False` are vLLM-Omni's rule: the polynomial as it is, and a last step that may be held. With
    `rel_l1_thresh=None`, `threshold` is the default of that class.
    """

    method: ClassVar[str] = "tea_cache"
    color: ClassVar[str] = "teal"
    constants: ClassVar[str] = "coefficients"
    vllm_omni: ClassVar[str] = "holdover_tea_cache"

    transformer_type: str = setting(
        OWN_CLASS[1], doc='class whose constants are used; the default and "auto" mean its own'
    )
    profile: Profile | str | None = setting(
        None, doc="measured: a Profile, a file, hf://owner/name/file or a shipped name"
    )
    signal: str | None = setting(None, doc="name of the model's signal to compare")
    read: str = setting("now", choices=("now", "late"), doc="read the change at every step, or only at computed steps")
    clamp: bool = setting(True, doc="use the polynomial only on the range where it can be trusted")
    compute_last: bool = setting(True, doc="always compute the last step")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="storage of held residuals")

    @property
    def threshold(self) -> float:
        """`rel_l1_thresh`, or the default of the class in `transformer_type`."""
        if self.rel_l1_thresh is not None:
            return self.rel_l1_thresh
        return MODEL_THRESHOLDS.get(self.transformer_type, DEFAULT_THRESHOLD)
