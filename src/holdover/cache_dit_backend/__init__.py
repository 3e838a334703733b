"""cache-dit: DBCache, SCM and TaylorSeer of the cache-dit library, with step and branch known instead of counted."""

from .adapters import CacheDiTAdapterConfig
from .backend import (
    CUSTOM_DIT_ENABLERS,
    CacheDiTBackend,
    RefreshCacheContextFunc,
    build_cache_context_refresh,
    cache_summary,
    default_get_pipeline_transformer,
    enable_cache_for_cosmos3,
    enable_cache_for_dit,
    enable_cache_for_wan22,
    enable_cache_for_wan22_s2v,
    logger,
    may_enable_cache_dit,
)
from .config import CacheDiTConfig
from .model_adapters import (
    BagelCachedAdapter,
    BagelCachedBlocks,
    BagelCachedContextManager,
    SensenovaCachedAdapter,
    SensenovaCachedBlocks,
    Wan22S2VCachedAdapter,
    Wan22S2VCachedBlocks,
)

__all__ = [
    "CUSTOM_DIT_ENABLERS",
    "BagelCachedAdapter",
    "BagelCachedBlocks",
    "BagelCachedContextManager",
    "CacheDiTAdapterConfig",
    "CacheDiTBackend",
    "CacheDiTConfig",
    "RefreshCacheContextFunc",
    "SensenovaCachedAdapter",
    "SensenovaCachedBlocks",
    "Wan22S2VCachedAdapter",
    "Wan22S2VCachedBlocks",
    "build_cache_context_refresh",
    "cache_summary",
    "default_get_pipeline_transformer",
    "enable_cache_for_cosmos3",
    "enable_cache_for_dit",
    "enable_cache_for_wan22",
    "enable_cache_for_wan22_s2v",
    "logger",
    "may_enable_cache_dit",
]
