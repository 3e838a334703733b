"""The interface every cache backend has, and the documented union of all settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

from .config import Config
from .errors import NotEnabledError
from .settings import CacheDiTSettings, MagCacheSettings, TeaCacheSettings
from .stats import Stats


@dataclass(frozen=True)
class DiffusionCacheConfig(CacheDiTSettings, MagCacheSettings, TeaCacheSettings):
    """Every documented setting of every method in one object; each backend takes its own out of it."""

    def part(self, config: type[Config]) -> dict[str, Any]:
        """The settings a method's own config has too."""
        return {name: getattr(self, name) for name in config.field_names() if name in self.field_names()}


class CacheBackend(ABC):
    """One caching method on one pipeline.

    `enable` puts it on, `disable` takes it off, and between the two generations begin and end by themselves:
    `refresh` is there for callers that want to say so. As a context manager it is disabled at the end of the
    block.
    """

    config_class: ClassVar[type[Config]]

    def __init__(self, config: Any) -> None:
        self.config = config
        self.enabled = False

    @abstractmethod
    def enable(self, pipeline: Any) -> None:
        """Put the cache on a pipeline or a transformer: on all of it, or on nothing."""

    @abstractmethod
    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        """Begin a generation of that many steps with nothing remembered."""

    def disable(self) -> None:
        """Take the cache off: every object is what it was before."""
        raise NotImplementedError(f"{type(self).__name__} cannot be taken off.")

    def stats(self) -> Stats:
        """What was computed and held so far."""
        raise NotImplementedError(f"{type(self).__name__} does not count.")

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        """Other settings for the generations that start inside the block."""
        raise NotImplementedError(f"{type(self).__name__} has one setting for all generations.")

    def off(self) -> AbstractContextManager[None]:
        """No cache for the generations that start inside the block."""
        raise NotImplementedError(f"{type(self).__name__} cannot be switched off for a while.")

    def is_enabled(self) -> bool:
        """Whether the cache is on a pipeline."""
        return self.enabled

    def __enter__(self) -> Self:
        if not self.enabled:
            raise NotEnabledError("Enable the cache first: `with holdover.enable(pipe, ...) as cache:`.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            self.disable()
