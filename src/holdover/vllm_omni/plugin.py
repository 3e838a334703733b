"""Puts holdover's methods among vLLM-Omni's cache backends, and takes them out again."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..errors import ConfigError, EnableError, did_you_mean

METHODS = {
    "holdover_plan": "plan",
    "holdover_tea_cache": "tea_cache",
    "holdover_mag_cache": "mag_cache",
    "holdover_cache_dit": "cache_dit",
}
"""What `--cache-backend` may be, and the method it stands for."""

SELECTOR = "vllm_omni.diffusion.cache.selector"
RUNNER = "vllm_omni.diffusion.worker.diffusion_model_runner"
FUNCTION = "get_cache_backend"

Select = Callable[[str | None, Any], Any]


class Selector:
    """vLLM-Omni's selector with holdover's names before its own."""

    def __init__(self, original: Select) -> None:
        self.original = original
        functools.update_wrapper(self, original)

    def __call__(self, cache_backend: str | None, cache_config: Any) -> Any:
        if cache_backend is None or not cache_backend.startswith("holdover"):
            return self.original(cache_backend, cache_config)
        if cache_backend not in METHODS:
            raise ConfigError(
                f"There is no cache backend {cache_backend!r}.{did_you_mean(cache_backend, METHODS)} "
                f"holdover has {', '.join(METHODS)}."
            )
        from .backend import OmniBackend
        from .settings import config_for

        return OmniBackend(cache_backend, config_for(METHODS[cache_backend], cache_config))


def register() -> None:
    """Make holdover's methods selectable in this process; done already, it changes nothing."""
    importlib.import_module(SELECTOR)
    for module in _homes():
        found = _selector_in(module)
        if not isinstance(found, Selector):
            setattr(module, FUNCTION, Selector(found))


def unregister() -> None:
    """Give vLLM-Omni its own selector back, the very same function."""
    for module in _homes():
        found = _selector_in(module)
        if isinstance(found, Selector):
            setattr(module, FUNCTION, found.original)


def _homes() -> Iterator[ModuleType]:
    """The loaded modules that have the selector by name: the model runner imports it by value.

    A runner that is imported after `register` takes the selector it finds, which is holdover's by then.
    """
    return (sys.modules[name] for name in (SELECTOR, RUNNER) if name in sys.modules)


def _selector_in(module: ModuleType) -> Select:
    found: Select | None = getattr(module, FUNCTION, None)
    if found is None:
        raise EnableError(
            f"{module.__name__} has no {FUNCTION}: this vLLM-Omni selects its cache in a way holdover does not know. "
            "Install a release that holdover was tested with (0.30), or leave holdover out with VLLM_PLUGINS."
        )
    return found
