"""The cache-dit library by itself, on one pipeline of a class of its own: it patches the pipeline's class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cache_dit
from cache_dit import CalibratorConfig, DBCacheConfig, TaylorSeerCalibratorConfig

from holdover.cache_dit_backend.config import quiet_library


@contextmanager
def library(
    pipe: Any, taylorseer: int = 0, calibrator: CalibratorConfig | None = None, **settings: Any
) -> Iterator[None]:
    """Plain cache-dit on this pipeline while inside."""
    own = type(pipe)
    pipe.__class__ = type(own.__name__, (own,), {"__module__": own.__module__})
    if taylorseer:
        calibrator = TaylorSeerCalibratorConfig(taylorseer_order=taylorseer)
    with quiet_library():
        cache_dit.enable_cache(pipe, cache_config=DBCacheConfig(**settings), calibrator_config=calibrator)
    try:
        yield
    finally:
        with quiet_library():
            cache_dit.disable_cache(pipe)
        pipe.__class__ = own


def trace(pipe: Any, steps: int, branch: str = "cond") -> str:
    """`C` and `h` for each step of the library's last generation."""
    held = pipe.transformer._cached_steps if branch == "cond" else pipe.transformer._cfg_cached_steps
    return "".join("h" if step in held else "C" for step in range(steps))
