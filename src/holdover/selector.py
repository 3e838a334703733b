"""The registry of caching methods: from a name to a backend class, which is imported when it is first needed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from .base import CacheBackend, DiffusionCacheConfig
from .config import Config, allowed_values, check_names
from .errors import ConfigError, did_you_mean
from .keywords import SETTINGS, SettingText

# One line per method: its name, the module and the class of its backend.
BACKENDS = {
    "tea_cache": ("holdover.teacache", "TeaCacheBackend"),
    "mag_cache": ("holdover.magcache", "MagCacheBackend"),
    "cache_dit": ("holdover.cache_dit_backend", "CacheDiTBackend"),
    "plan": ("holdover.plan", "PlanBackend"),
    "easy_cache": ("holdover.methods.easy_cache", "EasyCacheBackend"),
    "sea_cache": ("holdover.methods.sea_cache", "SeaCacheBackend"),
    "first_block": ("holdover.methods.first_block", "FirstBlockBackend"),
    "taylor_seer": ("holdover.methods.taylor_seer", "TaylorSeerBackend"),
    "spectrum": ("holdover.methods.spectrum", "SpectrumBackend"),
    "none": ("holdover.engine.backend", "NoneBackend"),
}

# Methods that need a library which only an extra of holdover installs: the module and the extra.
EXTRAS = {"cache_dit": ("cache_dit", "cache-dit")}


def methods() -> tuple[str, ...]:
    """The names of all methods that can be used here: those that need an extra only where it is installed."""
    return tuple(name for name in BACKENDS if name not in EXTRAS or importlib.util.find_spec(EXTRAS[name][0]))


def check_method(name: str) -> None:
    """Raise ConfigError for a name that is not a method; imports no method."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise ConfigError(
            f"There is no caching method {name!r}.{did_you_mean(name, methods())} Methods: {', '.join(methods())}."
        )
    if name in EXTRAS and name not in methods():
        library, extra = EXTRAS[name]
        raise ConfigError(f"The method {name!r} needs {library}: pip install 'holdover[{extra}]'.")


def describe_settings(name: str) -> Mapping[str, SettingText]:
    """The settings of a method in words: default, allowed values and documentation; imports no method that ships."""
    check_method(name)
    if name in SETTINGS:
        return SETTINGS[name][1]
    fields = config_class(name).settings()
    return {field.name: (repr(field.default), allowed_values(field), field.metadata.get("doc", "")) for field in fields}


def check_settings(name: str, keys: Iterable[str]) -> None:
    """Raise ConfigError for an unknown method, or a key that is not one of its settings; imports no method that ships.

    The error names the method that has the key, or the nearest key.
    """
    known = describe_settings(name)
    for key in (key for key in keys if key not in known):
        owner = next((other for other in BACKENDS if other != name and key in describe_settings(other)), None)
        if owner is not None:
            raise ConfigError(f"{key!r} is a setting of {owner!r}, not of {name!r}.")
    check_names(SETTINGS[name][0] if name in SETTINGS else config_class(name).__name__, keys, known)


def backend_class(name: str) -> type[CacheBackend]:
    """The backend class of a method."""
    check_method(name)
    module, attribute = BACKENDS[name]
    found: type[CacheBackend] = getattr(importlib.import_module(module), attribute)
    return found


def get_cache_backend(
    cache_backend: str | None, cache_config: DiffusionCacheConfig | Config | Mapping[str, Any] | None = None
) -> CacheBackend | None:
    """A backend for a method's name with its settings, not yet enabled; None for `None` and `"none"`."""
    if cache_backend is None or cache_backend == "none":
        return None
    if isinstance(cache_config, Mapping):
        cache_config = own_config(cache_backend, cache_config)
    return backend_class(cache_backend)(cache_config)


def config_class(name: str) -> type[Config]:
    """The config class of a method."""
    return backend_class(name).config_class


def own_config(name: str, settings: Mapping[str, Any]) -> Config:
    """Build a method's config from settings; the error for a key of another method names that method."""
    check_settings(name, settings)
    return config_class(name)(**settings)


def backend_for_config(config: Config) -> CacheBackend:
    """A backend of the method that this config belongs to, not yet enabled."""
    if not config.method:
        raise ConfigError(f"{type(config).__name__} belongs to no caching method; name the method as well.")
    return backend_class(config.method)(config)
