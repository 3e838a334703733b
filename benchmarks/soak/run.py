"""The soak run: long-lived pipelines, a fresh process that repeats some images, and counts of live objects."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import peft
import torch
from diffusers import DiffusionPipeline, SchedulerMixin
from torch import nn

import holdover
from tiny.pipelines import PIPELINES as TINY
from tiny.pipelines import run

from .. import ROOT
from .plan import PIPELINES, Record, State

# What may grow between the first and the last third of the samples, with adapters and all but two caches taken off: the
# allocator's pages, and shapes that diffusers remembers.
ALLOWED = {"rss_mb": 16.0, "tensors": 16, "tensor_mb": 0.1, "holdover_objects": 4, "private_classes": 0}
TOLERANCE = 1e-5  # relative distance to the image of another process, which may have tensors at other addresses
ADAPTER = "soak"
COMPONENTS = (nn.Module, SchedulerMixin, DiffusionPipeline)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])  # imported once for all fresh processes


# One pipeline


class AbortError(RuntimeError):
    """Ends a generation early, on purpose."""


class AbortInterrupt(KeyboardInterrupt):
    """Ends a generation as Ctrl-C would, but is not mistaken for it."""


class LivePipeline:
    """A tiny pipeline that lives through the whole run, and what is installed on it at the moment."""

    def __init__(self, name: str) -> None:
        self._tiny = TINY[name]
        self.pipe = self._tiny.build()
        self.state = State()
        self.counts: Counter[str] = Counter()
        self._cache: holdover.CacheBackend | None = None
        self._prompts: Any = None

    def generate(self, record: Record) -> torch.Tensor | None:
        """Run one record; None where it was aborted."""
        self.bring_to(record.state, again=record.again)
        if record.refresh and self._cache is not None:
            self._cache.refresh(self.pipe, record.steps, verbose=False)
        try:
            with self._override(record), self._events(record) as extra:
                return run(self._pipeline(record.through), **self._inputs(record) | extra)
        except (AbortError, AbortInterrupt):
            self.counts["aborted"] += 1
            return None

    @property
    def held(self) -> int:
        """How many forwards of the last generation were held."""
        last = None if self._cache is None else self._cache.stats().last
        return 0 if last is None else last.held_total

    def bring_to(self, state: State, again: bool = False) -> None:
        """Load, scale or unload adapters, and enable or disable caches, until the pipeline is in that state."""
        if state.lora != self.state.lora:
            self._set_lora(state.lora)
        if state.prompt_cache and not self.state.prompt_cache:
            self._prompts = holdover.install_prompt_embed_cache(self.pipe, max_size=2)
        if self.state.prompt_cache and not state.prompt_cache:
            self.counts["prompts found"] += self._prompts.hits
            holdover.uninstall_prompt_embed_cache(self.pipe)
            self._prompts = None
        if state.cache != self.state.cache or again:
            if self._cache is not None:
                stats = self._cache.stats()
                self.counts.update(computed=stats.computed, held=stats.held, disabled=1)
                self._cache.disable()
                self._cache = None
            if state.cache is not None:
                self._cache = holdover.enable(self.pipe, state.cache["method"], **state.cache["settings"])
        self.state = state

    def _set_lora(self, lora: dict[str, Any] | None) -> None:
        old = self.state.lora
        same = old is not None and lora is not None and (old["seed"], old["rank"]) == (lora["seed"], lora["rank"])
        for name in ("transformer", "transformer_2"):
            model = getattr(self.pipe, name, None)
            if model is None:
                continue
            if old is not None and lora is None:
                model.unload_lora()  # restores the plain layers
            elif old is not None and not same:
                model.delete_adapters(ADAPTER)  # leaves the layers wrapped
            if lora is not None and not same:
                model.add_adapter(peft.LoraConfig(r=lora["rank"], target_modules=["to_q", "to_v"]), ADAPTER)
                _fill_adapter(model, lora["seed"])
            if lora is not None:
                model.set_adapters([ADAPTER], [lora["scale"]])
        self.counts["lora changes"] += 1

    def _override(self, record: Record) -> AbstractContextManager[None]:
        if self._cache is None or record.override is None:
            return nullcontext()
        self.counts["overrides"] += 1
        return self._cache.using(**record.override) if record.override else self._cache.off()

    def _inputs(self, record: Record) -> dict[str, Any]:
        call = self._tiny.call(steps=record.steps, seed=record.seed, guidance=record.guidance, size=record.size)
        if "prompt" in call:
            call["prompt"] = record.prompt
        return {name: _repeat_prompt(name, value, record.batch) for name, value in call.items()}

    def _pipeline(self, through: str | None) -> Any:
        """The pipeline that generates: this one, or another with the same transformer."""
        if through is None:
            return self.pipe
        self.counts["through other pipelines"] += 1
        other = type(self.pipe).from_pipe(self.pipe)
        if hasattr(self.pipe, "tokenizer_max_length"):  # an attribute that the tiny pipelines shorten
            other.tokenizer_max_length = self.pipe.tokenizer_max_length
        if through == "own scheduler":
            other.scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        return other

    @contextmanager
    def _events(self, record: Record) -> Iterator[dict[str, Any]]:
        """Install what raises the record's error, stops it or replaces its prompt; yields the arguments it needs."""
        abort = record.abort or {"in": None}
        raise_in_time = _raiser(abort)

        def on_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if abort["in"] == "callback":
                raise_in_time()
            if abort["in"] == "interrupt" and step == abort["at"]:
                pipe._interrupt = True
                self.counts["interrupted"] += 1
            if step == record.switch:
                self.counts["prompts switched"] += 1
                return tensors | {"prompt_embeds": tensors["prompt_embeds"].neg()}
            return tensors

        if abort["in"] == "block":
            blocks = [b for c in self.pipe.transformer.children() if isinstance(c, nn.ModuleList) for b in c]
            block = blocks[int(abort["block"] * len(blocks))]
            handle = block.register_forward_hook(lambda *_: raise_in_time())
        try:
            needed = abort["in"] in ("callback", "interrupt") or record.switch is not None
            tensors = {"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
            yield {"callback_on_step_end": on_step_end, **tensors} if needed else {}
        finally:
            if abort["in"] == "block":
                handle.remove()


def _raiser(abort: dict[str, Any]) -> Callable[[], None]:
    """A function that raises at its call number `at`."""
    calls = iter(range(1 << 30))
    error = AbortInterrupt if abort.get("error") == "KeyboardInterrupt" else AbortError

    def raise_in_time() -> None:
        if next(calls) == abort["at"]:
            raise error

    return raise_in_time


def _fill_adapter(model: nn.Module, seed: int) -> None:
    """Seeded adapter weights that are large enough to change the image."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{ADAPTER}." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def _repeat_prompt(name: str, value: Any, batch: int) -> Any:
    """Prompts for a batch, each embedding a little different."""
    if batch == 1 or "prompt" not in name:
        return value
    if isinstance(value, torch.Tensor):
        return torch.cat([value * (1 + i / 10) if value.is_floating_point() else value for i in range(batch)])
    return [value] * batch if isinstance(value, str) else value


# A fresh process


class FreshProcess:
    """A process that has generated nothing before, at work on one record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._pipe, theirs = FORKS.Pipe(duplex=False)
        path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))  # how the fork server finds this module
        self._process = FORKS.Process(target=_generate_alone, args=(record.without_detours(), theirs), daemon=True)
        self._process.start()
        theirs.close()

    def image(self) -> torch.Tensor:
        """Wait for the image."""
        try:
            result: np.ndarray[Any, Any] | str = self._pipe.recv()
        except EOFError:
            result = "It ended without an answer."
        self._process.join()
        if isinstance(result, str):
            raise RuntimeError(f"The fresh process failed on {self.record.as_json()}:\n{result}")
        return torch.from_numpy(result)


def _generate_alone(record: Record, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        image = LivePipeline(record.pipeline).generate(record)
        assert image is not None
        pipe.send(image.numpy())
    except Exception:
        pipe.send(traceback.format_exc())


# What is alive


@dataclass(frozen=True)
class Census:
    """Memory and live objects after a garbage collection."""

    index: int
    rss_mb: float
    tensors: int
    tensor_mb: float
    holdover_objects: int
    statistics: int  # of the last generations of caches that stay on: as many as those had steps
    private_classes: int
    objects: int


def take_census(index: int) -> Census:
    """Collect garbage, then count."""
    gc.collect()
    alive = gc.get_objects()
    modules = [str(type(o).__module__) for o in alive]
    # Exact types: a compiler leaves symbolic tensors behind.
    tensors = [o for o in alive if type(o) in (torch.Tensor, nn.Parameter) and not o.is_meta]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Census(
        index,
        round(resident / 1e6, 1),
        len(tensors),
        round(sum(t.nbytes for t in tensors) / 1e6, 3),
        sum(module.startswith("holdover.") and module != "holdover.stats" for module in modules),
        modules.count("holdover.stats"),
        sum(_is_private_class(o) for o in alive if issubclass(type(o), type)),
        len(alive),
    )


def _is_private_class(cls: Any) -> bool:
    """Whether a class of pipelines, models or schedulers was made at run time: its module does not have it."""
    return issubclass(cls, COMPONENTS) and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls


# The run


@dataclass
class Outcome:
    """Counts, comparisons and samples of a run."""

    generations: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    by_pipeline: Counter[str] = field(default_factory=Counter)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Census] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def equal(self) -> int:
        """How many images were those of a fresh process, up to rounding."""
        return sum(c["equal"] for c in self.comparisons)

    def growth(self) -> dict[str, float]:
        """The median of the last third of the samples minus that of the first third."""
        third = max(len(self.samples) // 3, 1)

        def typical(samples: Sequence[Census], key: str) -> float:
            return float(median(getattr(sample, key) for sample in samples))

        return {k: round(typical(self.samples[-third:], k) - typical(self.samples[:third], k), 3) for k in ALLOWED}

    def faults(self) -> list[str]:
        """What went wrong, in words; empty if nothing did."""
        unequal = [
            f"generation {c['index']} differs from a fresh one by {c['distance']:.1g}"
            for c in self.comparisons
            if not c["equal"]
        ]
        return unequal + [f"{key} grew by {by:g}" for key, by in self.growth().items() if by > ALLOWED[key]]


Pending = tuple[FreshProcess, torch.Tensor, int]  # who repeats an image, the image, how many forwards of it were held


def soak(plan: Sequence[Record], samples: int = 12, progress: Callable[[Outcome], None] | None = None) -> Outcome:
    """Run a plan on pipelines that live as long as the run."""
    torch.set_num_threads(1)
    outcome, begin = Outcome(), time.perf_counter()
    pipelines = {name: LivePipeline(name) for name in PIPELINES}
    _warm_up(pipelines)
    pending: list[Pending] = []
    every = max(len(plan) // samples, 1)
    for record in plan:
        pipeline = pipelines[record.pipeline]
        image = pipeline.generate(record)
        outcome.generations += 1
        outcome.by_pipeline[record.pipeline] += 1
        if record.compare:
            _compare(outcome, pending)
            assert image is not None
            pending.append((FreshProcess(record), image.clone(), pipeline.held))
        if outcome.generations % every == 0:
            _compare(outcome, pending)
            _bring_to_rest(pipelines)
            outcome.samples.append(take_census(record.index))
        outcome.seconds = time.perf_counter() - begin
        outcome.counts = sum((pipeline.counts for pipeline in pipelines.values()), Counter())
        if progress is not None:
            progress(outcome)
    _compare(outcome, pending)
    return outcome


def _warm_up(pipelines: dict[str, LivePipeline]) -> None:
    """Run every shape once, enable a cache everywhere and read the shipped profiles: what stays once is no growth."""
    shapes = ((0, True), (0, False), (1, True), (1, False))
    for name, pipeline in pipelines.items():
        cache = State({"method": "mag_cache", "settings": {"mag_ratios": [1.0]}})
        for state, (size, guidance) in zip((cache, *[State.at_rest(name)] * 3), shapes, strict=True):
            pipeline.generate(Record(-1, name, 3, 0, size=size, guidance=guidance, state=state))
    for method in ("tea_cache", "mag_cache"):
        pipelines["FluxPipeline"].bring_to(State({"method": method, "settings": {}}))


def _bring_to_rest(pipelines: dict[str, LivePipeline]) -> None:
    """Disable all but the resident caches, and have these finish a generation: an aborted one keeps its state."""
    for name, pipeline in pipelines.items():
        state = State.at_rest(name)
        pipeline.bring_to(state)
        if state.cache is not None:
            pipeline.generate(Record(-1, name, 3, 0, state=state))


def _compare(outcome: Outcome, pending: list[Pending]) -> None:
    """Wait for the fresh processes that are still at work, and compare their images."""
    for fresh, image, held in pending:
        expected, record = fresh.image(), fresh.record
        alike = (expected.dtype, expected.shape) == (image.dtype, image.shape)
        distance = float((expected - image).abs().max() / expected.abs().max()) if alike else float("inf")
        comparison = {"index": record.index, "pipeline": record.pipeline, "held": held, "equal": distance <= TOLERANCE}
        outcome.comparisons.append(comparison | {"distance": distance})
    pending.clear()
