"""Generate and time all images of a comparison with a pipeline as it is, and describe what it ran on."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, did_you_mean
from ..plan.calls import keywords_of
from .spec import Comparison

_PACKAGES = ("holdover", "torch", "diffusers", "transformers", "cache-dit")


@dataclass(frozen=True, eq=False)
class TimedOutput:
    """All images of a comparison on the CPU, and the seconds that each took."""

    output: torch.Tensor
    seconds: tuple[float, ...]


class _WarmupDone(Exception):  # noqa: N818
    """Stops a generation that only warms up."""


def generate_images(pipe: Any, spec: Comparison, steps: int, after_batch: Callable[[int], None]) -> TimedOutput:
    """Generate every prompt with every seed; the noise of an image depends on its seed, not on its batch.

    `after_batch` is called with the number of images so far.
    """
    outputs, seconds = [], []
    clock = time.process_time if spec.clock == "cpu" else time.perf_counter
    for start in range(0, len(spec.images), spec.batch_size):
        images = spec.images[start : start + spec.batch_size]
        _synchronize()
        begin = clock()
        output = _generate_batch(pipe, spec, steps, images)
        _synchronize()
        seconds += [(clock() - begin) / len(images)] * len(images)
        outputs.append(output.cpu())
        after_batch(start + len(images))
    return TimedOutput(torch.cat(outputs), tuple(seconds))


def warm_up(pipe: Any, spec: Comparison, steps: int, whole: bool = False) -> None:
    """Run the first `spec.warmup` steps of the first batch, at the timesteps of a full generation; or all of them.

    Caches of other libraries that count their own steps need a whole generation, and some pipelines cannot be stopped
    earlier.
    """
    if not spec.warmup:
        return

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step + 1 >= spec.warmup:
            raise _WarmupDone
        return tensors

    first = spec.images[: spec.batch_size]
    if whole or spec.warmup >= steps or "callback_on_step_end" not in keywords_of(pipe)[0]:
        _generate_batch(pipe, spec, steps, first)
    else:
        with contextlib.suppress(_WarmupDone):
            _generate_batch(pipe, spec, steps, first, callback_on_step_end=stop)


def check_arguments(pipe: Any, spec: Comparison) -> None:
    """Refuse an argument that the pipeline does not have, and name the nearest."""
    known, takes_others = keywords_of(pipe)
    if takes_others:
        return
    guidance = [] if spec.guidance is None else ["guidance_scale"]
    for name in ("prompt", "generator", "num_inference_steps", "output_type", *dict(spec.arguments), *guidance):
        if name not in known:
            raise ConfigError(f"{type(pipe).__name__} takes no {name!r}.{did_you_mean(name, known)}")


def check_clock(pipe: Any, spec: Comparison) -> None:
    """Refuse to measure CPU time where it is not the time of the generation: on other devices or several threads."""
    if spec.clock == "cpu" and (torch.device(pipe.device).type != "cpu" or torch.get_num_threads() > 1):
        raise ConfigError("clock 'cpu' is for a pipeline on the CPU with one thread: torch.set_num_threads(1).")


def describe_environment(pipe: Any) -> dict[str, Any]:
    """The model, the device and the versions, as plain JSON values: rows of one table share them."""
    name = str(pipe.config.get("_name_or_path") or "")
    if Path(name).name == "weights":
        name = Path(name).parent.name
    elif Path(name).is_dir():
        name = Path(name).name
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "pipeline": type(pipe).__name__,
        "transformer": type(pipe.components.get("transformer")).__name__,
        "model": name,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "device": _describe_device(torch.device(pipe.device)),
        "python": platform.python_version(),
        "versions": versions,
    }


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
    output = pipe(
        prompt=[prompt for prompt, _ in images],
        generator=[torch.Generator().manual_seed(seed) for _, seed in images],
        num_inference_steps=steps,
        output_type=spec.output,
        return_dict=False,
        **arguments,
    )[0]
    return output if isinstance(output, torch.Tensor) else torch.stack(list(output))
