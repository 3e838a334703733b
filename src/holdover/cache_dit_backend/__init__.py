"""cache-dit: DBCache, SCM and TaylorSeer of the cache-dit library, with step and branch known instead of counted."""

try:
    import cache_dit as _cache_dit  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "cache_dit":
        raise
    raise ModuleNotFoundError(
        "holdover.cache_dit_backend needs the cache-dit library: pip install 'holdover[cache-dit]'.", name="cache_dit"
    ) from None

from .adapters import CacheDiTAdapterConfig
from .backend import (
    CUSTOM_DIT_ENABLERS,
    CacheDiTBackend,
    CacheDiTEnableResult,
    CacheDiTRequestSpec,
    RefreshCacheContextFunc,
    RequestScopedCacheDiTRuntime,
    build_cache_context_refresh,
    cache_summary,
    default_get_pipeline_transformer,
    enable_cache_for_dit,
    logger,
    may_enable_cache_dit,
)
from .config import CacheDiTConfig
from .enablers import (
    enable_cache_for_cosmos3,
    enable_cache_for_krea2,
    enable_cache_for_magi2,
    enable_cache_for_mammothmoda2,
    enable_cache_for_wan22,
    enable_cache_for_wan22_s2v,
)
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
    "CacheDiTEnableResult",
    "CacheDiTRequestSpec",
    "RefreshCacheContextFunc",
    "RequestScopedCacheDiTRuntime",
    "SensenovaCachedAdapter",
    "SensenovaCachedBlocks",
    "Wan22S2VCachedAdapter",
    "Wan22S2VCachedBlocks",
    "build_cache_context_refresh",
    "cache_summary",
    "default_get_pipeline_transformer",
    "enable_cache_for_cosmos3",
    "enable_cache_for_dit",
    "enable_cache_for_krea2",
    "enable_cache_for_magi2",
    "enable_cache_for_mammothmoda2",
    "enable_cache_for_wan22",
    "enable_cache_for_wan22_s2v",
    "logger",
    "may_enable_cache_dit",
]
