"""What is asked of the cache-dit library: its settings, its masks, and that it keeps quiet."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import cache_dit
from cache_dit.caching import DBCacheConfig, TaylorSeerCalibratorConfig

from ..errors import ConfigError
from .config import CacheDiTConfig


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Only errors of the library get through, unless CACHE_DIT_LOG_LEVEL says what shall."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("cache_dit") and isinstance(logger, logging.Logger)
    ]
    levels = [logger.level for logger in loggers]
    if "CACHE_DIT_LOG_LEVEL" not in os.environ:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def context_settings(settings: CacheDiTConfig) -> dict[str, Any]:
    """The settings of a cache-dit context, but for the mask.

    The number of steps, the branch and the step to begin anew at are known here, so the library counts none of them.
    """
    cache_config = DBCacheConfig(
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
    return {
        "cache_config": cache_config,
        "calibrator_config": calibrator if settings.enable_taylorseer else None,
    }


def steps_mask(policy: str, steps: int, of: str = "") -> list[int]:
    """The library's mask for exactly that many steps: 1 computes a step."""
    try:
        mask: list[int] = cache_dit.steps_mask(mask_policy=policy, total_steps=steps)
    except AssertionError:
        whose = f" that {of} handles" if of else ""
        raise ConfigError(
            f"SCM has no mask for the {steps} steps{whose}: it has one for 4, 6 and from 8 on. Run another number of "
            "steps, or leave scm_steps_mask_policy out."
        ) from None
    if len(mask) != steps:
        raise ConfigError(f"SCM's mask {policy!r} for {steps} steps has {len(mask)}: leave scm_steps_mask_policy out.")
    return mask
