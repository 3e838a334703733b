"""MagCache: hold while the residual's magnitude has changed little."""

from .backend import MagCacheBackend
from .config import MagCacheConfig
from .hook import MagCacheBlockHook, MagCacheHeadHook, apply_mag_cache_hook
from .state import MagCacheState
from .strategy import (
    FluxMagCacheStrategy,
    MagCacheStrategy,
    TransformerBlockMetadata,
    register_strategy,
    unregister_strategy,
)

__all__ = [
    "FluxMagCacheStrategy",
    "MagCacheBackend",
    "MagCacheBlockHook",
    "MagCacheConfig",
    "MagCacheHeadHook",
    "MagCacheState",
    "MagCacheStrategy",
    "TransformerBlockMetadata",
    "apply_mag_cache_hook",
    "register_strategy",
    "unregister_strategy",
]
