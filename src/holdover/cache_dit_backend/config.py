"""Settings of the cache-dit backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import Config, setting


@dataclass(frozen=True)
class CacheDiTConfig(Config):
    """Hold while the residual of the first blocks differs by less than `residual_diff_threshold` (DBCache).

    The first `Fn_compute_blocks` and the last `Bn_compute_blocks` of every list run at every step; what lies between is
    held. `enable_taylorseer` extrapolates what is held. `scm_steps_mask_policy` says beforehand which steps are
    computed; the others may be held (`scm_steps_policy="dynamic"`) or are (`"static"`).
    """

    method: ClassVar[str] = "cache_dit"

    Fn_compute_blocks: int = setting(1, ge=1, doc="blocks at the start that always run")
    Bn_compute_blocks: int = setting(0, ge=0, doc="blocks at the end that always run")
    max_warmup_steps: int = setting(4, ge=0, doc="steps at the start that are always computed")
    max_cached_steps: int = setting(-1, ge=-1, doc="hold at most this many steps in all; -1 for no limit")
    max_continuous_cached_steps: int = setting(3, ge=-1, doc="hold at most this many steps in a row; -1 for no limit")
    residual_diff_threshold: float = setting(0.24, ge=0, doc="hold while the first blocks' residual differs by less")
    enable_taylorseer: bool = setting(False, doc="extrapolate the held residual")
    taylorseer_order: int = setting(1, ge=1, le=4, doc="order of the extrapolation")
    scm_steps_mask_policy: str | None = setting(
        None, choices=(None, "slow", "medium", "fast", "ultra"), doc="preset mask of computed steps"
    )
    scm_steps_policy: str = setting(
        "dynamic", choices=("dynamic", "static"), doc="whether the mask is permission or order"
    )
    force_refresh_step_hint: int | None = setting(None, ge=0, doc="begin anew at this step, warm-up included")
    force_refresh_step_policy: str = setting(
        "once", choices=("once", "repeat"), doc="at that step, or at each multiple"
    )
    num_inference_steps: int | None = setting(None, ge=1, doc="number of steps where no scheduler says it")
