"""The backend of every method that works at the seam: lifecycle only, the method puts the parts together."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..base import CacheBackend, DiffusionCacheConfig
from ..config import Config
from ..errors import ConfigError, EnableError, NotEnabledError
from ..stats import Stats
from .adopt import adoptions_of
from .engine import Engine
from .method import Method, NoneConfig, NoneMethod
from .ranks import Ranks
from .replay import ReplayReport

logger = logging.getLogger(__name__)


class SeamBackend(CacheBackend):
    """A cache that cuts transformers and holds what their blocks add."""

    def __init__(self, config: Config | Mapping[str, Any] | None = None) -> None:
        super().__init__(config if config is not None else self.config_class())
        self.settings = self._own(self.config)
        self._engine: Engine | None = None
        self._stopped: Engine | None = None

    @classmethod
    def _own(cls, config: Any) -> Config:
        """The method's own settings, from whichever kind of config it was given."""
        if isinstance(config, cls.config_class):
            return config
        if isinstance(config, DiffusionCacheConfig):
            return cls.config_class(**config.part(cls.config_class))
        if isinstance(config, Mapping):
            return cls.config_class.from_dict(config)
        raise ConfigError(f"{cls.__name__} takes a {cls.config_class.__name__}, not {type(config).__name__}.")

    @abstractmethod
    def method(self, settings: Config) -> Method:
        """The method with these settings."""

    def enable(self, pipeline: Any) -> None:
        if self._engine is not None:
            raise EnableError("This cache is enabled already: disable() it first, or make another one.")
        whole = None if isinstance(pipeline, nn.Module) else pipeline
        engine = Engine(whole, transformers_of(pipeline), self.method(self.settings))
        engine.owner = self
        engine.install()
        self._engine, self.enabled = engine, True

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        engine = self._running()
        if pipeline is not None and not _belongs(pipeline, engine):
            raise NotEnabledError(f"This cache is not on that {type(pipeline).__name__}.")
        if isinstance(num_inference_steps, bool) or not isinstance(num_inference_steps, int) or num_inference_steps < 1:
            raise ConfigError(f"num_inference_steps must be a whole number of at least 1, not {num_inference_steps!r}.")
        engine.refresh(num_inference_steps)
        if verbose:
            logger.info("%s: a generation of %d steps begins", type(self).__name__, num_inference_steps)

    def disable(self) -> None:
        engine = self._running()
        engine.uninstall()
        self._engine, self._stopped, self.enabled = None, engine, False

    def over(self, ranks: Ranks) -> None:
        """State the groups of ranks that generations run over from now on, where the transformer does not show them."""
        self._running().over(ranks)

    def stats(self) -> Stats:
        engine = self._engine or self._stopped
        if engine is None:
            raise NotEnabledError("Nothing has been counted: the cache was never enabled.")
        return engine.stats()

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        return self._running().using(self.method(self.settings.replaced(**settings)))

    def off(self) -> AbstractContextManager[None]:
        return self._running().using(NoneMethod())

    def reports(self) -> dict[str, ReplayReport]:
        """The replay check of each transformer that has run: where its cut is, and how exact."""
        return {unit.name: unit.report for unit in self._running().units if unit.report is not None}

    @property
    def engine(self) -> Engine | None:
        """What drives the cache while it is enabled."""
        return self._engine

    def _running(self) -> Engine:
        if self._engine is None:
            raise NotEnabledError("This cache is not enabled: call enable(pipeline) first.")
        return self._engine


class NoneBackend(SeamBackend):
    """No cache: the plain pipeline, counted and timed like the others."""

    config_class = NoneConfig

    def method(self, settings: Config) -> NoneMethod:
        assert isinstance(settings, NoneConfig)
        return NoneMethod(settings)


def cache_of(target: Any) -> CacheBackend | None:
    """The cache that is on a pipeline or transformer, if there is one."""
    for module in transformers_of(target).values():
        adoptions = adoptions_of(module)
        if adoptions is not None and isinstance(adoptions.owner, Engine):
            cache: CacheBackend | None = adoptions.owner.owner
            return cache
    return None


def transformers_of(target: Any) -> dict[str, nn.Module]:
    """The denoising transformers of a pipeline by attribute name, or the one that was given."""
    if isinstance(target, nn.Module):
        return {"transformer": target}
    components = getattr(target, "components", None)
    names = components if isinstance(components, Mapping) else vars(target) if hasattr(target, "__dict__") else ()
    found = {name: getattr(target, name, None) for name in names if _names_a_transformer(name)}
    modules = {name: module for name, module in found.items() if isinstance(module, nn.Module)}
    if not modules:
        raise EnableError(
            f"{type(target).__name__} has no transformer to cache. Give a diffusers pipeline with a `transformer`, "
            "or the transformer itself."
        )
    return modules


def _names_a_transformer(name: str) -> bool:
    return name.startswith("transformer") or name.endswith("transformer") or name == "prior"


def _belongs(target: Any, engine: Engine) -> bool:
    return target is engine.pipeline or any(target in (u.module, u.core) for u in engine.units)
