"""What a model family declares: only what a trace of one forward cannot know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..grid import Grid

BlockSignal = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]
TimeSignal = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Signal:
    """What TeaCache compares from step to step.

    `of_block(block, arguments)` reads it off the first block of the seam and the arguments it is called with,
    by name. `of_time(transformer, timesteps)` is a signal that depends on the timestep alone, one row a
    timestep: the whole schedule is then known before step 0. A family gives one of the two.
    """

    name: str
    of_block: BlockSignal | None = None
    of_time: TimeSignal | None = None

    def __post_init__(self) -> None:
        if (self.of_block is None) == (self.of_time is None):
            raise ValueError(f"Signal {self.name!r} needs exactly one of of_block and of_time.")


def never(arguments: Mapping[str, Any]) -> str | None:
    """No pass of this model has side effects: each may be held."""
    return None


def one_expert(pipeline: Any, transformer: nn.Module, grid: Grid) -> Grid:
    """The transformer handles every step."""
    return grid


@dataclass(frozen=True)
class Family:
    """One model family: the classes it is built from and what must be declared about them.

    - `signals`: TeaCache's signals by name, the default one first.
    - `head`: the list whose first block the signal is read at, where that is not the first list (refiner stacks).
    - `conditioning`: the forward's arguments that tell one branch from another, where their names do not show it.
    - `must_compute(arguments)`: why this very pass must not be held (it writes a KV cache, say), or None.
    - `range_of(pipeline, transformer, grid)`: the steps this transformer handles, where a pipeline has two experts.
    - `time_runs_up`: the model is given 1 - t instead of t.
    """

    name: str
    classes: tuple[str, ...]
    signals: tuple[Signal, ...] = ()
    head: str | None = None
    conditioning: tuple[str, ...] = ()
    must_compute: Callable[[Mapping[str, Any]], str | None] = never
    range_of: Callable[[Any, nn.Module, Grid], Grid] = one_expert
    time_runs_up: bool = False
    notes: str = field(default="", compare=False)

    def signal(self, name: str | None = None) -> Signal | None:
        """The signal of that name, or the default one; None where the family declares none."""
        if name is None:
            return self.signals[0] if self.signals else None
        return next((s for s in self.signals if s.name == name), None)
