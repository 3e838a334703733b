"""EasyCache (Zhou et al., "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching",
arXiv:2507.02860).

How much the output changes per change of the input is measured at computed steps. The input's change at a step times
this gain, relative to the output, is the expected change of the output; while the sum of these since the last computed
step stays below the threshold, the step is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..grid import Grid
from .base import FIRST, LAST, NOTHING_HELD, OFF, RETAINED, Decision, PolicyState

HELD = Decision(False, "output is expected to change little")
CHANGED = Decision(True, "output is expected to change enough")
UNKNOWN = Decision(True, "no gain was measured yet")


@dataclass
class EasyCacheState(PolicyState):
    """The expected change of the output since the last computed step."""

    accumulated: float = 0.0


@dataclass(frozen=True)
class EasyCachePolicy:
    """Hold while the accumulated, expected change of the output is below `threshold`."""

    needs_signal: ClassVar[bool] = True
    threshold: float
    warmup_steps: int
    grid: Grid

    def start(self) -> EasyCacheState:
        return EasyCacheState()

    def decide(self, step: int, signal: float | None, state: EasyCacheState) -> Decision:
        if step == self.grid.first:
            decision = FIRST
        elif step >= self.grid.last:
            decision = LAST
        elif step < self.grid.first + self.warmup_steps:
            decision = RETAINED
        elif self.threshold <= 0:
            decision = OFF
        elif state.anchor is None:
            decision = NOTHING_HELD
        elif signal is None:
            decision = UNKNOWN
        else:
            state.accumulated += signal
            decision = HELD if state.accumulated < self.threshold else CHANGED
        if decision.compute:
            state.anchor, state.accumulated = step, 0.0
        return decision
