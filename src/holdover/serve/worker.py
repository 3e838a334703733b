"""The worker: a thread that owns the pipeline and its cache, takes batches from the queue and generates them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ..base import CacheBackend
from ..config import Config
from ..engine.method import NoneConfig
from ..errors import HoldoverError, WriteError
from ..models.pipelines import find_transformers
from ..plan.generation import resolve_profile
from ..profiles import MethodProfile, Profile, find
from ..profiles.hub import pin
from ..prompt_embed_cache import PromptEmbedCache, install_prompt_embed_cache, resolve_prompt_embed_cache_config
from ..selector import backend_for_config, own_config
from ..stats import GenerationStats
from ..video import VideoFile
from ..video import to_pixels as frame_to_pixels
from .errors import ApiError, internal, invalid, storage_failed, unavailable
from .metrics import WorkerMetrics
from .model import OnStep, PreviewDecoder, ServedModel, TakeFrame, load_model
from .queue import (
    BatchQueue,
    GeneratedImage,
    GeneratedVideo,
    ImageBackend,
    ImageSpec,
    Pixels,
    Preview,
    Progress,
    QueueItem,
    VideoSpec,
)
from .schemas import (
    CacheReport,
    FrontierPoint,
    GenerationInfo,
    MethodTotals,
    ProfileReport,
    Seconds,
    VideoComparison,
)
from .settings import Settings
from .validation import TARGET_METHOD, ModelInfo, format_size

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # unexpected failures in a row after which the device counts as broken


class CancelledGenerationError(Exception):
    """The clients of all images of the batch have disconnected."""


class Worker(ImageBackend):
    """One device, one pipeline, one thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._metrics = settings, WorkerMetrics()
        self._queue = BatchQueue(settings.queue_size, settings.max_batch, settings.max_wait)
        self.prompt_cache: PromptEmbedCache | None = None
        self.loading: Future[None] = Future()  # has the exception if the model cannot be loaded
        self._model: ServedModel | None = None
        self._default: Config | None = None
        self._profile, self._notes = ProfileReport(), list[str]()
        self._totals: defaultdict[str, MethodTotals] = defaultdict(MethodTotals)
        self._last: GenerationInfo | None = None
        self._plain: tuple[VideoSpec, list[Pixels], GenerationInfo] | None = None  # the last video without a cache
        self._new_defaults: queue.SimpleQueue[tuple[Config, Future[None]]] = queue.SimpleQueue()
        self._failures = 0  # in a row
        self._thread = threading.Thread(target=self._run, name="holdover-worker", daemon=True)

    async def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._queue.close()
        await asyncio.to_thread(self._thread.join)

    def loaded(self) -> tuple[ModelInfo, Config]:
        if self._model is None or self._default is None:
            raise unavailable("The model is still loading.", "model_loading")
        return self._model.info, self._default

    @property
    def healthy(self) -> bool:
        """Whether the thread is alive and the device works."""
        return self._thread.is_alive() and self._failures < MAX_FAILURES

    def submit(self, items: Sequence[QueueItem]) -> None:
        self._queue.put(items)

    def queue_length(self) -> int:
        return len(self._queue)

    async def set_default(self, cache: Config) -> None:
        """Change the default cache before the next batch; if the model does not support it, nothing changes."""
        done: Future[None] = Future()
        self._new_defaults.put((cache, done))
        self._queue.wake()
        await asyncio.wrap_future(done)

    async def report(self) -> CacheReport:
        _, default = self.loaded()
        prompts = self.prompt_cache
        return CacheReport(
            method=default.method,
            settings=default.as_dict(),
            notes=self._notes,
            totals=dict(self._totals),
            last=self._last,
            prompt_cache=None if prompts is None else {"hits": prompts.hits, "misses": prompts.misses},
            **dict(self._profile),
        )

    async def metrics(self, own: bytes = b"") -> bytes:
        return own + self._metrics.text()

    # The methods below run on the worker's thread.

    def _run(self) -> None:
        try:
            model, switch = self._load()
        except Exception as error:
            self.loading.set_exception(error)
            return
        self.loading.set_result(None)
        while (batch := self._queue.take()) is not None:
            while not self._new_defaults.empty():
                cache, done = self._new_defaults.get()
                try:
                    self._change_default(cache, model, switch)
                    done.set_result(None)
                except Exception as error:
                    done.set_exception(error)
            if batch:
                self._generate(batch, model, switch)
        switch.disable()
        model.close()

    def _load(self) -> tuple[ServedModel, CacheSwitch]:
        settings = self._settings
        default = _with_commit(own_config(settings.cache_backend, settings.cache_settings))
        model = load_model(settings)
        enabled, size = resolve_prompt_embed_cache_config(settings.prompt_cache, settings.prompt_cache_size)
        if enabled:
            self.prompt_cache = install_prompt_embed_cache(model.pipeline, max_size=size)
        if self.prompt_cache is not None:
            self._metrics.add_prompt_cache(self.prompt_cache)
        switch = CacheSwitch(model.pipeline, default)
        self._change_default(default, model, switch)
        self._model = model
        self._metrics.ready.set(1)
        logger.info("%s is ready, cache %s", settings.model, default.method)
        return model, switch

    def _change_default(self, cache: Config, model: ServedModel, switch: CacheSwitch) -> None:
        cache = _with_commit(cache)
        if cache == self._default:
            return
        profile = profile_report(cache, model.pipeline, model.profile)
        with switch.use(cache) as backend:
            self._notes = list(backend.stats().notes)
        if self._default is not None:
            logger.info("the default cache changes from %s to %s", self._default.method, cache.method)
        self._profile, self._default = profile, cache

    def _generate(self, batch: Sequence[QueueItem], model: ServedModel, switch: CacheSwitch) -> None:
        cache, start = batch[0].spec.cache, time.monotonic()
        for item in batch:
            item.notify("started")
        try:
            if isinstance(batch[0].spec, VideoSpec):
                self._generate_video(batch[0], batch[0].spec, model, switch)
            else:
                with switch.use(cache) as backend:
                    _check_cancelled(batch)  # setting a method up may take a while
                    on_step = self._step_callback(batch, model, backend)
                    pixels = model.generate([item.spec for item in batch], on_step)
                    stats = backend.stats().last
                self._finish(batch, pixels, model, stats or GenerationStats(cache.method, {}), start)
            self._failures = 0
        except CancelledGenerationError:
            self._metrics.cancelled.inc(len(batch))
        except ApiError as error:
            _fail(batch, error)
        except WriteError as error:
            _fail(batch, storage_failed(str(error)))
        except HoldoverError as error:
            given = [name for name in ("target", "quality") if cache.as_dict().get(name) is not None]
            param = f"cache.{given[0]}" if given else "cache"
            _fail(batch, invalid(str(error), param, "cannot_cache"))
        except torch.OutOfMemoryError:
            message = f"The device is out of memory: request a smaller {batch[0].spec.noun}."
            _fail(batch, ApiError(503, message, "out_of_memory"))
        except Exception:
            logger.exception("requests %s failed", ", ".join(item.spec.request_id for item in batch))
            self._failures += 1
            _fail(batch, internal())

    def _step_callback(self, batch: Sequence[QueueItem], model: ServedModel, backend: CacheBackend) -> OnStep:
        """Called after each step: stops a batch that is cancelled, and sends previews."""
        preview_steps = frozenset(step for item in batch for step in item.spec.preview_steps)
        decoder = None
        if model.decode is not None and preview_steps:
            decoder = PreviewDecoder(model.decode, model.pipeline.scheduler, batch[0].spec.size)

        def on_step(step: int, latents: torch.Tensor) -> None:
            _check_cancelled(batch)
            if decoder is None:
                return
            decoder.update(latents)
            if step + 1 in preview_steps:
                previews, trace = decoder.preview(step), _traces(backend.stats().last)
                for item, pixels in zip(batch, previews, strict=True):
                    if step + 1 in item.spec.preview_steps:
                        item.notify(Preview(pixels, step + 1, trace))

        return on_step

    def _finish(
        self, batch: Sequence[QueueItem], images: Pixels, model: ServedModel, stats: GenerationStats, start: float
    ) -> None:
        """Record the batch, and resolve the futures of its items."""
        first = batch[0].spec
        self._queue.admission.record((time.monotonic() - start) / len(batch))
        infos = self._record([item.spec for item in batch], [start - item.submitted for item in batch], stats, start)
        image_tokens = first.size[0] * first.size[1] // model.info.size_multiple**2
        for item, pixels, info in zip(batch, images, infos, strict=True):
            item.notify(GeneratedImage(pixels, info, (model.count_tokens(item.spec.prompt), image_tokens)))

    def _record(
        self, specs: Sequence[ImageSpec], queued: Sequence[float], stats: GenerationStats, start: float
    ) -> list[GenerationInfo]:
        """Count a generation that has just ended, and describe each image of it."""
        seconds, first = time.monotonic() - start, specs[0]
        expected = stats.expected
        kept = expected.psnr if expected is not None and len(expected.psnr) == len(specs) else (None,) * len(specs)
        infos = [
            GenerationInfo(
                seed=spec.seed,
                method=first.cache.method,
                settings=first.cache.as_dict(),
                steps=first.steps,
                drawn_size=format_size(first.size),
                computed=dict(stats.computed),
                held=dict(stats.held),
                trace=_traces(stats),
                seconds=Seconds(
                    queued=waited, generation=seconds, computed=stats.seconds(True), held=stats.seconds(False)
                ),
                batch=len(specs),
                held_bytes=stats.peak_bytes,
                expected_psnr=psnr,
                notes=list(stats.notes),
            )
            for spec, waited, psnr in zip(specs, queued, kept, strict=True)
        ]
        computed, held = sum(stats.computed.values()), sum(stats.held.values())
        done = MethodTotals(images=len(specs), generations=1, computed=computed, held=held, peak_bytes=stats.peak_bytes)
        self._totals[first.cache.method].add(done)
        self._last = infos[-1]
        self._metrics.record(infos)
        return infos

    def _generate_video(self, item: QueueItem, spec: VideoSpec, model: ServedModel, switch: CacheSwitch) -> None:
        """Generate a video, and write each frame when it is decoded.

        A video that is compared is generated without a cache first, and both are written at the end. The frames of the
        last one without a cache are kept: other settings of a method are compared with them.
        """
        start, steps, plain = time.monotonic(), 0, self._plain

        def run(one: VideoSpec, take: TakeFrame) -> GenerationInfo:
            begun = time.monotonic()

            def on_step(step: int, latents: torch.Tensor) -> None:
                _check_cancelled([item])
                item.notify(Progress(steps + step + 1, total))

            with switch.use(one.cache) as backend:
                _check_cancelled([item])  # setting a method up may take a while
                model.generate_video(one, on_step, take)
                stats = backend.stats().last or GenerationStats(one.cache.method, {})
            return self._record([one], [start - item.submitted], stats, begun)[0]

        uncached = replace(spec, cache=NoneConfig(), compare=False, path="", request_id="")
        if plain is None or plain[0] != uncached or not spec.compare:
            plain = None
        total = spec.steps * (2 if spec.compare and plain is None else 1)
        if spec.compare and plain is None:
            self._plain, frames = None, list[Pixels]()  # no third video in memory
            info = run(uncached, lambda frame: frames.append(frame_to_pixels(frame)))
            plain = self._plain = uncached, frames, info
            steps = spec.steps
        comparison = None
        if plain is None:
            with _video_file(spec, spec.path, spec.cache) as file:
                info = run(spec, file.add)
                _check_cancelled([item])
        else:
            cached = list[Pixels]()
            info = run(spec, lambda frame: cached.append(frame_to_pixels(frame)))
            comparison = compare_videos(plain[1], cached, plain[2], info)
            for path, pixels, cache in (
                (spec.plain_path, plain[1], uncached.cache),
                (spec.path, cached, spec.cache),
            ):
                with _video_file(spec, path, cache) as file:
                    for frame in pixels:
                        file.add(torch.from_numpy(frame).movedim(-1, 0) / 255)
                    _check_cancelled([item])
        self._queue.admission.record(time.monotonic() - start)
        if not item.notify(GeneratedVideo(info, comparison)):  # it was deleted meanwhile
            for path in (spec.path, spec.plain_path):
                Path(path).unlink(missing_ok=True)


def compare_videos(
    plain: Sequence[Pixels], cached: Sequence[Pixels], before: GenerationInfo, after: GenerationInfo
) -> VideoComparison:
    """The difference between two videos, of frames of (H, W, 3) bytes, and between the times they took."""
    errors = [float(((a.astype(np.float64) - b) ** 2).mean()) / 255**2 for a, b in zip(plain, cached, strict=True)]
    decibels = [-10 * math.log10(error) if error else None for error in (*errors, fmean(errors))]
    return VideoComparison(
        psnr=decibels.pop(),
        psnr_frames=decibels,
        equal=not any(errors),
        speedup=before.seconds.generation / after.seconds.generation,
        plain=before,
    )


def _video_file(spec: VideoSpec, path: str, cache: Config) -> VideoFile:
    """An MP4 file that says how its video was generated, without its prompt."""
    comment = {"seed": spec.seed, "steps": spec.steps, "method": cache.method, "settings": cache.as_dict()}
    return VideoFile(Path(path), spec.fps, json.dumps(comment))


def _check_cancelled(batch: Sequence[QueueItem]) -> None:
    if all(item.future.cancelled() for item in batch):
        raise CancelledGenerationError


def _fail(batch: Sequence[QueueItem], error: ApiError) -> None:
    for item in batch:
        item.notify(error)


def _traces(stats: GenerationStats | None) -> dict[str, str]:
    """One character per step for each branch: `C` computed, `h` held."""
    return {} if stats is None else {branch: stats.trace(branch) for branch in stats.branches}


class CacheSwitch:
    """The cache on one pipeline: one at a time, changed between batches."""

    def __init__(self, pipeline: Any, cache: Config) -> None:
        self._pipeline = pipeline
        self._backend, self._cache = self._enable(cache), cache

    @contextmanager
    def use(self, cache: Config) -> Iterator[CacheBackend]:
        """The backend for one batch. A method stays enabled until a batch needs another one."""
        with ExitStack() as stack:
            if not self._backend.is_enabled() or cache != self._cache:
                self._switch(cache, stack)
            yield self._backend

    def disable(self) -> None:
        """Restore the pipeline."""
        if self._backend.is_enabled():
            self._backend.disable()

    def _switch(self, cache: Config, stack: ExitStack) -> None:
        """Change the enabled method's settings until the stack ends, or replace it; it stays if that fails."""
        if enabled := self._backend.is_enabled():
            with suppress(NotImplementedError):  # the backend has one setting for all generations: replace it
                if cache == NoneConfig():
                    stack.enter_context(self._backend.off())
                    return
                if cache.method == self._cache.method:
                    stack.enter_context(self._backend.using(**cache.as_dict()))
                    return
        self.disable()
        try:
            self._backend, self._cache = self._enable(cache), cache
        except Exception:
            if enabled:
                self._backend = self._enable(self._cache)
            raise

    def _enable(self, cache: Config) -> CacheBackend:
        backend = backend_for_config(cache)
        backend.enable(self._pipeline)
        return backend


def _with_commit(cache: Config) -> Config:
    """A config whose profile, if it is on the Hub, is named by its commit: all requests use the same one."""
    profile = getattr(cache, "profile", None)
    return cache if pin(profile) == profile else replace(cache, profile=pin(profile))  # type: ignore[call-arg]


def profile_report(cache: Config, pipeline: Any, shipped: Profile | None = None) -> ProfileReport:
    """What the profiles say about this pipeline's transformer: constants of the method, certificates, frontier.

    `shipped` is the shipped profile of this model, which is used where the cache names none.
    """
    transformer, settings = next(iter(find_transformers(pipeline).values())), cache.as_dict()
    named = settings["profile"] if cache.method == TARGET_METHOD else None
    measured = shipped if named is None else resolve_profile(named, transformer)
    constants: MethodProfile | None = None
    if cache.constants and settings[cache.constants] is None:
        method: Any = cache.method
        constants = find(method, transformer, pipeline, settings["profile"], settings.get("signal"))
    profile: dict[str, Any] | None = None
    if constants is not None:
        profile = {name: getattr(constants, name) for name in ("name", "model", "notes")}
        source = dict(constants.source) | ({"origin": constants.origin} if constants.origin else {})
        profile |= {"method": cache.method, "source": source}
    if measured is None:
        return ProfileReport(profile=profile)
    facts = measured.facts
    if profile is None:
        profile = {
            "method": TARGET_METHOD,
            "name": facts.name,
            "model": facts.pipeline,
            "source": {"date": facts.date, "prompts": str(facts.prompts), **dict(facts.versions)}
            | ({"origin": facts.origin} if facts.origin else {}),
            "notes": f"{len(facts.noise)} steps, {facts.scheduler}",
        }
    certificates = [
        {name: getattr(certificate, name) for name in ("target", "share", "confidence", "prompts", "below")}
        | {"computed": len(certificate.computed), "steps": len(certificate.noise), "said": str(certificate)}
        for certificate in facts.certificates
    ]
    frontier = [
        FrontierPoint(speed=len(tried.noise) / len(tried.computed), psnr=tried.psnr, origin=tried.origin)
        for tried in facts.schedules
        if math.isfinite(tried.psnr)
    ]
    frontier.sort(key=lambda point: point.speed)
    return ProfileReport(profile=profile, certificates=certificates, frontier=frontier, targets=True)
