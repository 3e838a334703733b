"""Which step of which generation is this? Read from the scheduler, the cache context or the timestep; never counted.

`SchedulerClock` watches a pipeline's scheduler: `set_timesteps` starts a generation, the scheduler's own index is the
step. `TimestepClock` serves a bare transformer, and loops that never call `scheduler.step` (inversion, flow editing):
the timestep moves in one direction within a generation and jumps back at the next.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..grid import Grid
from .install import ContextHint, Observed

_ROUNDING = 0.01  # a timestep cast to bfloat16 is off by up to 0.4 %


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """One call of the scheduler's `step`: the latent and the model output it was given, and what it returned."""

    step: int
    sample: Any
    output: Any
    result: Any


class ObservedScheduler(Observed):
    """A scheduler whose `set_timesteps` and `step` are observed by clocks. Pipelines may share it."""

    def make_methods(self, scheduler: Any) -> dict[str, Callable[..., Any]]:
        plain_set_timesteps: Any = scheduler.set_timesteps

        @functools.wraps(plain_set_timesteps)
        def set_timesteps(*args: Any, **kwargs: Any) -> Any:
            result = plain_set_timesteps(*args, **kwargs)
            for clock in self.living():
                clock.start()
            return result

        if not hasattr(scheduler, "step"):
            return {"set_timesteps": set_timesteps}
        plain_step: Any = scheduler.step
        names = list(inspect.signature(plain_step).parameters)

        @functools.wraps(plain_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = plain_step(*args, **kwargs)
            for clock in self.living():
                if clock.running:
                    clock.advance(dict(zip(names, args, strict=False)) | kwargs, result)
            return result

        return {"set_timesteps": set_timesteps, "step": step}


class SchedulerClock:
    """Reads the step from a pipeline's scheduler, whichever scheduler the pipeline has at the moment."""

    def __init__(
        self,
        pipeline: Any,
        on_start: Callable[[], None],
        on_step: Callable[[SchedulerStep], None],
        on_end: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._on_start, self._on_step, self._on_end = on_start, on_step, on_end
        self._scheduler: Any = None
        self._observed: ObservedScheduler | None = None
        self._first: int | None = None
        self._next: int | None = None
        self._grid: Grid | None = None
        self._was_interrupted = False
        self._latents: weakref.ref[torch.Tensor] | None = None  # that the scheduler returned last
        self._keeps_latents = True  # a loop does, until its next forward, unless it blends them with others
        self._steps_elsewhere = False  # the loop reads this scheduler's timesteps and does not step it
        self.running = False
        self.stepped = False  # since the last forward

    def watch(self) -> None:
        """Follow the pipeline's scheduler; one that was replaced is followed from its first forward on."""
        scheduler = getattr(self._pipeline, "scheduler", None)
        if scheduler is self._scheduler:
            return
        replaced = self._scheduler is not None
        self.unwatch()
        self._scheduler = scheduler
        if hasattr(scheduler, "set_timesteps"):
            self._observed = ObservedScheduler.observe(scheduler, self)
            if replaced:
                self.start()

    def unwatch(self) -> None:
        """Leave the scheduler as it was."""
        if self._observed is not None:
            self._observed.leave(self)
        self._observed = self._scheduler = None

    def start(self) -> None:
        """The scheduler's timesteps were set: a generation starts."""
        self._first = self._next = self._grid = None
        self.running, self.stepped = True, False
        self._was_interrupted, self._latents = self._interrupt_flag, None
        self._steps_elsewhere, self._keeps_latents = False, True
        self._on_start()

    def advance(self, arguments: dict[str, Any], result: Any) -> None:
        """The scheduler has made a step: its own index, or the timestep it was given, tells the next one."""
        index: int | None = getattr(self._scheduler, "step_index", None)
        self._next = index if index is not None else self._find_timestep(arguments["timestep"]) + 1
        self.stepped = True
        latents = result[0] if isinstance(result, tuple) else getattr(result, "prev_sample", None)
        self._latents = weakref.ref(latents) if isinstance(latents, torch.Tensor) else None
        self._on_step(SchedulerStep(self._next - 1, arguments.get("sample"), arguments.get("model_output"), result))
        if self._next >= len(self._scheduler.timesteps):
            self.running = False
            self._on_end()

    @property
    def _interrupt_flag(self) -> bool:
        return getattr(self._pipeline, "_interrupt", False) is True

    def has_lost_its_loop(self, timestep: Any, runs_up: bool) -> bool:
        """Whether the loop that made the last step has ended early; asked at the first forward after each step.

        The user has interrupted it, or the latents that it got from the scheduler are gone, as after an exception. A
        loop that blends these latents with others, such as inpainting, does not keep them either, but its forward is at
        the scheduler's next timestep. That is read once a generation.
        """
        gone = self._latents is not None and self._latents() is None
        kept, self._keeps_latents = self._keeps_latents, not gone
        if self._interrupt_flag and not self._was_interrupted:
            return True
        return gone and kept and self._find_level(timestep, runs_up) != self._next

    @property
    def grid(self) -> Grid:
        """The scheduler's timesteps as noise levels; read once a generation, before its first step."""
        if self._grid is None:
            timesteps = [float(t) for t in self._scheduler.timesteps.tolist()]
            self._grid = Grid(len(timesteps), tuple(t / self._train_timesteps for t in timesteps))
        return self._grid

    @property
    def _train_timesteps(self) -> float:
        return float(getattr(getattr(self._scheduler, "config", None), "num_train_timesteps", None) or 1000)

    def step(self, hint: ContextHint, timestep: Any, runs_up: bool) -> int:
        """The step of the forward that is about to run."""
        if hint.step_index is not None:
            return hint.step_index
        if self._next is not None:  # the index is read again, for a pipeline may go back a step
            index: int | None = getattr(self._scheduler, "step_index", None)
            return index if index is not None else self._next
        if self._first is None:
            begin = getattr(self._scheduler, "begin_index", None)
            self._first = int(begin) if begin is not None else self._find_first_step(timestep, runs_up)
        return self._first

    def leave_to_timesteps(self) -> None:
        """The loop does not step this scheduler: it updates the latents itself, or steps copies of the scheduler."""
        self.running, self._steps_elsewhere = False, True

    def begins_again(self, timestep: Any, runs_up: bool) -> bool:
        """Whether such a loop is at the scheduler's first timestep again, as in each part of a long video."""
        return self._steps_elsewhere and self._find_level(timestep, runs_up) == 0

    def _find_first_step(self, timestep: Any, runs_up: bool) -> int:
        """The step with this timestep's noise level: some image-to-image pipelines start late without saying so.

        A loop that begins with the last timestep is one that runs backwards, or has a single step.
        """
        index = self._find_level(timestep, runs_up) or 0
        return index if index < self.grid.count - 1 else 0

    def _find_level(self, timestep: Any, runs_up: bool) -> int | None:
        """The index of the scheduler's timestep with the same noise level, if there is one."""
        value = noisiest(timestep, runs_up)
        if value is None:
            return None
        levels = [1.0 - value * s if runs_up else value * s for s in (1.0, 1.0 / self._train_timesteps)]
        misses = [(abs(level - n) / n, i) for level in levels for i, n in enumerate(self.grid.noise) if n > 0]
        miss, index = min(misses, default=(1.0, 0))
        return index if miss < _ROUNDING else None

    def _find_timestep(self, timestep: Any) -> int:
        """The index of a timestep; a view into the scheduler's own tensor tells it without a read."""
        timesteps = self._scheduler.timesteps
        if isinstance(timestep, torch.Tensor) and timestep.numel() == 1:
            if timestep.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr():
                return int(timestep.storage_offset() - timesteps.storage_offset())
        level = float(timestep) / self._train_timesteps
        return min(range(self.grid.count), key=lambda i: abs(self.grid.noise[i] - level))


class TimestepClock:
    """Reads the step from the timesteps themselves: without a pipeline, or where a loop never steps its scheduler."""

    def __init__(self, on_start: Callable[[], None], runs_up: bool = False) -> None:
        self._on_start = on_start
        self._usual_direction = 1.0 if runs_up else 0.0  # 0: not known yet
        self._direction = self._usual_direction
        self._begin: int | None = None  # the step of the first value, where a scheduler's generation is continued
        self._values: list[float | None] = []
        self._last_hint: int | None = None

    def reset(self) -> None:
        """Forget the timesteps of the last generation."""
        self._values = []
        self._direction, self._begin = self._usual_direction, None
        self._last_hint = None

    def restart(self) -> None:
        """The next forward starts a generation."""
        self.reset()
        self._on_start()

    @property
    def continues(self) -> bool:
        """Whether the generation was started by a scheduler, which may run a branch more than once at a step."""
        return self._begin is not None

    def continue_from(self, step: int) -> None:
        """The next forward ran at this step of a generation under way, in whichever direction: inversion runs back."""
        self._values = []
        self._direction, self._begin = 0.0, step

    def step(self, hint: ContextHint, timestep: Any) -> int:
        """The step of the forward that is about to run; starts a generation where the timestep jumps back."""
        if hint.step_index is not None:
            if self._last_hint is None or hint.step_index < self._last_hint:
                self.restart()
            self._last_hint = hint.step_index
            return hint.step_index
        value: float | None = None
        if isinstance(timestep, torch.Tensor) and timestep.numel():
            value = float(timestep.double().mean())  # moves with the step also where some tokens are always clean
        elif isinstance(timestep, (int, float)):
            value = float(timestep)
        if not self._values:
            if self._begin is None:
                self.restart()
        elif value != self._values[-1]:
            before = self._values[-1]
            if value is None or before is None:  # a forward without a timestep is not a step of the loop next to it
                self.restart()
            else:
                if self._direction == 0:
                    self._direction = 1.0 if value > before else -1.0
                    if self._begin is None:
                        self._usual_direction = self._direction
                if (value - before) * self._direction < 0:
                    self.restart()
        if not self._values or value != self._values[-1]:
            self._values.append(value)
        return (self._begin or 0) + len(self._values) - 1


def noisiest(timestep: Any, runs_up: bool = False) -> float | None:
    """A timestep argument as one number: the noisiest where each token has its own; None where there is none."""
    if isinstance(timestep, torch.Tensor):
        if not timestep.numel():
            return None
        return float(timestep.min() if runs_up else timestep.max())
    return float(timestep) if isinstance(timestep, (int, float)) else None
