"""TeaCache: hold while the timestep-modulated input has changed little."""

from ..context import CacheContext
from ..models.registry import get_extractor, register_extractor, unregister_extractor
from ..policies.teacache import TeaCacheState
from .backend import TeaCacheBackend
from .config import TeaCacheConfig
from .estimate import estimate_coefficients
from .hook import TeaCacheHook, apply_teacache_hook

__all__ = [
    "CacheContext",
    "TeaCacheBackend",
    "TeaCacheConfig",
    "TeaCacheHook",
    "TeaCacheState",
    "apply_teacache_hook",
    "estimate_coefficients",
    "get_extractor",
    "register_extractor",
    "unregister_extractor",
]
