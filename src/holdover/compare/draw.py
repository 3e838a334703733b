"""Draw all pictures of a comparison with a pipeline as it stands, and time them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ..errors import ConfigError, did_you_mean
from ..plan.calls import keywords_of
from .spec import Comparison

AfterBatch = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Drawn:
    """All pictures on the CPU, and the seconds each took."""

    output: torch.Tensor
    seconds: tuple[float, ...]


class _WarmError(Exception):
    """Ends a generation that only warms up."""


def draw(pipe: Any, spec: Comparison, steps: int, after_batch: AfterBatch) -> Drawn:
    """Every prompt with every seed; a picture's noise depends on its seed alone, not on the batch it is in."""
    outputs, seconds, done = [], [], 0
    clock = time.process_time if spec.clock == "cpu" else time.perf_counter
    for images in _batches(spec):
        synchronise()
        begin = clock()
        outputs.append(_batch(pipe, spec, steps, images))
        synchronise()
        seconds += [(clock() - begin) / len(images)] * len(images)
        outputs[-1] = outputs[-1].cpu()
        done += len(images)
        after_batch(done)
    return Drawn(torch.cat(outputs), tuple(seconds))


def warm_up(pipe: Any, spec: Comparison, steps: int, whole: bool = False) -> None:
    """The first steps of the first batch, on the grid of a full generation; or all of them.

    What counts its own steps, as caches of others do, must see a generation to its end, and some pipelines cannot be
    stopped before it.
    """
    first = spec.images[: spec.batch_size]
    if not spec.warmup:
        return
    if whole or spec.warmup >= steps or "callback_on_step_end" not in keywords_of(pipe)[0]:
        _batch(pipe, spec, steps, first)
    else:
        with contextlib.suppress(_WarmError):
            _batch(pipe, spec, steps, first, callback_on_step_end=_stop_after(spec.warmup))


def _stop_after(count: int) -> Callable[..., dict[str, Any]]:
    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step + 1 >= count:
            raise _WarmError
        return tensors

    return stop


def check_arguments(pipe: Any, spec: Comparison) -> None:
    """Refuse an argument that the pipeline does not have, and name the nearest."""
    known, any_other = keywords_of(pipe)
    if any_other:
        return
    asked = [*dict(spec.arguments), *([] if spec.guidance is None else ["guidance_scale"])]
    for name in ("prompt", "generator", "num_inference_steps", "output_type", *asked):
        if name not in known:
            raise ConfigError(f"{type(pipe).__name__} takes no {name!r}.{did_you_mean(name, known)}")


def check_clock(pipe: Any, spec: Comparison) -> None:
    """The processor's time says something where one thread of it does all the work."""
    if spec.clock == "cpu" and (torch.device(pipe.device).type != "cpu" or torch.get_num_threads() > 1):
        raise ConfigError("clock 'cpu' is for a pipeline on the CPU with one thread: torch.set_num_threads(1).")


def synchronise() -> None:
    """Wait for the accelerator, if there is one, so that the clock sees its work, also that of an offloaded model."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _batch(pipe: Any, spec: Comparison, steps: int, images: tuple[tuple[str, int], ...], **more: Any) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed) for _, seed in images]
    call = more | dict(spec.arguments) | ({} if spec.guidance is None else {"guidance_scale": spec.guidance})
    output = pipe(
        prompt=[prompt for prompt, _ in images],
        generator=generators,
        num_inference_steps=steps,
        output_type=spec.output,
        return_dict=False,
        **call,
    )[0]
    return output if isinstance(output, torch.Tensor) else torch.stack(list(output))


def _batches(spec: Comparison) -> Iterator[tuple[tuple[str, int], ...]]:
    images = iter(spec.images)
    while batch := tuple(islice(images, spec.batch_size)):
        yield batch
