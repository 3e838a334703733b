"""A computed step every so often: the schedule of TaylorSeer (Liu et al., "From Reusing to Forecasting: Accelerating
Diffusion Models with TaylorSeers", arXiv:2503.06923) and of Spectrum (Han et al., "Adaptive Spectral Feature
Forecasting for Diffusion Sampling Acceleration", arXiv:2603.01623).

The first steps are computed; then one step per interval. Spectrum lets the interval grow with each computed step.
Nothing here needs data: the schedule is known before step 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import ClassVar

from ..grid import Grid
from .base import BETWEEN, FIRST, NOTHING_HELD, RETAINED, SCHEDULED, Decision, PolicyState


@dataclass
class IntervalState(PolicyState):
    """The interval to the next computed step; its whole part counts."""

    interval: float = 1.0


@dataclass(frozen=True)
class IntervalPolicy:
    """Compute the first `warmup_steps`, then one step per `interval`, which grows by `growth` with each of them."""

    needs_signal: ClassVar[bool] = False
    warmup_steps: int
    interval: float
    growth: float
    grid: Grid

    def start(self) -> IntervalState:
        return IntervalState(interval=self.interval)

    def decide(self, step: int, signal: float | None, state: IntervalState) -> Decision:
        if step == self.grid.first:
            decision = FIRST
        elif step < self.grid.first + self.warmup_steps:
            decision = RETAINED
        elif state.anchor is None:
            decision = NOTHING_HELD
        elif step - state.anchor >= floor(state.interval):
            decision = SCHEDULED
            state.interval = round(state.interval + self.growth, 6)  # 2 + 4 * 0.75 is 5, not 4.999...
        else:
            decision = BETWEEN
        if decision.compute:
            state.anchor = step
        return decision
