"""Run a comparison: the uncached reference once, every candidate, and the baselines with fewer steps."""

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
from ..engine.backend import find_cache
from ..errors import ConfigError, HoldoverError
from ..metrics import SSIM_WINDOW, as_images, each, latents_as_images, lpips, lpips_missing, nonwhite_error, psnr, ssim
from .baselines import to_second_order
from .generation import check_arguments, check_clock, describe_environment, generate_images, warm_up
from .results import Folder, Results, Row
from .spec import Candidate, Comparison, Custom, FewerSteps, MethodCandidate, Strips, StripSource

UNCACHED: dict[str, Any] = {"kind": "reference", "label": "uncached"}


class ProgressCallback:
    """Is called while a comparison runs; this one does nothing."""

    def on_start(self, label: str, steps: int) -> None:
        """A candidate starts."""

    def on_batch(self, label: str, done: int, total: int) -> None:
        """`done` of `total` images of a candidate are generated."""

    def on_finish(self, row: Row, results: Results) -> None:
        """A candidate is done, now or in an earlier run."""


def compare(
    pipe: Any,
    spec: Comparison,
    folder: Folder | Path | str | None = None,
    callback: ProgressCallback | None = None,
) -> Results:
    """Generate and measure everything; with a folder, rows of an earlier run of the same comparison are reused.

    Candidates can be added to a comparison in a folder. Where its other settings, the model, the device or the versions
    differ, a ConfigError is raised. A candidate that fails becomes a row with the error, and is tried again next time.
    """
    if find_cache(pipe) is not None:
        raise ConfigError("There is a cache on this pipeline; disable it before comparing.")
    check_arguments(pipe, spec)
    check_clock(pipe, spec)
    if isinstance(folder, (Path, str)):
        folder = Folder(folder)
    if folder is not None:
        folder.prepare()
    return _Run(pipe, spec, folder, callback or ProgressCallback()).run()


class ReferenceMetrics:
    """Every available metric of outputs against the reference images, on the device of the pipeline."""

    def __init__(self, reference: torch.Tensor, output_type: str, device: torch.device) -> None:
        self.latent = output_type == "latent"
        self.device = device
        self._range = (float(reference.min()), float(reference.max()))
        self.reference = self.to_images(reference)
        self.unavailable: dict[str, str] = {}
        channels, height, width = self.reference.shape[-3:]
        if min(height, width) < SSIM_WINDOW:
            self.unavailable["ssim"] = f"the images are {height} x {width}, smaller than its window of 11 x 11"
        missing = "the images are not RGB" if channels != 3 else lpips_missing()
        if missing is not None:
            self.unavailable["lpips"] = missing

    def to_images(self, output: torch.Tensor) -> torch.Tensor:
        """An output as float images or videos."""
        if not torch.isfinite(output).all():
            raise HoldoverError("the images have pixels that are not finite")
        return latents_as_images(output, *self._range) if self.latent else as_images(output)

    def measure(self, images: torch.Tensor) -> dict[str, tuple[float, ...]]:
        """One value per image or video, by metric."""
        pairs = [(a.to(self.device), b.to(self.device)) for a, b in zip(self.reference, images, strict=True)]
        metrics = {"psnr": psnr, "ssim": ssim, "nonwhite_error": nonwhite_error, "lpips": lpips}
        return {
            name: tuple(float(each(metric, a[None], b[None])) for a, b in pairs)
            for name, metric in metrics.items()
            if name not in self.unavailable
        }


@dataclass
class _Decisions:
    """Which forwards were computed and which held, in every batch of one candidate."""

    strips: list[Strips] = field(default_factory=list)
    bytes_held: int = 0
    notes: tuple[str, ...] = ()

    def record(self, source: StripSource) -> None:
        """Add the latest generation."""
        if isinstance(source, CacheBackend):
            stats = source.stats()
            assert stats.last is not None
            self.strips.append({branch: stats.last.trace(branch) for branch in stats.last.branches})
            self.bytes_held, self.notes = max(self.bytes_held, stats.last.peak_bytes), stats.notes
        elif source is not None:
            self.strips.append(dict(source()))

    def mean_count(self, letter: str) -> dict[str, float]:
        """The count of a letter in the strips, by branch, as the mean over the batches."""
        branches = dict.fromkeys(branch for strips in self.strips for branch in strips)
        return {b: fmean(strips.get(b, "").count(letter) for strips in self.strips) for b in branches}


class _Run:
    """One comparison on one pipeline."""

    def __init__(self, pipe: Any, spec: Comparison, folder: Folder | None, callback: ProgressCallback) -> None:
        self.pipe, self.spec, self.folder, self.callback = pipe, spec, folder, callback
        self.environment = describe_environment(pipe)
        self.earlier = folder.load() if folder else None
        if self.earlier is not None:
            _check_equal("settings", self.earlier.settings, spec.settings())
            _check_equal("environment", self.earlier.environment, self.environment)

    def run(self) -> Results:
        """All rows, saved after each."""
        metrics, results = self._start()
        for candidate in self.spec.candidates:
            results = self._add_row(results, candidate, metrics)
        for baseline in choose_baselines(results) if self.spec.baselines else ():
            if baseline not in self.spec.candidates:
                results = self._add_row(results, baseline, metrics)
        self.earlier = None
        self._save(results)
        return results

    def _start(self) -> tuple[ReferenceMetrics, Results]:
        """The reference, generated or loaded, and results without rows."""
        output = self.folder.load_reference() if self.folder and self.earlier else None
        if self.earlier is not None and output is not None:
            row = self.earlier.reference
        else:
            self.earlier = None
            output, row = self._generate_reference()
        metrics = ReferenceMetrics(output, self.spec.output, torch.device(self.pipe.device))
        if self.folder and not row.images and not metrics.latent:
            row = replace(row, images=self.folder.save_images(UNCACHED, metrics.reference))
        date = datetime.now(UTC).isoformat(timespec="seconds")
        results = Results(self.spec.settings(), self.environment, date, row, (), metrics.unavailable)
        self._save(results)
        self.callback.on_finish(row, results)
        return metrics, results

    def _generate_reference(self) -> tuple[torch.Tensor, Row]:
        spec, total = self.spec, len(self.spec.images)
        self.callback.on_start("uncached", spec.steps)
        warm_up(self.pipe, spec, spec.steps)
        timed = generate_images(
            self.pipe, spec, spec.steps, lambda done: self.callback.on_batch("uncached", done, total)
        )
        if self.folder:
            self.folder.save_reference(timed.output)
        return timed.output, Row(UNCACHED, timed.seconds, spec.steps)

    def _add_row(self, results: Results, candidate: Candidate, metrics: ReferenceMetrics) -> Results:
        """The results with the row of a candidate; an earlier row is reused unless it failed."""
        entry = candidate.as_dict()
        known = self.earlier.rows if self.earlier else ()
        row = next((row for row in known if row.candidate == entry and row.error is None), None)
        if row is None:
            try:
                row = self._measure(candidate, metrics)
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                row = Row(entry, error=f"{type(error).__name__}: {lines[0]}")
        results = replace(results, rows=(*results.rows, row))
        self._save(results)
        self.callback.on_finish(row, results)
        return results

    def _measure(self, candidate: Candidate, metrics: ReferenceMetrics) -> Row:
        """Generate all images of a candidate and compare them with the reference."""
        steps = candidate.steps if isinstance(candidate, FewerSteps) else self.spec.steps
        label, total, decisions = candidate.label, len(self.spec.images), _Decisions()
        self.callback.on_start(label, steps)
        with apply_candidate(self.pipe, candidate) as source:

            def after_batch(done: int) -> None:
                decisions.record(source)
                self.callback.on_batch(label, done, total)

            warm_up(self.pipe, self.spec, steps, whole=isinstance(candidate, Custom))
            if self.spec.warmup and callable(source):
                source()  # discard the forwards of the warm-up
            timed = generate_images(self.pipe, self.spec, steps, after_batch)
        images = metrics.to_images(timed.output)
        row = Row(
            candidate.as_dict(),
            timed.seconds,
            steps,
            decisions.mean_count("C"),
            decisions.mean_count("h"),
            dict(decisions.strips[0]) if decisions.strips else {},
            decisions.bytes_held,
            metrics.measure(images),
            notes=decisions.notes,
        )
        if self.folder is None or metrics.latent:
            return row
        return replace(
            row,
            images=self.folder.save_images(row.candidate, images),
            differences=self.folder.save_differences(row.candidate, images, metrics.reference),
        )

    def _save(self, results: Results) -> None:
        """Save the rows so far, followed by the earlier rows that may still be reused."""
        if self.folder is None:
            return
        done = [row.candidate for row in results.rows]
        rest = [row for row in (self.earlier.rows if self.earlier else ()) if row.candidate not in done]
        replace(results, rows=(*results.rows, *rest)).save(self.folder.results)


def choose_baselines(results: Results) -> list[FewerSteps]:
    """Fewer steps with both solvers, at every number of steps that a candidate computed."""
    full = int(results.settings["steps"])
    cached = [row for row in results.rows if row.kind in ("method", "custom") and row.error is None]
    counts = {max(1, round(row.computed_steps)) for row in cached if row.computed_steps is not None}
    return [FewerSteps(count, order) for count in sorted(counts) if count < full for order in (False, True)]


def apply_candidate(pipe: Any, candidate: Candidate) -> AbstractContextManager[StripSource]:
    """A context manager in which the pipeline runs with the candidate."""
    if isinstance(candidate, MethodCandidate):
        return enable(pipe, candidate.name, **dict(candidate.settings))
    if isinstance(candidate, Custom):
        return candidate.context(pipe)
    return _use_second_order(pipe) if candidate.second_order else nullcontext()


@contextmanager
def _use_second_order(pipe: Any) -> Iterator[None]:
    original = pipe.scheduler
    pipe.scheduler = to_second_order(original)
    try:
        yield
    finally:
        pipe.scheduler = original


def _check_equal(what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to mix rows of two comparisons in one table; the message names the differences."""
    different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if different:
        text = ", ".join(f"{key} {there.get(key)!r} there and {here.get(key)!r} here" for key in different)
        raise ConfigError(f"The results in this folder have different {what}: {text}. Use another folder.")
