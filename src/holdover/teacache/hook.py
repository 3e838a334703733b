"""The documented hook of TeaCache: enables the cache on one transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..engine.backend import BranchStateManager, MethodHook
from ..models.registry import find_extractor
from ..policies.teacache import Polynomial, TeaCacheState
from ..profiles import TeaCacheFit, shipped
from .backend import TeaCacheBackend, polynomial_of
from .config import TeaCacheConfig


class TeaCacheHook(MethodHook[TeaCacheState]):
    """A diffusers hook that caches every forward of the transformer it is registered on.

    `extractor_fn` is the extractor registered for the transformer, or None if its blocks are traced.
    """

    def __init__(self, config: TeaCacheConfig) -> None:
        super().__init__(BranchStateManager(TeaCacheState), config)
        self.rescale_func: Callable[[float], float] = _rescaling(config)
        self.extractor_fn: Callable[..., Any] | None = None
        self._backend = TeaCacheBackend(config)

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Enable the cache on the module."""
        self._backend.enable(module)
        self.state_manager.backend = self._backend
        self.extractor_fn = find_extractor(module)
        self.rescale_func = _rescaling(self._backend.settings_for(module))
        return module

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """Disable the cache."""
        self._backend.disable()
        return module


def apply_teacache_hook(module: nn.Module, config: TeaCacheConfig) -> None:
    """Enable TeaCache on a transformer; `holdover.disable(module)` disables it."""
    TeaCacheHook(config).initialize_hook(module)


def _rescaling(config: TeaCacheConfig) -> Polynomial:
    """The rescaling polynomial: the given coefficients, else the first shipped profile of the class, else identity."""
    if config.coefficients is not None:
        return polynomial_of(TeaCacheFit(config.coefficients))
    for profile in shipped("tea_cache"):
        if profile.transformer_class == config.transformer_type:
            return polynomial_of(profile.fit(""))
    return Polynomial((1.0, 0.0))
