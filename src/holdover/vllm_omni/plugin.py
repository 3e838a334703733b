"""Adds holdover's methods to vLLM-Omni's cache backends, with their settings, and removes them again."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, NoneType
from typing import Any

from ..config import Config
from ..errors import ConfigError, EnableError, did_you_mean
from ..selector import config_class, methods, own_config

_SELECTOR_MODULE = "vllm_omni.diffusion.cache.selector"
_RUNNER_MODULE = "vllm_omni.diffusion.worker.diffusion_model_runner"
_FUNCTION = "get_cache_backend"

SelectorFunction = Callable[[str | None, Any], Any]


def method_names() -> dict[str, str]:
    """The method for each value of `--cache-backend` that selects holdover."""
    return {name: method for method in methods() if (name := config_class(method).vllm_omni)}


class Selector:
    """vLLM-Omni's `get_cache_backend` with holdover's names added."""

    def __init__(self, original: SelectorFunction) -> None:
        self.original = original
        functools.update_wrapper(self, original)

    def __call__(self, cache_backend: str | None, cache_config: Any) -> Any:
        if cache_backend is None or not cache_backend.startswith("holdover"):
            return self.original(cache_backend, cache_config)
        names = method_names()
        if cache_backend not in names:
            raise ConfigError(
                f"There is no cache backend {cache_backend!r}.{did_you_mean(cache_backend, names)} "
                f"holdover has {', '.join(names)}."
            )
        from .backend import OmniBackend  # imports torch

        return OmniBackend(cache_backend, config_for(names[cache_backend], cache_config))


def register() -> None:
    """Make holdover's methods selectable in this process; a second call changes nothing."""
    importlib.import_module(_SELECTOR_MODULE)
    for module, function in _loaded_selectors():
        if not isinstance(function, Selector):
            setattr(module, _FUNCTION, Selector(function))


def unregister() -> None:
    """Restore vLLM-Omni's own selector function."""
    for module, function in _loaded_selectors():
        if isinstance(function, Selector):
            setattr(module, _FUNCTION, function.original)


def _loaded_selectors() -> Iterator[tuple[ModuleType, SelectorFunction]]:
    """The selector function in each loaded module that has it: the model runner imports it by name."""
    for module in (sys.modules[name] for name in (_SELECTOR_MODULE, _RUNNER_MODULE) if name in sys.modules):
        function: SelectorFunction | None = getattr(module, _FUNCTION, None)
        if function is None:
            raise EnableError(
                f"{module.__name__} has no {_FUNCTION}: holdover does not know how this vLLM-Omni selects its cache. "
                "Install a release that holdover was tested with (0.30), or leave holdover out with VLLM_PLUGINS."
            )
        yield module, function


def config_for(method: str, cache_config: Any) -> Config:
    """A method's config from `--cache-config`; an unknown key is an error that names the nearest valid one.

    vLLM-Omni passes a dataclass of its own methods' settings, with unknown keys in `_extra_params`. A field that the
    method has too is taken, a None only where the method knows one; any other only if it differs from its default, so
    that it is reported.
    """
    if cache_config is None or isinstance(cache_config, Mapping):
        return own_config(method, cache_config or {})
    if not dataclasses.is_dataclass(cache_config) or isinstance(cache_config, type):
        raise ConfigError(f"--cache-config must be a JSON object, not {type(cache_config).__name__}.")
    given: dict[str, Any] = dict(cache_config._extra_params)  # type: ignore[attr-defined]
    defaults, hints = type(cache_config)(), typing.get_type_hints(config_class(method))
    for name in (field.name for field in dataclasses.fields(cache_config)):
        value = getattr(cache_config, name)
        if name in config_class(method).field_names():
            is_set = value is not None or NoneType in typing.get_args(hints[name])
        else:
            is_set = value != getattr(defaults, name)
        if is_set and not name.startswith("_"):
            given[name] = value
    return own_config(method, given)
