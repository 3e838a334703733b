"""The cache on the worker's pipeline: one at a time, changed between batches, taken off without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..base import CacheBackend
from ..runtime.method import NoneConfig
from ..selector import backend_class
from .choice import Choice

_NONE = Choice("none", NoneConfig())


class Switch:
    """Puts the cache that a batch asks for on one pipeline; belongs to the thread that draws."""

    def __init__(self, pipeline: Any, standing: Choice) -> None:
        self._pipeline = pipeline
        self._cache, self._choice = self._enabled(standing), standing

    @contextmanager
    def on(self, choice: Choice) -> Iterator[CacheBackend]:
        """The cache for one batch. Another method stays on until a batch asks for a third."""
        with ExitStack() as stack:
            self._adjust(choice, stack)
            yield self._cache

    def take_off(self) -> None:
        """The pipeline is what it was."""
        if self._cache.is_enabled():
            self._cache.disable()

    def _adjust(self, choice: Choice, stack: ExitStack) -> None:
        if self._cache.is_enabled() and choice == self._choice:
            return
        try:
            if self._cache.is_enabled() and choice == _NONE:
                stack.enter_context(self._cache.off())
                return
            if self._cache.is_enabled() and choice.method == self._choice.method:
                stack.enter_context(self._cache.using(**choice.config.as_dict()))
                return
        except NotImplementedError:
            pass  # a backend with one setting for all generations: it is exchanged instead
        self._exchange(choice)

    def _exchange(self, choice: Choice) -> None:
        before, previous = self._choice, self._cache.is_enabled()
        self.take_off()
        try:
            self._cache, self._choice = self._enabled(choice), choice
        except Exception:
            if previous:
                self._cache, self._choice = self._enabled(before), before
            raise

    def _enabled(self, choice: Choice) -> CacheBackend:
        cache = backend_class(choice.method)(choice.config)
        cache.enable(self._pipeline)
        return cache
