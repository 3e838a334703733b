"""MagCache (Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache", arXiv:2506.09045).

How the residual's magnitude changes from step to step is a constant of the model. The product of the ratios since the
last computed step says how far the held residual is off; while the sum of these errors stays within the threshold, and
at most `max_skip_steps` in a row, the step is held. Nothing here needs data: the schedule is known before step 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from ..grid import Grid
from .base import NOTHING_HELD, OFF, RETAINED, Decision, PolicyState

HELD = Decision(False, "magnitude error is within the threshold")
ERROR = Decision(True, "magnitude error passed the threshold")
LONGEST = Decision(True, "as many steps held in a row as allowed")
KEPT = Decision(True, "a step this model never holds")
BEYOND = Decision(True, "more steps than were announced")


@dataclass
class ErrorAccumulator(PolicyState):
    """The accumulators since the last computed step."""

    accumulated_ratio: float = 1.0
    accumulated_err: float = 0.0
    accumulated_steps: int = 0
    seen: int | None = None

    def restart(self, step: int) -> None:
        """A step was computed: nothing is accumulated any more."""
        self.anchor = self.seen = step
        self.accumulated_ratio, self.accumulated_err, self.accumulated_steps = 1.0, 0.0, 0


@dataclass(frozen=True)
class MagCachePolicy:
    """Hold while the accumulated magnitude error is at most `threshold`; `ratios[i]` is the ratio of step `i`."""

    needs_signal: ClassVar[bool] = False
    threshold: float
    max_skip_steps: int
    retention_ratio: float
    ratios: tuple[float, ...]
    grid: Grid
    never_hold: frozenset[int] = frozenset()

    @cached_property
    def retained(self) -> int:
        """How many steps at the start are always computed."""
        return int(self.retention_ratio * self.grid.length + 0.5)

    def start(self) -> ErrorAccumulator:
        return ErrorAccumulator()

    def decide(self, step: int, signal: float | None, state: ErrorAccumulator) -> Decision:
        if step < self.grid.first + self.retained:
            decision = RETAINED
        elif step > self.grid.last:
            decision = BEYOND
        elif self.threshold <= 0:
            decision = OFF
        elif state.anchor is None:
            decision = NOTHING_HELD
        else:
            # Accumulate over the steps since this branch last ran, also those it skipped (guidance intervals).
            last = state.seen if state.seen is not None else step - 1
            for passed in range(last + 1, step + 1):
                state.accumulated_ratio *= self.ratios[passed]
                state.accumulated_err += abs(1.0 - state.accumulated_ratio)
                state.accumulated_steps += 1
            state.seen = step
            if step in self.never_hold:
                decision = KEPT
            elif state.accumulated_err > self.threshold:
                decision = ERROR
            else:
                decision = HELD if state.accumulated_steps <= self.max_skip_steps else LONGEST
        if decision.compute:
            state.restart(step)
        return decision


def nearest_ratios(ratios: Sequence[float], count: int) -> tuple[float, ...]:
    """Ratios for another number of steps as the published code takes them: the nearest entry, found in float32."""
    if count == 1:
        return (ratios[-1],)
    positions = np.arange(count, dtype=np.float32) * np.float32((len(ratios) - 1) / (count - 1))
    return tuple(ratios[int(position)] for position in positions.round())


def rescaled_ratios(ratios: Sequence[float], grid: Grid, noise: Sequence[float] | None = None) -> tuple[float, ...]:
    """Ratios for another grid that keep the magnitude curve: its logarithm is interpolated, then differenced.

    The curve is a function of the noise level if both grids have noise levels, else of the fraction of steps done.
    """
    if len(ratios) == grid.count and (noise is None or not grid.noise):
        return tuple(ratios)
    if noise and grid.noise:
        source, target = -np.array(noise), -np.array(grid.noise)
    else:
        source, target = np.linspace(0, 1, len(ratios)), np.linspace(0, 1, grid.count)
    curve = np.interp(target, source, np.log(ratios).cumsum())
    return (ratios[0], *np.exp(np.diff(curve)).tolist())
