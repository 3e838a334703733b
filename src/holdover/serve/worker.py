"""The thread that owns the pipeline: it loads the model, draws what waits, and tells those who wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..base import CacheBackend
from ..errors import HoldoverError
from ..prompt_embed_cache import PromptEmbedCache, install_prompt_embed_cache, resolve_prompt_embed_cache_config
from ..stats import GenerationStats
from .choice import Choice, choice
from .errors import ApiError, internal, invalid, unavailable
from .forming import Forming
from .known import Known, known_of
from .metrics import Metrics
from .model import OnStep, Painter, load
from .settings import Settings
from .switch import Switch
from .waiting import Waiting
from .work import Failed, Finished, Job, Partial, Record, Ticket, traces

logger = logging.getLogger(__name__)


class CalledOffError(Exception):
    """Nobody waits for the pictures that are being drawn."""


@dataclass
class Totals:
    """What one method has done since the server started."""

    images: int = 0
    generations: int = 0
    computed: int = 0
    held: int = 0
    peak_bytes: int = 0

    def add(self, record: Record) -> None:
        self.images += record.batch
        self.generations += 1
        self.computed += sum(record.computed.values())
        self.held += sum(record.held.values())
        self.peak_bytes = max(self.peak_bytes, record.held_bytes)


class Worker:
    """One device, one pipeline, one thread."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
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
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdover-worker", daemon=True)

    def start(self) -> None:
        """Load the model, then draw; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Draw what waits, then end."""
        self.waiting.close()
        self._thread.join()

    def loaded(self) -> tuple[Painter, Choice]:
        """The model and the cache it stands with; an error while it is loading."""
        if not self._ready.is_set() or self.painter is None or self.standing is None:
            raise unavailable("The model is still loading.", "model_loading")
        return self.painter, self.standing

    # On the worker's own thread from here on.

    def _run(self) -> None:
        try:
            self._load()
        except Exception as error:
            self.failure = error
            self.on_failure()
            return
        assert self._switch is not None
        while batch := self.waiting.take():
            self._metrics.waiting.set(len(self.waiting))
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
        with self._switch.on(standing) as cache:
            self.notes = cache.stats().notes
        self.known = known_of(standing, painter.pipeline)
        self.painter, self.standing = painter, standing
        self._metrics.ready.set(1)
        self._ready.set()
        logger.info("%s is ready, cache %s", settings.model, standing.method)

    def _draw(self, batch: Sequence[Ticket]) -> None:
        assert self._switch is not None
        assert self.painter is not None
        job, begin = batch[0].job, time.monotonic()
        try:
            with self._switch.on(job.choice) as cache:
                pictures = self.painter.draw(job, batch, self._watcher(job, batch, cache))
                stats = cache.stats().last
            self._deliver(batch, pictures, stats, begin)
        except CalledOffError:
            self._metrics.cancelled.inc(len(batch))
        except HoldoverError as error:
            _fail(batch, invalid(str(error), job.choice.param, "cannot_cache"))
        except torch.OutOfMemoryError:
            _fail(batch, ApiError(503, "The device is out of memory: ask for a smaller picture.", "out_of_memory"))
        except Exception:
            logger.exception("requests %s failed", ", ".join(ticket.request_id for ticket in batch))
            _fail(batch, internal())

    def _watcher(self, job: Job, batch: Sequence[Ticket], cache: CacheBackend) -> OnStep:
        """Called after each step: ends a generation that nobody waits for, and shows pictures as they are."""
        assert self.painter is not None
        wanted = frozenset(step for ticket in batch for step in ticket.shown_after)
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
                    if step + 1 in ticket.shown_after:
                        ticket.deliver(Partial(picture, step + 1, seen))

        return on_step

    def _deliver(
        self, batch: Sequence[Ticket], pictures: torch.Tensor, stats: GenerationStats | None, begin: float
    ) -> None:
        seconds = time.monotonic() - begin
        self.waiting.took(seconds / len(batch))
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
            seed=ticket.seed,
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
            tokens=(self.painter.text_tokens(ticket.prompt), area // self.painter.facts.multiple**2),
        )


def _fail(batch: Sequence[Ticket], error: ApiError) -> None:
    for ticket in batch:
        ticket.deliver(Failed(error))
