"""The thread that owns the pipeline: it loads the model, draws what waits, and tells those who wait."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from ..base import CacheBackend
from ..errors import HoldoverError
from ..prompt_embed_cache import PromptEmbedCache, install_prompt_embed_cache, resolve_prompt_embed_cache_config
from ..stats import GenerationStats
from .choice import Choice, choice
from .errors import ApiError, internal, invalid, unavailable
from .forming import Forming
from .known import Known, known_of
from .metrics import WorkerMetrics
from .model import Facts, OnStep, Painter, load
from .settings import Settings
from .studio import Report, Totals
from .switch import Switch
from .waiting import Waiting
from .work import Begun, Failed, Finished, Job, Partial, Record, Ticket, traces

logger = logging.getLogger(__name__)

BROKEN = 3
"""Generations in a row that fail for no known reason until the device counts as broken."""


class CalledOffError(Exception):
    """Nobody waits for the pictures that are being drawn."""


class Worker:
    """One device, one pipeline, one thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._metrics = settings, WorkerMetrics()
        self.waiting = Waiting(settings.queue_size, settings.max_batch, settings.max_wait)
        self.painter: Painter | None = None
        self.standing: Choice | None = None
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.notes: tuple[str, ...] = ()
        self.known = Known()
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self.last: Record | None = None
        self.prompt_cache: PromptEmbedCache | None = None
        self._switch: Switch | None = None
        self._changes: queue.SimpleQueue[tuple[Choice, Future[None]]] = queue.SimpleQueue()
        self._broken = 0  # generations in a row that failed for no known reason
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdover-worker", daemon=True)

    async def start(self) -> None:
        """Load the model, then draw; returns at once."""
        self._thread.start()

    async def settled(self) -> None:
        """The model is loaded, or cannot be: that is raised."""
        await asyncio.to_thread(self._settled.wait)
        if self.failure is not None:
            raise self.failure

    async def stop(self) -> None:
        """Draw what waits, then end."""
        self.waiting.close()
        await asyncio.to_thread(self._thread.join)

    def loaded(self) -> tuple[Facts, Choice]:
        """The model and the cache it stands with; an error while it is loading."""
        if self.painter is None or self.standing is None:
            raise unavailable("The model is still loading.", "model_loading")
        return self.painter.facts, self.standing

    @property
    def sound(self) -> bool:
        """Whether the thread lives and the device still draws."""
        return self._thread.is_alive() and self._broken < BROKEN

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Let all of them wait, or turn all of them away."""
        self.waiting.put(tickets)

    def __len__(self) -> int:
        return len(self.waiting)

    async def stand(self, wanted: Choice) -> None:
        """Stand with another cache from the next batch on; where the model refuses it, nothing changes."""
        change: Future[None] = Future()
        self._changes.put((wanted, change))
        self.waiting.wake()
        await asyncio.wrap_future(change)

    async def report(self) -> Report:
        """How the cache stands and what was done with it."""
        prompts = self.prompt_cache
        seen = None if prompts is None else (prompts.hits, prompts.misses)
        return Report(self.known, self.notes, dict(self.totals), self.last, seen)

    async def metrics(self, own: bytes = b"") -> bytes:
        """What was counted, for Prometheus."""
        return own + self._metrics.text()

    # On the worker's own thread from here on.

    def _run(self) -> None:
        try:
            self._load()
        except Exception as error:
            self.failure = error
            self.on_failure()
            return
        finally:
            self._settled.set()
        assert self._switch is not None
        while (batch := self.waiting.take()) is not None:
            while not self._changes.empty():
                self._change(*self._changes.get())
            if batch:
                self._draw(batch)
        self._switch.take_off()

    def _load(self) -> None:
        settings = self._settings
        standing = choice(settings.cache_backend, settings.cache_settings)
        painter = load(settings)
        remember, size = resolve_prompt_embed_cache_config(settings.prompt_cache, settings.prompt_cache_size)
        if remember:
            self.prompt_cache = install_prompt_embed_cache(painter.pipeline, max_size=size)
        if self.prompt_cache is not None:
            self._metrics.watch(self.prompt_cache)
        self._switch = Switch(painter.pipeline, standing)
        self._stand(standing, painter)
        self.painter = painter
        self._metrics.ready.set(1)
        logger.info("%s is ready, cache %s", settings.model, standing.method)

    def _stand(self, standing: Choice, painter: Painter) -> None:
        assert self._switch is not None
        known = known_of(standing, painter.pipeline)
        with self._switch.on(standing) as cache:
            self.notes = cache.stats().notes
        self.known, self.standing = known, standing

    def _change(self, wanted: Choice, change: Future[None]) -> None:
        assert self.painter is not None
        try:
            if wanted != self.standing:
                self._stand(wanted, self.painter)
                logger.info("the cache is %s from now on", wanted.method)
            change.set_result(None)
        except Exception as error:
            change.set_exception(error)

    def _draw(self, batch: Sequence[Ticket]) -> None:
        assert self._switch is not None
        assert self.painter is not None
        job, begin = batch[0].job, time.monotonic()
        for ticket in batch:
            ticket.deliver(Begun())
        try:
            with self._switch.on(job.choice) as cache:
                pictures = self.painter.draw(job, [ticket.order for ticket in batch], self._watcher(job, batch, cache))
                stats = cache.stats().last
            self._deliver(batch, pictures, stats, begin)
            self._broken = 0
        except CalledOffError:
            self._metrics.cancelled.inc(len(batch))
        except HoldoverError as error:
            _fail(batch, invalid(str(error), job.choice.param, "cannot_cache"))
        except torch.OutOfMemoryError:
            _fail(batch, ApiError(503, "The device is out of memory: ask for a smaller picture.", "out_of_memory"))
        except Exception:
            logger.exception("requests %s failed", ", ".join(ticket.order.request_id for ticket in batch))
            self._broken += 1
            _fail(batch, internal())

    def _watcher(self, job: Job, batch: Sequence[Ticket], cache: CacheBackend) -> OnStep:
        """Called after each step: ends a generation that nobody waits for, and shows pictures as they are."""
        assert self.painter is not None
        wanted = frozenset(step for ticket in batch for step in ticket.order.shown_after)
        decode = self.painter.decode
        forming = Forming(decode, self.painter.pipeline.scheduler, job.size) if decode and wanted else None

        def on_step(step: int, latents: torch.Tensor) -> None:
            if all(ticket.cancelled for ticket in batch):
                raise CalledOffError
            if forming is None:
                return
            forming.follow(latents)
            if step + 1 in wanted:
                pictures, seen = forming.pictures(step), traces(cache.stats().last)
                for ticket, picture in zip(batch, pictures, strict=True):
                    if step + 1 in ticket.order.shown_after:
                        ticket.deliver(Partial(picture, step + 1, seen))

        return on_step

    def _deliver(
        self, batch: Sequence[Ticket], pictures: torch.Tensor, stats: GenerationStats | None, begin: float
    ) -> None:
        seconds = time.monotonic() - begin
        self.waiting.room.took(seconds / len(batch))
        records = [self._record(ticket, len(batch), stats, begin, seconds) for ticket in batch]
        self.last = records[-1]
        self.totals[self.last.choice.method].add(self.last)
        self._metrics.drawn(records)
        for ticket, picture, record in zip(batch, pictures, records, strict=True):
            ticket.deliver(Finished(picture, record))

    def _record(
        self, ticket: Ticket, batch: int, stats: GenerationStats | None, begin: float, seconds: float
    ) -> Record:
        assert self.painter is not None
        job = ticket.job
        counted = stats or GenerationStats(job.choice.method, {})
        area = job.size[0] * job.size[1]
        return Record(
            seed=ticket.order.seed,
            choice=job.choice,
            steps=job.steps,
            drawn_size=job.size,
            computed=counted.computed,
            held=counted.held,
            trace=traces(counted),
            seconds={
                "queued": begin - ticket.submitted,
                "generation": seconds,
                "computed": counted.seconds(True),
                "held": counted.seconds(False),
            },
            batch=batch,
            held_bytes=counted.peak_bytes,
            tokens=(self.painter.text_tokens(ticket.order.prompt), area // self.painter.facts.multiple**2),
        )


def _fail(batch: Sequence[Ticket], error: ApiError) -> None:
    for ticket in batch:
        ticket.deliver(Failed(error))
