"""The denoising loop that is timed, the least a held step can cost, and the clocks of the card."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from .models import Inputs

# The loop


BRANCH = "cond"


@dataclass(frozen=True)
class Timing:
    """One run of the loop; times of each step in milliseconds, `gpu_forward` without the scheduler's part."""

    latent: Tensor
    wall_s: float
    gpu: Sequence[float]
    gpu_forward: Sequence[float]
    host: Sequence[float]


class Marks:
    """Timestamps on the device and on the host, two per step; read after the loop."""

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
        """Host milliseconds of each step."""
        return [(b - a) * 1e3 for a, b in zip(self._host[:-2:2], self._host[2::2], strict=True)]

    def device(self) -> tuple[list[float], list[float]]:
        """Device milliseconds of each step, and of its forward alone."""
        steps = range(0, len(self._host) - 1, 2)
        return [self._between(i, i + 2) for i in steps], [self._between(i, i + 1) for i in steps]

    def _between(self, a: int, b: int) -> float:
        if self._cuda:
            return float(self._events[a].elapsed_time(self._events[b]))
        return (self._host[b] - self._host[a]) * 1e3


class Pipeline:
    """A minimal pipeline: a transformer, a scheduler, and the denoising loop."""

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
    def __call__(self, steps: int, stop: int | None = None, before: Callable[[int], None] | None = None) -> Timing:
        """Run the loop; `stop` ends it after so many steps, `before` is called with each step."""
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
        return Timing(latent, time.perf_counter() - begin, *marks.device(), marks.host())

    def forward(self, latent: Tensor, t: Tensor) -> Tensor:
        """The transformer at one step."""
        arguments = {"hidden_states": latent, "timestep": self.inputs.time(t), **self.inputs.fixed}
        with self.transformer.cache_context(BRANCH):
            velocity: Tensor = self.transformer(**arguments, return_dict=False)[0]
        return velocity

    def begin(self, steps: int) -> Sequence[Tensor]:
        """Set the scheduler to its first step; returns the timesteps."""
        self.scheduler.set_timesteps(steps, device=self.inputs.latent.device)
        self.scheduler.set_begin_index(0)
        return list(self.scheduler.timesteps)


# The least a held step can cost: what runs live under every method


STEPS = 8
LEAD_CYCLES = (
    400_000_000  # the device sleeps about 0.2 s, so that the host runs ahead and the device never waits for a launch
)


def floors(pipe: Pipeline) -> dict[str, float]:
    """Milliseconds of a step of the scheduler alone, without blocks, and with the first block of each list."""
    found = {"scheduler": _typical(pipe, forward=False)}
    for name, kept in (("no blocks", 0), ("first block", 1)):
        with keep_first_blocks(pipe.transformer, kept):
            found[name] = _typical(pipe, forward=True)
    return found


@contextmanager
def keep_first_blocks(transformer: nn.Module, kept: int) -> Iterator[None]:
    """Keep only the first `kept` blocks of each list, and restore the lists at the end."""
    lists = {name: child for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)}
    for name, blocks in lists.items():
        setattr(transformer, name, nn.ModuleList(list(blocks)[:kept]))
    try:
        yield
    finally:
        for name, blocks in lists.items():
            setattr(transformer, name, blocks)


@torch.no_grad()
def _typical(pipe: Pipeline, forward: bool) -> float:
    times: list[float] = []
    for _ in range(3):  # the first turn warms up
        times = _turn(pipe, forward)
    return median(times)


def _turn(pipe: Pipeline, forward: bool) -> list[float]:
    timesteps: Any = pipe.begin(STEPS)
    latent, marks = pipe.inputs.latent, Marks(STEPS, pipe.cuda)
    velocity: Tensor = torch.zeros_like(latent)
    marks.wait()
    if pipe.cuda:
        torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
    marks.mark()
    for t in timesteps:
        velocity = pipe.forward(latent, t) if forward else velocity
        marks.mark()
        latent = pipe.scheduler.step(velocity, t, latent, return_dict=False)[0]
        marks.mark()
    marks.wait()
    return marks.device()[0]


# Clocks and power of the card


FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "clocks_event_reasons.active")
POWER_LIMIT = 0x4  # bit of the reasons why clocks are below their maximum


def read_clocks() -> dict[str, Any] | None:
    """Clock, power and power limit of torch's card from nvidia-smi, right after a run; None without nvidia-smi."""
    card = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", card]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_clocks(asked.stdout)


def parse_clocks(line: str) -> dict[str, Any] | None:
    """The values in one line of nvidia-smi; None if the card does not report them."""
    try:
        clock, highest, power, reasons = (field.strip() for field in line.strip().split(","))
        limited = bool(int(reasons, 16) & POWER_LIMIT)
        return {"sm_mhz": int(clock), "max_sm_mhz": int(highest), "power_w": float(power), "power_limited": limited}
    except ValueError:
        return None
