"""Settings of the cache-dit backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import CacheDiTSettings
from ..config import setting


@dataclass(frozen=True)
class CacheDiTConfig(CacheDiTSettings):
    """Hold while the residual of the first blocks differs by less than `residual_diff_threshold` (DBCache).

    The first `Fn_compute_blocks` and the last `Bn_compute_blocks` of every list run at every step; what lies between is
    held. `enable_taylorseer` extrapolates what is held. `scm_steps_mask_policy` says beforehand which steps are
    computed; the others may be held (`scm_steps_policy="dynamic"`) or are (`"static"`).
    """

    method: ClassVar[str] = "cache_dit"
    color: ClassVar[str] = "amber"
    vllm_omni: ClassVar[str] = "holdover_cache_dit"

    num_inference_steps: int | None = setting(None, ge=1, doc="number of steps where no scheduler says it")
