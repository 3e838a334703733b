"""From a method's name to its backend, without importing the backends nobody asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .base import CacheBackend, DiffusionCacheConfig
from .config import Config, unknown_key
from .errors import ConfigError, did_you_mean

BACKENDS = {
    "tea_cache": ("holdover.teacache", "TeaCacheBackend"),
    "mag_cache": ("holdover.magcache", "MagCacheBackend"),
    "cache_dit": ("holdover.cache_dit_backend", "CacheDiTBackend"),
    "plan": ("holdover.plan", "PlanBackend"),
    "none": ("holdover.engine.backend", "NoneBackend"),
}


def methods() -> tuple[str, ...]:
    """The names of all methods."""
    return tuple(BACKENDS)


def backend_class(name: str) -> type[CacheBackend]:
    """The backend of a method."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise ConfigError(
            f"There is no caching method {name!r}.{did_you_mean(name, methods())} Methods: {', '.join(methods())}."
        )
    module, attribute = BACKENDS[name]
    found: type[CacheBackend] = getattr(importlib.import_module(module), attribute)
    return found


def get_cache_backend(
    cache_backend: str | None, cache_config: DiffusionCacheConfig | Config | Mapping[str, Any] | None = None
) -> CacheBackend | None:
    """The backend for a method's name with its settings, not yet enabled; None for `None` and `"none"`."""
    if cache_backend is None or cache_backend == "none":
        return None
    if isinstance(cache_config, Mapping):
        cache_config = own_config(cache_backend, cache_config)
    return backend_class(cache_backend)(cache_config)


def config_class(name: str) -> type[Config]:
    """The config of a method."""
    found: type[Config] = backend_class(name).config_class
    return found


def own_config(name: str, settings: Mapping[str, Any]) -> Config:
    """Settings as the method's own config; a key that belongs to another method is named as such."""
    own = config_class(name)
    for key in settings:
        if key not in own.field_names():
            raise unknown_key(key, own, [config_class(other) for other in BACKENDS])
    return own(**settings)


def backend_for_config(config: Config) -> CacheBackend:
    """The backend whose config this is."""
    if not config.method:
        raise ConfigError(f"{type(config).__name__} belongs to no caching method; name the method as well.")
    return backend_class(config.method)(config)
