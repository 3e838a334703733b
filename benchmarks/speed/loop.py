"""The denoising loop that is timed: a transformer, a scheduler, and marks between the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from .models import Inputs

BRANCH = "cond"


@dataclass(frozen=True)
class Course:
    """One run of the loop; times of each step in milliseconds, `gpu_forward` without the scheduler's part."""

    latent: Tensor
    wall_s: float
    gpu: Sequence[float]
    gpu_forward: Sequence[float]
    host: Sequence[float]


class Marks:
    """Points in time on the device, two to a step, and on the host; read after the loop."""

    def __init__(self, steps: int, cuda: bool) -> None:
        self._cuda = cuda
        count = 2 * steps + 1
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(count)] if cuda else []  # type: ignore[no-untyped-call]
        self._host: list[float] = []

    def mark(self) -> None:
        if self._cuda:
            self._events[len(self._host)].record()
        self._host.append(time.perf_counter())

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def host(self) -> list[float]:
        """Milliseconds of the host in each step."""
        return [(b - a) * 1e3 for a, b in zip(self._host[:-2:2], self._host[2::2], strict=True)]

    def device(self) -> tuple[list[float], list[float]]:
        """Milliseconds of the device in each step, and in its forward alone."""
        steps = range(0, len(self._host) - 1, 2)
        return [self._between(i, i + 2) for i in steps], [self._between(i, i + 1) for i in steps]

    def _between(self, a: int, b: int) -> float:
        if self._cuda:
            return float(self._events[a].elapsed_time(self._events[b]))
        return (self._host[b] - self._host[a]) * 1e3


class Pipeline:
    """The least that is a pipeline: a transformer and a scheduler, and the loop between them."""

    def __init__(self, transformer: Any, inputs: Inputs) -> None:
        self.transformer = transformer
        self.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        self.inputs = inputs

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    @property
    def cuda(self) -> bool:
        return self.inputs.latent.is_cuda

    @torch.no_grad()
    def __call__(self, steps: int, stop: int | None = None, before: Callable[[int], None] | None = None) -> Course:
        """Draw; `stop` leaves the loop after so many steps, `before` is told each step."""
        timesteps = self.begin(steps)[:stop]
        latent, marks = self.inputs.latent, Marks(len(timesteps), self.cuda)
        marks.wait()
        begin = time.perf_counter()
        marks.mark()
        for step, t in enumerate(timesteps):
            if before is not None:
                before(step)
            velocity = self.forward(latent, t)
            marks.mark()
            latent = self.scheduler.step(velocity, t, latent, return_dict=False)[0]
            marks.mark()
        marks.wait()
        return Course(latent, time.perf_counter() - begin, *marks.device(), marks.host())

    def forward(self, latent: Tensor, t: Tensor) -> Tensor:
        """The transformer at one step."""
        arguments = {"hidden_states": latent, "timestep": self.inputs.time(t), **self.inputs.fixed}
        with self.transformer.cache_context(BRANCH):
            velocity: Tensor = self.transformer(**arguments, return_dict=False)[0]
        return velocity

    def begin(self, steps: int) -> Sequence[Tensor]:
        """Set the scheduler to its first step; its timesteps."""
        self.scheduler.set_timesteps(steps, device=self.inputs.latent.device)
        self.scheduler.set_begin_index(0)
        return list(self.scheduler.timesteps)
