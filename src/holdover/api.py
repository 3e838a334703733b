"""`holdover.enable`, `holdover.check` and `holdover.disable`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from .base import CacheBackend
from .config import Config
from .engine.backend import EngineBackend, find_cache
from .engine.backend import check as check
from .engine.hooks import has_hooks, remove_hooks
from .errors import ConfigError, NotEnabledError
from .models.pipelines import find_transformers
from .selector import backend_class, backend_for_config, own_config

# generated: signatures
if TYPE_CHECKING:
    import holdover.cache_dit_backend.backend
    import holdover.cache_dit_backend.config
    import holdover.engine.backend
    import holdover.engine.method
    import holdover.magcache.backend
    import holdover.magcache.config
    import holdover.methods.easy_cache
    import holdover.methods.first_block
    import holdover.methods.sea_cache
    import holdover.methods.spectrum
    import holdover.methods.taylor_seer
    import holdover.plan.config
    import holdover.plan.method
    import holdover.teacache.backend
    import holdover.teacache.config

    from . import keywords
    from .engine.parallel import Ranks


@overload
def enable(
    pipe: Any,
    method: Literal["tea_cache"] | holdover.teacache.config.TeaCacheConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.TeaCacheKeywords],
) -> holdover.teacache.backend.TeaCacheBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["mag_cache"] | holdover.magcache.config.MagCacheConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.MagCacheKeywords],
) -> holdover.magcache.backend.MagCacheBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["cache_dit"] | holdover.cache_dit_backend.config.CacheDiTConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.CacheDiTKeywords],
) -> holdover.cache_dit_backend.backend.CacheDiTBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["plan"] | holdover.plan.config.PlanConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.PlanKeywords],
) -> holdover.plan.method.PlanBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["easy_cache"] | holdover.methods.easy_cache.EasyCacheConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.EasyCacheKeywords],
) -> holdover.methods.easy_cache.EasyCacheBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["sea_cache"] | holdover.methods.sea_cache.SeaCacheConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.SeaCacheKeywords],
) -> holdover.methods.sea_cache.SeaCacheBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["first_block"] | holdover.methods.first_block.FirstBlockConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.FirstBlockKeywords],
) -> holdover.methods.first_block.FirstBlockBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["taylor_seer"] | holdover.methods.taylor_seer.TaylorSeerConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.TaylorSeerKeywords],
) -> holdover.methods.taylor_seer.TaylorSeerBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["spectrum"] | holdover.methods.spectrum.SpectrumConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.SpectrumKeywords],
) -> holdover.methods.spectrum.SpectrumBackend: ...
@overload
def enable(
    pipe: Any,
    method: Literal["none"] | holdover.engine.method.NoneConfig,
    /,
    *,
    ranks: Ranks | None = None,
    **settings: Unpack[keywords.NoneKeywords],
) -> holdover.engine.backend.NoneBackend: ...
# end
@overload
def enable(pipe: Any, method: str | Config, /, *, ranks: Ranks | None = None) -> CacheBackend: ...
def enable(pipe: Any, method: str | Config, /, *, ranks: Ranks | None = None, **settings: Any) -> CacheBackend:
    """Enable a cache on a pipeline or a transformer and return it.

    `method` is the name of a method with its settings as keywords, or a config object such as `holdover.PlanConfig`,
    whose docstring has every setting; `holdover methods` lists them all. `ranks` are the process groups that one
    request runs on; they are needed only if the transformer itself does not show them.

    Type checkers know the settings of each method that is named literally. For a name that is only known at run time,
    pass the settings as `**settings`, or a config object.
    """
    if isinstance(method, Config):
        backend = backend_for_config(method.replaced(**settings) if settings else method)
    elif isinstance(method, str):
        backend = backend_class(method)(own_config(method, settings))
    else:
        raise ConfigError(f"A method is a name or a config, not {method!r}.")
    backend.enable(pipe)
    if ranks is not None:
        try:
            if not isinstance(backend, EngineBackend):
                raise ConfigError(f"{type(backend).__name__} does not run on several ranks: leave out ranks=.")
            backend.set_ranks(ranks)
        except ConfigError:
            backend.disable()
            raise
    return backend


def disable(target: Any) -> None:
    """Disable the cache that is enabled on a pipeline or a transformer; documented hooks are removed."""
    cache = find_cache(target)
    if cache is not None:
        cache.disable()
        return
    hooked = [module for module in find_transformers(target).values() if has_hooks(module)]
    if not hooked:
        raise NotEnabledError(f"There is no holdover cache on this {type(target).__name__}.")
    for module in hooked:
        remove_hooks(module)
