"""MagCache: hold while the residual's magnitude has changed little."""

from .backend import MagCacheBackend
from .config import MagCacheConfig
from .hook import MagCacheBlockHook, MagCacheHeadHook, apply_mag_cache_hook
from .state import MagCacheState
from .strategy import (
    Flux2MagCacheStrategy,
    FluxMagCacheStrategy,
    MagCacheStrategy,
    MagCacheStrategyRegistry,
    TransformerBlockMetadata,
    get_strategy,
    register_strategy,
    unregister_strategy,
)

__all__ = [
    "Flux2MagCacheStrategy",
    "FluxMagCacheStrategy",
    "MagCacheBackend",
    "MagCacheBlockHook",
    "MagCacheConfig",
    "MagCacheHeadHook",
    "MagCacheState",
    "MagCacheStrategy",
    "MagCacheStrategyRegistry",
    "TransformerBlockMetadata",
    "apply_mag_cache_hook",
    "get_strategy",
    "register_strategy",
    "unregister_strategy",
]
