"""Run a comparison: the reference once, every candidate, and fewer steps beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..api import enable
from ..base import CacheBackend
from ..errors import ConfigError
from ..runtime.backend import cache_of
from .candidates import Candidate, Custom, FewerSteps, Method, Strips, Yielded
from .draw import check_arguments, check_clock, draw, warm_up
from .environment import environment
from .folder import Folder
from .measure import Ruler
from .results import Results, Row
from .solver import second_order
from .spec import Comparison

UNCACHED: dict[str, Any] = {"kind": "reference", "label": "uncached"}


class Watcher:
    """What a comparison tells while it runs; this one says nothing."""

    def started(self, label: str, steps: int) -> None:
        """A candidate begins."""

    def drew(self, label: str, done: int, total: int) -> None:
        """That many pictures of a candidate are there."""

    def finished(self, row: Row, results: Results) -> None:
        """A candidate is done, or had been done before."""


def compare(
    pipe: Any, spec: Comparison, folder: Folder | Path | str | None = None, watcher: Watcher | None = None
) -> Results:
    """Draw and measure everything; with a folder, what an earlier run of the same comparison left is taken over.

    Candidates may be added to a comparison that is in the folder. Where its other settings, the model, the device or
    the versions differ, it is refused. A candidate that fails is a row that says why, and is tried again next time.
    """
    if cache_of(pipe) is not None:
        raise ConfigError("There is a cache on this pipeline; disable it before comparing.")
    check_arguments(pipe, spec)
    check_clock(pipe, spec)
    place = Folder(folder) if isinstance(folder, (Path, str)) else folder
    if place is not None:
        place.prepare()
    return _Run(pipe, spec, place, watcher or Watcher()).results()


@dataclass
class _Tally:
    """The decisions of every batch of one candidate."""

    strips: list[Strips] = field(default_factory=list)
    bytes_held: int = 0
    notes: tuple[str, ...] = ()

    def read(self, source: Yielded) -> None:
        """Take down the newest generation."""
        if isinstance(source, CacheBackend):
            stats = source.stats()
            assert stats.last is not None
            self.strips.append({branch: stats.last.trace(branch) for branch in stats.last.branches})
            self.bytes_held, self.notes = max(self.bytes_held, stats.last.peak_bytes), stats.notes
        elif source is not None:
            self.strips.append(dict(source()))

    def mean(self, letter: str) -> dict[str, float]:
        """How often a letter stands in a strip, by branch, the mean over the batches."""
        branches = dict.fromkeys(branch for strips in self.strips for branch in strips)
        return {b: fmean(strips.get(b, "").count(letter) for strips in self.strips) for b in branches}


class _Run:
    """One comparison on one pipeline."""

    def __init__(self, pipe: Any, spec: Comparison, folder: Folder | None, watcher: Watcher) -> None:
        self.pipe, self.spec, self.folder, self.watcher = pipe, spec, folder, watcher
        self.environment = environment(pipe)
        self.earlier = self._earlier()

    def results(self) -> Results:
        """All rows, saved after each."""
        ruler, results = self._begin()
        for candidate in self.spec.candidates:
            results = self._with_row(results, candidate, ruler)
        for baseline in baselines(results) if self.spec.baselines else ():
            if baseline not in self.spec.candidates:
                results = self._with_row(results, baseline, ruler)
        self.earlier = None
        self._save(results)
        return results

    def _earlier(self) -> Results | None:
        found = self.folder.load() if self.folder else None
        if found is not None:
            refuse_other("settings", found.settings, self.spec.settings())
            refuse_other("environment", found.environment, self.environment)
        return found

    def _begin(self) -> tuple[Ruler, Results]:
        """The reference, drawn or taken over, and results without rows."""
        kept = self.folder.load_reference() if self.folder and self.earlier else None
        row = self.earlier.reference if self.earlier and kept is not None else None
        if kept is None or row is None:
            self.earlier = None
            kept, row = self._draw_reference()
        ruler = Ruler(kept, self.spec.output, torch.device(self.pipe.device))
        if self.folder and not row.pictures and not ruler.latent:
            row = replace(row, pictures=self.folder.save_pictures(UNCACHED, ruler.reference))
        date = datetime.now(UTC).isoformat(timespec="seconds")
        results = Results(self.spec.settings(), self.environment, date, row, (), ruler.unavailable)
        self._save(results)
        self.watcher.finished(row, results)
        return ruler, results

    def _draw_reference(self) -> tuple[torch.Tensor, Row]:
        spec = self.spec
        self.watcher.started("uncached", spec.steps)
        total = len(spec.images)
        warm_up(self.pipe, spec, spec.steps)
        drawn = draw(self.pipe, spec, spec.steps, lambda done: self.watcher.drew("uncached", done, total))
        if self.folder:
            self.folder.save_reference(drawn.output)
        return drawn.output, Row(UNCACHED, drawn.seconds, spec.steps)

    def _with_row(self, results: Results, candidate: Candidate, ruler: Ruler) -> Results:
        """The results with one more row; an earlier row is taken over unless it is a failure."""
        entry = candidate.as_dict()
        known = self.earlier.rows if self.earlier else ()
        row = next((row for row in known if row.candidate == entry and row.error is None), None)
        if row is None:
            row = self._tried(candidate, ruler)
        results = replace(results, rows=(*results.rows, row))
        self._save(results)
        self.watcher.finished(row, results)
        return results

    def _tried(self, candidate: Candidate, ruler: Ruler) -> Row:
        try:
            return self._drawn(candidate, ruler)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return Row(candidate.as_dict(), error=f"{type(error).__name__}: {lines[0]}")

    def _drawn(self, candidate: Candidate, ruler: Ruler) -> Row:
        steps = candidate.steps if isinstance(candidate, FewerSteps) else self.spec.steps
        label, total, tally = candidate.label, len(self.spec.images), _Tally()
        self.watcher.started(label, steps)
        with around(self.pipe, candidate) as source:

            def after_batch(done: int) -> None:
                tally.read(source)
                self.watcher.drew(label, done, total)

            warm_up(self.pipe, self.spec, steps, whole=isinstance(candidate, Custom))
            if self.spec.warmup and callable(source):
                source()  # what counts from outside has counted the warm-up as well
            drawn = draw(self.pipe, self.spec, steps, after_batch)
        images = ruler.images(drawn.output)
        row = Row(
            candidate.as_dict(),
            drawn.seconds,
            steps,
            tally.mean("C"),
            tally.mean("h"),
            dict(tally.strips[0]) if tally.strips else {},
            tally.bytes_held,
            ruler.values(images),
            notes=tally.notes,
        )
        return self._pictured(row, images, ruler)

    def _pictured(self, row: Row, images: torch.Tensor, ruler: Ruler) -> Row:
        if self.folder is None or ruler.latent:
            return row
        pictures = self.folder.save_pictures(row.candidate, images)
        differences = self.folder.save_differences(row.candidate, images, ruler.reference)
        return replace(row, pictures=pictures, differences=differences)

    def _save(self, results: Results) -> None:
        """Save the rows so far, and behind them the earlier ones that may still be taken over."""
        if self.folder is None:
            return
        done = [row.candidate for row in results.rows]
        rest = [row for row in (self.earlier.rows if self.earlier else ()) if row.candidate not in done]
        replace(results, rows=(*results.rows, *rest)).save(self.folder.results)


def baselines(results: Results) -> list[FewerSteps]:
    """Fewer steps of both orders, at every number of computed steps that a candidate came to."""
    full = int(results.settings["steps"])
    cached = [row for row in results.rows if row.kind in ("method", "custom") and row.error is None]
    counts = {max(1, round(row.computed_steps)) for row in cached if row.computed_steps is not None}
    return [FewerSteps(count, order) for count in sorted(counts) if count < full for order in (False, True)]


def around(pipe: Any, candidate: Candidate) -> AbstractContextManager[Yielded]:
    """The candidate on the pipeline, for as long as the block lasts."""
    if isinstance(candidate, Method):
        return enable(pipe, candidate.name, **dict(candidate.settings))
    if isinstance(candidate, Custom):
        return candidate.around(pipe)
    return _second_order_solver(pipe) if candidate.second_order else nullcontext()


@contextmanager
def _second_order_solver(pipe: Any) -> Iterator[None]:
    own = pipe.scheduler
    pipe.scheduler = second_order(own)
    try:
        yield
    finally:
        pipe.scheduler = own


def refuse_other(what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to put rows of two comparisons into one table; the message names what differs."""
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if different:
        lines = ", ".join(f"{key} {there.get(key)!r} there and {here.get(key)!r} here" for key in different)
        raise ConfigError(f"The results in this folder have another {what}: {lines}. Use another folder.")
