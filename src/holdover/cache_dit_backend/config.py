"""Settings of the cache-dit backend, and their translation into the cache-dit library's own."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cache_dit
from cache_dit.caching import DBCacheConfig, TaylorSeerCalibratorConfig

from ..base import CacheDiTSettings
from ..config import setting
from ..errors import ConfigError


@dataclass(frozen=True)
class CacheDiTConfig(CacheDiTSettings):
    """Hold while the residual of the first blocks differs by less than `residual_diff_threshold` (DBCache).

    The first `Fn_compute_blocks` and the last `Bn_compute_blocks` of every list run at every step; the blocks between
    them are held. `enable_taylorseer` extrapolates the held residual. `scm_steps_mask_policy` selects a mask of
    computed steps: the other steps may be held (`scm_steps_policy="dynamic"`) or are always held (`"static"`).
    """

    method: ClassVar[str] = "cache_dit"
    color: ClassVar[str] = "amber"
    vllm_omni: ClassVar[str] = "holdover_cache_dit"

    num_inference_steps: int | None = setting(None, ge=1, doc="number of steps if there is no scheduler")

    def check_steps(self, steps: int | None) -> None:
        """Raise a ConfigError if the SCM policy has no mask for that many steps; invalid counts pass."""
        if self.scm_steps_mask_policy is not None and type(steps) is int and steps > 0:
            steps_mask(self.scm_steps_mask_policy, steps)


def context_settings(settings: CacheDiTConfig) -> dict[str, Any]:
    """Keyword arguments for a cache-dit context, without mask, steps, branch and refresh step: holdover knows these."""
    config = DBCacheConfig(
        Fn_compute_blocks=settings.Fn_compute_blocks,
        Bn_compute_blocks=settings.Bn_compute_blocks,
        max_warmup_steps=settings.max_warmup_steps,
        max_cached_steps=settings.max_cached_steps,
        max_continuous_cached_steps=settings.max_continuous_cached_steps,
        residual_diff_threshold=settings.residual_diff_threshold,
        steps_computation_policy=settings.scm_steps_policy,
        enable_separate_cfg=False,
    )
    calibrator = TaylorSeerCalibratorConfig(taylorseer_order=settings.taylorseer_order)
    return {"cache_config": config, "calibrator_config": calibrator if settings.enable_taylorseer else None}


def steps_mask(policy: str, steps: int, transformer: str = "") -> list[int]:
    """The library's SCM mask for exactly `steps` steps, which `transformer` runs if it is an expert; 1 computes."""
    try:
        return list(cache_dit.steps_mask(mask_policy=policy, total_steps=steps))
    except AssertionError:
        owner = f" that {transformer} handles" if transformer else ""
        raise ConfigError(
            f"SCM has no mask for the {steps} steps{owner}: it has masks for 4, 6, and 8 or more steps. Change the "
            "number of steps, or leave scm_steps_mask_policy out."
        ) from None


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """Silence the library's log below ERROR, unless CACHE_DIT_LOG_LEVEL is set."""
    names = [] if "CACHE_DIT_LOG_LEVEL" in os.environ else list(logging.root.manager.loggerDict)
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names if name.startswith("cache_dit")}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
