"""cache-dit as a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from cache_dit.caching import BlockAdapter, CachedAdapter
from torch import nn

from ..config import Config
from ..errors import EnableError
from ..runtime.backend import SeamBackend, cache_of, transformers_of
from .adapters import declared_adapter, declared_adapter_cls
from .config import CacheDiTConfig
from .fitting import Fitter
from .library import quiet
from .method import CacheDiTMethod

logger = logging.getLogger(__name__)

# From the name of a pipeline's or a transformer's class to what enables cache-dit on it: register your own here.
CUSTOM_DIT_ENABLERS: dict[str, Callable[..., Any]] = {}


def default_get_pipeline_transformer(pipeline: Any) -> Any:
    """A pipeline's transformer; a transformer is its own."""
    return getattr(pipeline, "transformer", pipeline)


class CacheDiTBackend(SeamBackend):
    """cache-dit: hold while the residual of the first blocks has changed little (DBCache), with TaylorSeer and SCM."""

    config_class = CacheDiTConfig

    def __init__(
        self,
        config: Any = None,
        block_adapter: BlockAdapter | None = None,
        adapter_cls: type[CachedAdapter] | None = None,
    ) -> None:
        super().__init__(config)
        self._fitter = Fitter(block_adapter, adapter_cls)

    @staticmethod
    def maybe_build_block_adapter(pipeline: Any) -> BlockAdapter | None:
        """The adapter that the transformer's class declares as `_cache_dit_adapter_config`, if it does."""
        with quiet():
            return declared_adapter(default_get_pipeline_transformer(pipeline))

    @staticmethod
    def maybe_get_cached_adapter_cls(pipeline: Any) -> type[CachedAdapter] | None:
        """The adapter class that the transformer's class declares, if it does."""
        return declared_adapter_cls(default_get_pipeline_transformer(pipeline))

    def enable(self, pipeline: Any) -> None:
        enabler = _enabler_for(pipeline)
        if enabler is None:
            self.enable_directly(pipeline)
            return
        if self._engine is not None:
            raise EnableError("This cache is enabled already: disable() it first, or make another one.")
        enabler(pipeline, self.config)
        self._take_over(pipeline, enabler)

    def enable_directly(self, pipeline: Any) -> None:
        """Put the cache on without asking for an enabler: what every enabler ends with."""
        super().enable(pipeline)
        logger.info("cache-dit is on this %s: %s", type(pipeline).__name__, "; ".join(self._running().notes))

    def _take_over(self, pipeline: Any, enabler: Callable[..., Any]) -> None:
        """The enabler has put a cache of its own on the pipeline: it is this one's now."""
        found = cache_of(pipeline)
        if not isinstance(found, CacheDiTBackend) or found.engine is None:
            raise EnableError(
                f"The enabler {enabler.__name__} has put no holdover cache on this {type(pipeline).__name__}: let it "
                "end with `return enable_cache_for_dit(pipeline, cache_config, block_adapter)`."
            )
        self._engine, self._fitter, self.enabled = found.engine, found._fitter, True
        self._engine.owner = self
        found._engine, found.enabled = None, False

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        if len(self._running().units) == 1 and type(num_inference_steps) is int and num_inference_steps > 0:
            self.method(self.settings).check_steps(num_inference_steps)
        super().refresh(pipeline, num_inference_steps, verbose)

    def method(self, settings: Config) -> CacheDiTMethod:
        assert isinstance(settings, CacheDiTConfig)
        return CacheDiTMethod(settings, self._fitter)


def _enabler_for(pipeline: Any) -> Callable[..., Any] | None:
    modules: list[nn.Module] = list(transformers_of(pipeline).values())
    names = [type(each).__name__ for each in (pipeline, *modules)]
    return next((CUSTOM_DIT_ENABLERS[name] for name in names if name in CUSTOM_DIT_ENABLERS), None)
