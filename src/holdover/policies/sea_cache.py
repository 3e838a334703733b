"""SeaCache ("SeaCache: Spectral-Evolution-Aware Cache for Accelerating Diffusion Models", arXiv:2602.18993).

TeaCache's rule on a signal from which a Wiener filter has taken the noise of the step; the change is added up as it is,
without a polynomial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Decision
from .magcache import LONGEST
from .teacache import Polynomial, TeaCachePolicy, TeaCacheState

UNSCALED = Polynomial((1.0, 0.0), 0.0, math.inf)


@dataclass
class SeaCacheState(TeaCacheState):
    """TeaCache's state, and the number of steps held since the last computed one."""

    held: int = 0


@dataclass(frozen=True)
class SeaCachePolicy(TeaCachePolicy):
    """Hold while the accumulated change of the signal is below `threshold`, at most `max_held` steps in a row.

    `max_held=0` sets no limit.
    """

    max_held: int = 0

    def start(self) -> SeaCacheState:
        return SeaCacheState()

    def _decision(self, step: int, signal: float | None, state: TeaCacheState) -> Decision:
        assert isinstance(state, SeaCacheState)
        decision = super()._decision(step, signal, state)
        if not decision.compute and 0 < self.max_held <= state.held:
            decision = LONGEST
        state.held = 0 if decision.compute else state.held + 1
        return decision
