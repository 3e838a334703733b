"""One of holdover's methods under vLLM-Omni's contract for cache backends."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from ..base import CacheBackend
from ..config import Config
from ..errors import NotEnabledError, UnsupportedModelError
from ..policies.base import NOTHING_HELD
from ..runtime.backend import SeamBackend
from ..runtime.engine import Engine
from ..selector import backend_for_config
from ..stats import GenerationStats, Stats
from .pipeline import PipelineView, view_of
from .ranks import current_ranks
from .settings import OFF, request_settings

logger = logging.getLogger(__name__)


class OmniBackend(CacheBackend):
    """The cache vLLM-Omni's model runner enables once and refreshes before requests.

    The runner refreshes only where it knows the number of steps, so a request also begins and ends with the pipeline's
    own forward: nothing of one reaches the next, and between requests nothing is held.
    """

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(config)
        self.name = name
        cache = backend_for_config(config)
        assert isinstance(cache, SeamBackend)
        self._cache = cache
        self._view: PipelineView | None = None
        self._plain: Any = None
        self._announced: int | None = None

    def enable(self, pipeline: nn.Module) -> None:
        """Put the cache on the transformers of a pipeline, and stand around its forward."""
        ranks, view = current_ranks(), view_of(pipeline)
        self._cache.enable(view)
        try:
            self._engine.over(ranks)
        except BaseException:
            self._cache.disable()
            raise
        self._view, self._plain, self.enabled = view, vars(pipeline).get("forward"), True
        pipeline.forward = self._around(pipeline.forward)
        logger.info("%s is on the %s of this %s", self.name, ", ".join(view.components), type(pipeline).__name__)

    def refresh(self, pipeline: nn.Module, num_inference_steps: int | None, verbose: bool = True) -> None:
        """The next request has that many steps; fewer than one means that nobody knows."""
        if pipeline is not self._enabled().pipeline:
            raise NotEnabledError(f"This cache is not on that {type(pipeline).__name__}.")
        self._announced = num_inference_steps if num_inference_steps and num_inference_steps > 0 else None
        if verbose:
            logger.debug("%s: a request of %s steps", self.name, self._announced or "unknown")

    def disable(self) -> None:
        """Take the cache off: every object is what it was."""
        pipeline = self._enabled().pipeline
        self._cache.disable()
        if self._plain is None:
            del pipeline.forward
        else:
            pipeline.forward = self._plain
        self._view, self.enabled = None, False

    def stats(self) -> Stats:
        return self._cache.stats()

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        return self._cache.using(**settings)

    def off(self) -> AbstractContextManager[None]:
        return self._cache.off()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.config!r})"

    # One request, or a batch of requests that the runner draws together.

    def _around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._request(next(iter((*args, *kwargs.values())))):
                return plain(*args, **kwargs)

        return forward

    @contextmanager
    def _request(self, batch: Any) -> Iterator[None]:
        before = _forwards(self.stats())
        with self._generation(), self._asked(batch):
            yield
        _check_seen(self._enabled(), self.stats(), before)
        logger.info("%s: %s", self.name, _summary(self.stats().last))

    @contextmanager
    def _generation(self) -> Iterator[None]:
        """Begins as the runner announced it and leaves nothing behind, whatever happens inside."""
        if self._announced is None:
            self._engine.refresh(None)
        else:
            self._cache.refresh(self._view, self._announced, verbose=False)
        try:
            yield
        finally:
            self._announced = None
            self._engine.refresh(None)

    @contextmanager
    def _asked(self, batch: Any) -> Iterator[None]:
        """The settings the requests bring along; where they want different ones, nothing is held."""
        wishes = request_settings(batch)
        if wishes == [{}]:
            yield
        elif len(wishes) > 1 or wishes == [OFF]:
            with self._cache.off():
                yield
        else:
            assert not isinstance(wishes[0], str)
            with self._cache.using(**wishes[0]):
                yield

    @property
    def _engine(self) -> Engine:
        engine = self._cache.engine
        assert engine is not None
        return engine

    def _enabled(self) -> PipelineView:
        if self._view is None:
            raise NotEnabledError("This cache is not enabled: call enable(pipeline) first.")
        return self._view


def _check_seen(view: PipelineView, stats: Stats, before: int) -> None:
    """A request that went past the cache, or in which nothing could be held, is an error: it would not be noticed."""
    pipeline, transformers = type(view.pipeline).__name__, ", ".join(view.components)
    if _forwards(stats) == before:
        raise UnsupportedModelError(
            f"{pipeline} drew without one forward of its {transformers} that the cache saw: it runs parts of it by "
            "themselves, with autograd on, or in training mode. Start without --cache-backend."
        )
    if stats.last is not None and _never_held(stats.last):
        raise UnsupportedModelError(
            f"Nothing could be held for {pipeline}: no forward of its {transformers} belonged to the same branch as an "
            "earlier one, because the conditioning changes at every step. Start without --cache-backend."
        )


def _never_held(generation: GenerationStats) -> bool:
    first = min(visit.step for visit in generation.visits)
    later = [visit for visit in generation.visits if visit.step > first]
    return len(later) > 1 and all(visit.reason == NOTHING_HELD.reason for visit in later)


def _forwards(stats: Stats) -> int:
    return stats.computed + stats.held


def _summary(last: GenerationStats | None) -> str:
    return "" if last is None else f"{last.computed_total} forwards computed, {last.held_total} held"
