"""The run itself: every record in turn, fresh processes beside it, a census now and then, a verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from .census import Census, count
from .fresh import Fresh
from .place import Place
from .plan import PIPELINES, Record, State

# What may grow between the first and the last third of the samples, with adapters and all but two caches taken off: the
# allocator's pages, what diffusers remembers of the shapes it has met, and what an aborted generation leaves until the
# next one begins.
ALLOWED = {"rss_mb": 16.0, "tensors": 16, "tensor_mb": 0.1, "holdover_objects": 4, "private_classes": 0}

Pending = tuple[Fresh, torch.Tensor, int]  # a picture, how many forwards of it were held, and who makes it again


@dataclass
class Outcome:
    """What came of a run."""

    generations: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    by_pipeline: Counter[str] = field(default_factory=Counter)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Census] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def equal(self) -> int:
        """How many pictures were those of a fresh process, bit for bit."""
        return sum(c["equal"] for c in self.comparisons)

    def growth(self) -> dict[str, float]:
        """The median of the last third of the samples less that of the first."""
        third = max(len(self.samples) // 3, 1)
        first, last = self.samples[:third], self.samples[-third:]
        return {key: round(_median(last, key) - _median(first, key), 3) for key in ALLOWED}

    def faults(self) -> list[str]:
        """What did not hold, in words; empty when all did."""
        unequal = [f"generation {c['index']} differs from a fresh one" for c in self.comparisons if not c["equal"]]
        grown = [f"{key} grew by {by:g}" for key, by in self.growth().items() if by > ALLOWED[key]]
        return unequal + grown


def _median(samples: Sequence[Census], key: str) -> float:
    return float(median(getattr(sample, key) for sample in samples))


def soak(plan: Sequence[Record], samples: int = 12, progress: Callable[[Outcome], None] | None = None) -> Outcome:
    """Run a plan on pipelines that live as long as it does."""
    torch.set_num_threads(1)
    outcome, begin = Outcome(), time.perf_counter()
    places = {name: Place(name) for name in PIPELINES}
    _warm_up(places)
    pending: list[Pending] = []
    every = max(len(plan) // samples, 1)
    for record in plan:
        place = places[record.pipeline]
        picture = place.generate(record)
        outcome.generations += 1
        outcome.by_pipeline[record.pipeline] += 1
        if record.compare:
            _settle(outcome, pending)
            assert picture is not None
            pending.append((Fresh(record), picture.clone(), place.held))
        if outcome.generations % every == 0:
            _settle(outcome, pending)
            outcome.samples.append(_at_rest(places, record.index))
        outcome.seconds = time.perf_counter() - begin
        outcome.counts = sum((place.counts for place in places.values()), Counter())
        if progress is not None:
            progress(outcome)
    _settle(outcome, pending)
    return outcome


def _warm_up(places: dict[str, Place]) -> None:
    """Meet every shape once, and read the shipped profiles: what is learnt once is no growth."""
    for name, place in places.items():
        for size, guidance in ((0, True), (0, False), (1, True), (1, False)):
            place.generate(Record(-1, name, 3, 0, size=size, guidance=guidance, state=State.at_rest(name)))
    for method in ("tea_cache", "mag_cache"):
        places["FluxPipeline"].bring_to(State({"method": method, "settings": {}}))


def _at_rest(places: dict[str, Place], index: int) -> Census:
    """A census with everything taken off but what stays; the next records put on what they need."""
    for name, place in places.items():
        place.bring_to(State.at_rest(name))
    return count(index)


def _settle(outcome: Outcome, pending: list[Pending]) -> None:
    """Compare with the fresh processes that are still at work."""
    for fresh, picture, held in pending:
        expected, record = fresh.picture(), fresh.record
        equal = expected.dtype == picture.dtype and torch.equal(expected, picture)
        comparison = {"index": record.index, "pipeline": record.pipeline, "held": held, "equal": equal}
        outcome.comparisons.append(comparison)
    pending.clear()
