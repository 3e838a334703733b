"""`holdover.enable`, `holdover.check` and `holdover.disable`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from .base import CacheBackend
from .config import Config
from .engine.backend import EngineBackend, find_cache, find_transformers
from .engine.backend import check as check
from .engine.hooks import has_hooks, remove_hooks
from .errors import ConfigError, NotEnabledError
from .selector import backend_class, backend_for_config, own_config

if TYPE_CHECKING:
    from .cache_dit_backend import CacheDiTBackend, CacheDiTConfig
    from .engine.parallel import Ranks
    from .magcache import MagCacheBackend, MagCacheConfig
    from .methods.easy_cache import EasyCacheBackend, EasyCacheConfig
    from .methods.first_block import FirstBlockBackend, FirstBlockConfig
    from .methods.sea_cache import SeaCacheBackend, SeaCacheConfig
    from .methods.spectrum import SpectrumBackend, SpectrumConfig
    from .methods.taylor_seer import TaylorSeerBackend, TaylorSeerConfig
    from .plan import PlanBackend, PlanConfig
    from .teacache import TeaCacheBackend, TeaCacheConfig


@overload
def enable(pipe: Any, method: Literal["tea_cache"] | TeaCacheConfig, /, **settings: Any) -> TeaCacheBackend: ...
@overload
def enable(pipe: Any, method: Literal["mag_cache"] | MagCacheConfig, /, **settings: Any) -> MagCacheBackend: ...
@overload
def enable(pipe: Any, method: Literal["cache_dit"] | CacheDiTConfig, /, **settings: Any) -> CacheDiTBackend: ...
@overload
def enable(pipe: Any, method: Literal["plan"] | PlanConfig, /, **settings: Any) -> PlanBackend: ...
@overload
def enable(pipe: Any, method: Literal["easy_cache"] | EasyCacheConfig, /, **settings: Any) -> EasyCacheBackend: ...
@overload
def enable(pipe: Any, method: Literal["sea_cache"] | SeaCacheConfig, /, **settings: Any) -> SeaCacheBackend: ...
@overload
def enable(pipe: Any, method: Literal["first_block"] | FirstBlockConfig, /, **settings: Any) -> FirstBlockBackend: ...
@overload
def enable(pipe: Any, method: Literal["taylor_seer"] | TaylorSeerConfig, /, **settings: Any) -> TaylorSeerBackend: ...
@overload
def enable(pipe: Any, method: Literal["spectrum"] | SpectrumConfig, /, **settings: Any) -> SpectrumBackend: ...
@overload
def enable(pipe: Any, method: str | Config, /, **settings: Any) -> CacheBackend: ...
def enable(pipe: Any, method: str | Config, /, *, ranks: Ranks | None = None, **settings: Any) -> CacheBackend:
    """Enable a cache on a pipeline or a transformer and return it.

    `method` is a name (`"tea_cache"`, `"mag_cache"`, `"cache_dit"`, `"plan"`, `"easy_cache"`, `"sea_cache"`,
    `"first_block"`, `"taylor_seer"`, `"spectrum"`, `"none"`) with its settings as keywords, or a config object. `ranks`
    are the process groups that one request runs on; they are needed only if the transformer itself does not show them.
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
