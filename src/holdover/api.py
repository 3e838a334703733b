"""The one verb, and its undoing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from .base import CacheBackend
from .config import Config
from .errors import ConfigError, NotEnabledError
from .selector import backend_class, backend_for_config, own_config

if TYPE_CHECKING:
    from torch import nn

    from .cache_dit_backend import CacheDiTBackend, CacheDiTConfig
    from .magcache import MagCacheBackend, MagCacheConfig
    from .plan import PlanBackend, PlanConfig
    from .engine.parallel import Ranks
    from .engine.verify import ReplayReport
    from .teacache import TeaCacheBackend, TeaCacheConfig


@overload
def enable(pipe: Any, method: Literal["tea_cache"], /, **settings: Any) -> TeaCacheBackend: ...
@overload
def enable(pipe: Any, method: TeaCacheConfig, /, **settings: Any) -> TeaCacheBackend: ...
@overload
def enable(pipe: Any, method: Literal["mag_cache"], /, **settings: Any) -> MagCacheBackend: ...
@overload
def enable(pipe: Any, method: MagCacheConfig, /, **settings: Any) -> MagCacheBackend: ...
@overload
def enable(pipe: Any, method: Literal["cache_dit"], /, **settings: Any) -> CacheDiTBackend: ...
@overload
def enable(pipe: Any, method: CacheDiTConfig, /, **settings: Any) -> CacheDiTBackend: ...
@overload
def enable(pipe: Any, method: Literal["plan"], /, **settings: Any) -> PlanBackend: ...
@overload
def enable(pipe: Any, method: PlanConfig, /, **settings: Any) -> PlanBackend: ...
@overload
def enable(pipe: Any, method: str | Config, /, **settings: Any) -> CacheBackend: ...
def enable(pipe: Any, method: str | Config, /, *, ranks: Ranks | None = None, **settings: Any) -> CacheBackend:
    """Put a cache on a pipeline or a transformer and return it, enabled.

    `method` is a name (`"tea_cache"`, `"mag_cache"`, `"cache_dit"`, `"plan"`, `"none"`) with its settings as
    keywords, or a config object. `ranks` are the groups of processes one request runs over, where the transformer does
    not show them.
    """
    if isinstance(method, Config):
        backend = backend_for_config(method.replaced(**settings) if settings else method)
    elif isinstance(method, str):
        backend = backend_class(method)(own_config(method, settings))
    else:
        raise ConfigError(f"A method is a name or a config, not {method!r}.")
    backend.enable(pipe)
    if ranks is not None:
        _state(backend, ranks)
    return backend


def _state(backend: CacheBackend, ranks: Ranks) -> None:
    """Tell an enabled cache its ranks; where they are wrong, take it off again."""
    from .engine.backend import EngineBackend

    try:
        if not isinstance(backend, EngineBackend):
            raise ConfigError(f"{type(backend).__name__} does not run over several ranks: leave out ranks=.")
        backend.set_ranks(ranks)
    except ConfigError:
        backend.disable()
        raise


def check(transformer: nn.Module, **inputs: Any) -> ReplayReport:
    """Whether a held step of this transformer replays a computed one, measured on these inputs.

    One full forward and one forced hold on the same inputs, compared by output and by stream; the transformer is not
    changed. `print(report)` says where the cut runs.
    """
    from .engine.backend import check as replay

    return replay(transformer, **inputs)


def disable(target: Any) -> None:
    """Take off whatever cache is on a pipeline or a transformer."""
    from .engine.backend import find_cache

    cache = find_cache(target)
    if cache is None:
        raise NotEnabledError(f"There is no holdover cache on this {type(target).__name__}.")
    cache.disable()
