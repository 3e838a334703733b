"""cache-dit: DBCache, SCM and TaylorSeer of the cache-dit library, with the step and branch known."""

from .adapters import CacheDiTAdapterConfig
from .backend import CUSTOM_DIT_ENABLERS, CacheDiTBackend, default_get_pipeline_transformer, logger
from .bagel import BagelCachedAdapter, BagelCachedBlocks, BagelCachedContextManager
from .config import CacheDiTConfig
from .enablers import (
    RefreshCacheContextFunc,
    build_cache_context_refresh,
    enable_cache_for_cosmos3,
    enable_cache_for_dit,
    enable_cache_for_wan22,
    enable_cache_for_wan22_s2v,
    may_enable_cache_dit,
)
from .sensenova import SensenovaCachedAdapter, SensenovaCachedBlocks
from .summary import cache_summary
from .wan_s2v import Wan22S2VCachedAdapter, Wan22S2VCachedBlocks

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
