"""Run a comparison: the uncached reference once, every candidate, and the baselines with fewer steps."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from ..api import enable
from ..base import CacheBackend
from ..engine.backend import find_cache
from ..errors import ConfigError, HoldoverError, did_you_mean
from ..metrics import (
    LPIPS_SIDE,
    METRICS,
    SSIM_WINDOW,
    as_images,
    each,
    get_images,
    latents_as_images,
    lpips,
    nonwhite_error,
    psnr,
    ssim,
    worst_frame,
)
from ..models.pipelines import find_transformers
from ..plan.calls import check_video, defaults_of, image_arguments, keywords_of, open_image
from ..profiles.hub import pin
from ..video import RATE_KEYWORDS, default_rate
from .baselines import to_second_order
from .results import Folder, Results, Row
from .spec import Candidate, Comparison, Custom, FewerSteps, MethodCandidate, Strips, StripSource

_PACKAGES = ("holdover", "torch", "diffusers", "transformers", "cache-dit")
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
    pipe: Any, spec: Comparison, folder: Folder | Path | str | None = None, callback: ProgressCallback | None = None
) -> Results:
    """Generate and measure everything; with a folder, rows of an earlier run of the same comparison are reused.

    Candidates can be added to a comparison in a folder. Where its other settings, the model, the device or the versions
    differ, a ConfigError is raised. A candidate that fails becomes a row with the error, and is tried again next time.
    """
    if find_cache(pipe) is not None:
        raise ConfigError("There is a cache on this pipeline; disable it before comparing.")
    check_pipeline(pipe, spec)
    if folder is not None:
        folder = folder if isinstance(folder, Folder) else Folder(folder)
        folder.prepare()
    return _Run(pipe, spec, folder, callback or ProgressCallback()).run()


class ReferenceMetrics:
    """Every available metric of outputs against the reference outputs, one after the other, on a device."""

    def __init__(self, reference: Sequence[torch.Tensor], output_type: str, device: torch.device) -> None:
        self.latent, self.device, self.reference = output_type == "latent", device, reference
        self._range = (0.0, 1.0)
        if self.latent:
            self._range = min(float(one.min()) for one in reference), max(float(one.max()) for one in reference)
        self.unavailable: dict[str, str] = {}
        channels, height, width = (first := self.to_image(reference[0])).shape[-3:]
        self.frames = len(first) if first.ndim == 4 else 0
        if min(height, width) < SSIM_WINDOW:
            self.unavailable["ssim"] = f"the images are {height} x {width}, smaller than its window of 11 x 11"
        if channels != 3:
            self.unavailable["lpips"] = "the images are not RGB"
        elif min(height, width) < LPIPS_SIDE:
            self.unavailable["lpips"] = f"the images are {height} x {width}; AlexNet takes {LPIPS_SIDE} x {LPIPS_SIDE}"

    def to_image(self, output: torch.Tensor) -> torch.Tensor:
        """One output as a float image or video."""
        if not torch.isfinite(output).all():
            raise HoldoverError("the images have pixels that are not finite")
        return (latents_as_images(output[None], *self._range) if self.latent else as_images(output[None]))[0]

    def measure(self, number: int, image: torch.Tensor) -> dict[str, float]:
        """The value of every metric of an image or video; of a video also the index of its `worst_frame`."""
        pair = self.to_image(self.reference[number]).to(self.device), image.to(self.device)
        metrics = {"psnr": psnr, "ssim": ssim, "nonwhite_error": nonwhite_error, "lpips": lpips}
        found = {name: metric for name, metric in metrics.items() if name not in self.unavailable}
        values = {name: float(each(metric, *(one[None] for one in pair))) for name, metric in found.items()}
        return values | ({"worst_frame": worst_frame(*pair)} if self.frames else {})


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


def _with_commit(candidate: Candidate) -> Candidate:
    """A candidate whose profile, if it is on the Hub, is named by its commit: rows of another one are not reused."""
    if not isinstance(candidate, MethodCandidate):
        return candidate
    settings = tuple((key, pin(value) if key == "profile" else value) for key, value in candidate.settings)
    return replace(candidate, settings=settings)


class _Run:
    """One comparison on one pipeline."""

    def __init__(self, pipe: Any, spec: Comparison, folder: Folder | None, callback: ProgressCallback) -> None:
        spec = replace(spec, candidates=tuple(map(_with_commit, spec.candidates)))
        self.pipe, self.spec, self.folder, self.callback = pipe, spec, folder, callback
        self.fps = find_rate(pipe, spec)
        self.environment = describe_environment(pipe)
        self.earlier = folder.load() if folder else None
        if self.earlier is None:
            return
        for what, here in (("settings", spec.settings()), ("environment", self.environment)):
            there = getattr(self.earlier, what)
            different = [key for key in {**there, **here} if there.get(key) != here.get(key)]
            if different:  # rows of two comparisons in one table would not be comparable
                text = ", ".join(f"{key} {there.get(key)!r} there and {here.get(key)!r} here" for key in different)
                raise ConfigError(f"The results in this folder have different {what}: {text}. Use another folder.")

    def run(self) -> Results:
        """All rows, saved after each: candidates, and fewer steps at every number of steps that one computed."""
        metrics, results = self._start()
        for candidate in self.spec.candidates:
            results = self._add_row(results, candidate, metrics)
        cached = [row for row in results.rows if row.kind in ("method", "custom") and row.error is None]
        counts = {max(1, round(row.computed_steps)) for row in cached if row.computed_steps is not None}
        # Other schedulers, such as Wan's UniPC, are of second order themselves or have no second-order form here.
        orders = (
            (False, True)
            if isinstance(getattr(self.pipe, "scheduler", None), FlowMatchEulerDiscreteScheduler)
            else (False,)
        )
        baselines = [FewerSteps(count, order) for count in sorted(counts) for order in orders]
        for baseline in baselines if self.spec.baselines else ():
            if baseline.steps < self.spec.steps and baseline not in self.spec.candidates:
                results = self._add_row(results, baseline, metrics)
        self.earlier = None
        self._save(results)
        return results

    def _start(self) -> tuple[ReferenceMetrics, Results]:
        """The reference, generated or loaded, and results without rows."""
        count = len(self.spec.images)
        outputs = self.folder.load_reference(count) if self.folder and self.earlier else None
        if self.earlier is not None and outputs is not None:
            row = self.earlier.reference
        else:
            self.earlier, outputs = None, []
            if self.folder:
                self.folder.clear_reference()

            def keep(number: int, output: torch.Tensor) -> None:
                outputs.append(self.folder.save_reference(number, output) if self.folder else output)

            seconds, _ = self._generate(None, self.spec.steps, keep)
            row = Row(UNCACHED, seconds, self.spec.steps)
        metrics = ReferenceMetrics(outputs, self.spec.output, get_device(self.pipe))
        row = replace(row, frames=metrics.frames)
        if self.folder and not row.images and not metrics.latent:
            images = (metrics.to_image(output) for output in outputs)
            files = [self.folder.save_image(UNCACHED, number, image, self.fps) for number, image in enumerate(images)]
            row = replace(row, images=tuple(files))
        date = datetime.now(UTC).isoformat(timespec="seconds")
        results = Results(self.spec.settings(), self.environment, date, row, (), metrics.unavailable)
        self._save(results)
        self.callback.on_finish(row, results)
        return metrics, results

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
        """Generate the images of a candidate, compare each with the reference, and keep none of them in memory."""
        steps = candidate.steps if isinstance(candidate, FewerSteps) else self.spec.steps
        entry, found, images, differences = candidate.as_dict(), list[dict[str, float]](), list[str](), list[str]()

        def measure(number: int, output: torch.Tensor) -> None:
            image = metrics.to_image(output)
            found.append(metrics.measure(number, image))
            if self.folder is not None and not metrics.latent:
                reference = metrics.to_image(metrics.reference[number])
                images.append(self.folder.save_image(entry, number, image, self.fps))
                differences.append(self.folder.save_difference(entry, number, image, reference, self.fps))

        seconds, decisions = self._generate(candidate, steps, measure)
        return Row(
            entry,
            seconds,
            steps,
            decisions.mean_count("C"),
            decisions.mean_count("h"),
            dict(decisions.strips[0]) if decisions.strips else {},
            decisions.bytes_held,
            {name: tuple(values[name] for values in found) for name in found[0] if name in METRICS},
            tuple(images),
            tuple(differences),
            decisions.notes,
            frames=metrics.frames,
            worst_frames=tuple(int(values["worst_frame"]) for values in found) if metrics.frames else (),
        )

    def _generate(
        self, candidate: Candidate | None, steps: int, take: Callable[[int, torch.Tensor], None]
    ) -> tuple[tuple[float, ...], _Decisions]:
        """Generate every image with a candidate or uncached; `take` gets its number and the output.

        Returns the seconds that each took, and what was computed and held.
        """
        label, decisions, seconds = candidate.label if candidate else "uncached", _Decisions(), list[float]()
        self.callback.on_start(label, steps)
        with apply_candidate(self.pipe, candidate) as source:
            warm_up(self.pipe, self.spec, steps, whole=isinstance(candidate, Custom))
            if self.spec.warmup and callable(source):
                source()  # discard the forwards of the warm-up
            for outputs, took in generate_batches(self.pipe, self.spec, steps):
                decisions.record(source)
                for output in outputs:
                    take(len(seconds), output)
                    seconds.append(took)
                self.callback.on_batch(label, len(seconds), len(self.spec.images))
        return tuple(seconds), decisions

    def _save(self, results: Results) -> None:
        """Save the rows so far, followed by the earlier rows that may still be reused."""
        if self.folder is None:
            return
        done = [row.candidate for row in results.rows]
        rest = [row for row in (self.earlier.rows if self.earlier else ()) if row.candidate not in done]
        replace(results, rows=(*results.rows, *rest)).save(self.folder.results)


@contextmanager
def apply_candidate(pipe: Any, candidate: Candidate | None) -> Iterator[StripSource]:
    """The pipeline runs with the candidate, or uncached."""
    if isinstance(candidate, MethodCandidate):
        with enable(pipe, candidate.name, **dict(candidate.settings)) as cache:
            yield cache
    elif isinstance(candidate, Custom):
        with candidate.context(pipe) as source:
            yield source
    elif candidate is not None and candidate.second_order:
        original = pipe.scheduler
        pipe.scheduler = to_second_order(original)
        try:
            yield None
        finally:
            pipe.scheduler = original
    else:
        yield None


# Generate and time all images with a pipeline as it is, and describe what it ran on.


def generate_batches(pipe: Any, spec: Comparison, steps: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Generate every prompt with every seed: for each batch its images on the CPU, and the seconds that each took."""
    clock = time.process_time if spec.clock == "cpu" else time.perf_counter
    for start in range(0, len(spec.images), spec.batch_size):
        images = spec.images[start : start + spec.batch_size]
        _synchronize()
        begin = clock()
        output = _generate_batch(pipe, spec, steps, images)
        _synchronize()
        took = (clock() - begin) / len(images)
        yield output.cpu(), took


def warm_up(pipe: Any, spec: Comparison, steps: int, whole: bool = False) -> None:
    """Run the first `spec.warmup` steps of the first batch, at the timesteps of a full generation; or all of them.

    Caches that count their own steps need a `whole` generation, and some pipelines cannot be stopped earlier.
    """
    if not spec.warmup:
        return

    class WarmupDone(Exception):  # noqa: N818
        """Stops the generation."""

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step + 1 >= spec.warmup:
            raise WarmupDone
        return tensors

    whole = whole or spec.warmup >= steps or "callback_on_step_end" not in keywords_of(pipe)[0]
    more = {} if whole else {"callback_on_step_end": stop}
    with suppress(WarmupDone):
        _generate_batch(pipe, spec, steps, spec.images[: spec.batch_size], **more)


def check_pipeline(pipe: Any, spec: Comparison) -> None:
    """Refuse arguments that the pipeline does not have or cannot use, and CPU time where it is not that of an image."""
    check_video(pipe, dict(spec.arguments) | {"image": spec.image, "fps": spec.fps})
    if spec.image is not None:
        open_image(spec.image)
    known, takes_others = keywords_of(pipe)
    guidance = [] if spec.guidance is None else ["guidance_scale"]
    for name in ("prompt", "generator", "num_inference_steps", *dict(spec.arguments), *guidance):
        if name not in known and not takes_others:
            raise ConfigError(f"{type(pipe).__name__} takes no {name!r}.{did_you_mean(name, known)}")
    if spec.clock == "cpu" and (get_device(pipe).type != "cpu" or torch.get_num_threads() > 1):
        raise ConfigError("clock 'cpu' is for a pipeline on the CPU with one thread: torch.set_num_threads(1).")


def find_rate(pipe: Any, spec: Comparison) -> float:
    """Frames per second of the clips of a comparison."""
    given = (dict(spec.arguments).get(name) for name in RATE_KEYWORDS)
    return float(spec.fps or next(filter(None, given), None) or default_rate(pipe, defaults_of(pipe)))


def describe_environment(pipe: Any) -> dict[str, Any]:
    """The model, the device and the versions, as plain JSON values: rows of one table share them."""
    config, transformer = getattr(pipe, "config", {}), next(iter(find_transformers(pipe).values()))
    name = str(config.get("_name_or_path") or "") if isinstance(config, Mapping) else ""
    if Path(name).name == "weights":
        name = Path(name).parent.name
    elif Path(name).is_dir():
        name = Path(name).name
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "pipeline": type(pipe).__name__,
        "transformer": type(transformer).__name__,
        "model": name,
        "dtype": str(getattr(pipe, "dtype", None) or next(transformer.parameters()).dtype).removeprefix("torch."),
        "device": _describe_device(get_device(pipe)),
        "python": platform.python_version(),
        "versions": versions,
    }


def get_device(pipe: Any) -> torch.device:
    """The device of a pipeline; of one that does not say it, the device of its transformer."""
    device = getattr(pipe, "device", None)
    if device is None:
        device = next(next(iter(find_transformers(pipe).values())).parameters()).device
    return torch.device(device)


def _describe_device(device: torch.device) -> str:
    """The name of the GPU, or of the CPU with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    info, threads = Path("/proc/cpuinfo"), torch.get_num_threads()
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {threads} thread{'' if threads == 1 else 's'}"


def _synchronize() -> None:
    """Wait for the accelerator, if there is one, so that its work is timed, including that of an offloaded model."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _generate_batch(
    pipe: Any, spec: Comparison, steps: int, images: tuple[tuple[str, int], ...], **more: Any
) -> torch.Tensor:
    arguments = more | dict(spec.arguments) | ({} if spec.guidance is None else {"guidance_scale": spec.guidance})
    known, takes_others = keywords_of(pipe)
    optional = {"output_type": spec.output, "return_dict": False}
    arguments |= {name: value for name, value in optional.items() if takes_others or name in known}
    if spec.image is not None:
        arguments = image_arguments(pipe, spec.image) | arguments
    if spec.fps is not None:
        arguments |= {name: spec.fps for name in RATE_KEYWORDS if name in known}
    try:
        output = get_images(
            pipe(
                prompt=[prompt for prompt, _ in images],
                generator=[torch.Generator().manual_seed(seed) for _, seed in images],
                num_inference_steps=steps,
                **arguments,
            )
        )
    except ValueError as error:  # what the pipeline refuses
        raise ConfigError(f"{type(pipe).__name__}: {error}") from error
    except NameError as error:  # diffusers' image-to-video pipeline of Wan uses ftfy without importing it
        raise ConfigError(f"{type(pipe).__name__} needs {error.name}: pip install {error.name}.") from error
    if isinstance(output, torch.Tensor):
        return output
    parts = list(output)
    return torch.stack(parts) if all(isinstance(part, torch.Tensor) for part in parts) else as_images(parts)
