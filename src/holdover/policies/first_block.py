"""First-block cache (Cheng, ParaAttention, https://github.com/chengzeyi/ParaAttention, 2025).

The first block runs at every step. While what it adds has changed little since the last computed step, the other blocks
are held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..grid import Grid
from .base import FIRST, NOTHING_HELD, OFF, RETAINED, Decision, PolicyState

HELD = Decision(False, "first block adds nearly the same")
CHANGED = Decision(True, "first block adds something else")


@dataclass(frozen=True)
class FirstBlockPolicy:
    """Hold while the first block's residual differs from that of the last computed step by less than `threshold`."""

    needs_signal: ClassVar[bool] = True
    threshold: float
    warmup_steps: int
    grid: Grid

    def start(self) -> PolicyState:
        return PolicyState()

    def decide(self, step: int, signal: float | None, state: PolicyState) -> Decision:
        if step == self.grid.first:
            decision = FIRST
        elif step < self.grid.first + self.warmup_steps:
            decision = RETAINED
        elif self.threshold <= 0:
            decision = OFF
        elif state.anchor is None or signal is None:
            decision = NOTHING_HELD
        else:
            decision = HELD if signal < self.threshold else CHANGED
        if decision.compute:
            state.anchor = step
        return decision
