"""Which step of which generation is this? Asked of the scheduler, the cache context or the timestep; never counted.

`SchedulerClock` watches a pipeline's scheduler: `set_timesteps` begins a generation, the scheduler's own index
tells the step. `TimestepClock` serves a bare transformer: the timestep falls within a generation and jumps back
at the next.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..grid import Grid
from .adopt import Adoptions


@dataclass(frozen=True, slots=True)
class Hint:
    """What diffusers' `cache_context` says of the forward inside it."""

    name: str | None = None
    step_index: int | None = None
    num_inference_steps: int | None = None


NO_HINT = Hint()


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of the scheduler: the latent and the output it was given, and what it returned."""

    step: int
    sample: Any
    output: Any
    result: Any


_ROUNDING = 0.01  # a timestep cast to bfloat16 is off by up to 0.4 %


class SchedulerClock:
    """Reads the step off a pipeline's scheduler, whichever scheduler the pipeline has at the moment."""

    def __init__(
        self,
        pipeline: Any,
        adoptions: Adoptions,
        started: Callable[[], None],
        followed: Callable[[Stepped], None],
        finished: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._adoptions = adoptions
        self._started = started
        self._followed = followed
        self._finished = finished
        self._scheduler: Any = None
        self._next: int | None = None
        self._grid: Grid | None = None
        self.running = False

    def watch(self) -> None:
        """Follow the pipeline's scheduler; a scheduler put in later is followed from its first forward on."""
        scheduler = getattr(self._pipeline, "scheduler", None)
        if scheduler is self._scheduler:
            return
        if self._scheduler is not None and self._adoptions.holds(self._scheduler):
            self._adoptions.release(self._scheduler)
        changed, self._scheduler = self._scheduler is not None, scheduler
        if hasattr(scheduler, "set_timesteps"):
            self._adopt(scheduler)
            if changed:
                self._begin()

    def _adopt(self, scheduler: Any) -> None:
        base = type(scheduler)

        @functools.wraps(base.set_timesteps)
        def set_timesteps(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = base.set_timesteps(this, *args, **kwargs)
            if this is self._scheduler:
                self._begin()
            return result

        methods: dict[str, Callable[..., Any]] = {"set_timesteps": set_timesteps}
        if hasattr(base, "step"):
            names = list(inspect.signature(base.step).parameters)[1:]

            @functools.wraps(base.step)
            def step(this: Any, *args: Any, **kwargs: Any) -> Any:
                result = base.step(this, *args, **kwargs)
                if this is self._scheduler and self.running:
                    self._stepped(dict(zip(names, args, strict=False)) | kwargs, result)
                return result

            methods["step"] = step
        self._adoptions.adopt(scheduler, methods)

    def _begin(self) -> None:
        self._next = None
        self._grid = None
        self.running = True
        self._started()

    def _stepped(self, given: dict[str, Any], result: Any) -> None:
        """The scheduler has finished a step: its own index, or the timestep it was given, says which is next."""
        index = self._position()
        self._next = index if index is not None else self._index_of(given["timestep"]) + 1
        self._followed(Stepped(self._next - 1, given.get("sample"), given.get("model_output"), result))
        if self._next >= len(self._scheduler.timesteps):
            self.running = False
            self._finished()

    def stop(self) -> None:
        """Whatever comes next is not part of the generation that ran."""
        self.running = False

    @property
    def grid(self) -> Grid:
        """The scheduler's grid; read once a generation, before its first step."""
        if self._grid is None:
            timesteps = [float(t) for t in self._scheduler.timesteps.tolist()]
            whole = float(self._config("num_train_timesteps", 1000))
            self._grid = Grid(len(timesteps), tuple(t / whole for t in timesteps))
        return self._grid

    def step(self, hint: Hint, timestep: Any, runs_up: bool) -> int:
        """The step of the forward that is about to run."""
        if hint.step_index is not None:
            return hint.step_index
        if self._next is not None:
            index = self._position()  # asked anew: a pipeline may take a step back
            return index if index is not None else self._next
        begin = getattr(self._scheduler, "begin_index", None)
        return int(begin) if begin is not None else self._located(timestep, runs_up)

    def _position(self) -> int | None:
        """The scheduler's own index, where it keeps one."""
        index: int | None = getattr(self._scheduler, "step_index", None)
        return index

    def _located(self, timestep: Any, runs_up: bool) -> int:
        """The first step, found by its value: image-to-image pipelines begin late, some without saying so."""
        value = noisiest(timestep, runs_up)
        if value is None:
            return 0
        scales = (1.0, 1.0 / float(self._config("num_train_timesteps", 1000)))
        levels = [1.0 - value * scale if runs_up else value * scale for scale in scales]
        misses = [(abs(level - n) / n, i) for level in levels for i, n in enumerate(self.grid.noise) if n > 0]
        miss, index = min(misses, default=(1.0, 0))
        return index if miss < _ROUNDING else 0

    def _index_of(self, timestep: Any) -> int:
        """The position of a timestep on the grid; a view into the scheduler's own tensor needs no reading."""
        timesteps = self._scheduler.timesteps
        if isinstance(timestep, torch.Tensor) and timestep.numel() == 1:
            if timestep.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr():
                return int(timestep.storage_offset() - timesteps.storage_offset())
        whole = float(self._config("num_train_timesteps", 1000))
        level = float(timestep) / whole
        return min(range(self.grid.count), key=lambda i: abs(self.grid.noise[i] - level))

    def _config(self, name: str, default: Any) -> Any:
        return getattr(getattr(self._scheduler, "config", None), name, None) or default


class TimestepClock:
    """Reads the step off the timesteps themselves, for a transformer without a pipeline."""

    def __init__(self, started: Callable[[], None], runs_up: bool = False) -> None:
        self._started = started
        self._direction = 1.0 if runs_up else 0.0  # 0: not yet known
        self._values: list[float | None] = []
        self._hinted: int | None = None

    def restart(self) -> None:
        """The next forward begins a generation."""
        self._values = []
        self._hinted = None
        self._started()

    def step(self, hint: Hint, timestep: Any) -> int:
        """The step of the forward that is about to run; begins a generation where the timestep jumps back."""
        if hint.step_index is not None:
            if self._hinted is None or hint.step_index < self._hinted:
                self.restart()
            self._hinted = hint.step_index
            return hint.step_index
        value = _mean(timestep)
        if not self._values or self._jumped_back(value):
            self.restart()
        if not self._values or value != self._values[-1]:
            self._values.append(value)
        return len(self._values) - 1

    def _jumped_back(self, value: float | None) -> bool:
        before = self._values[-1]
        if value is None or before is None:
            return value is not before  # a pass without a timestep is no step of the loop it stands beside
        move = value - before
        if move == 0:
            return False
        if self._direction == 0:
            self._direction = 1.0 if move > 0 else -1.0
        return move * self._direction < 0


def noisiest(timestep: Any, runs_up: bool = False) -> float | None:
    """A timestep argument as one number: the noisiest where tokens have their own; None where there is none."""
    if isinstance(timestep, torch.Tensor):
        if not timestep.numel():
            return None
        return float(timestep.min() if runs_up else timestep.max())
    return float(timestep) if isinstance(timestep, (int, float)) else None


def _mean(timestep: Any) -> float | None:
    """A timestep argument as one number that moves with the step, also where some tokens are always clean."""
    if isinstance(timestep, torch.Tensor) and timestep.numel():
        return float(timestep.double().mean())
    return float(timestep) if isinstance(timestep, (int, float)) else None
