"""Is this generation harder than those the plan was made on?

At each computed step the plan's own forecast is at hand. Forecast minus truth, over what it was along the measured
generations, says how hard this one is; how large that ratio is in an ordinary generation with held steps was measured
too. The number is read when it has arrived, a step late, so nothing waits for it. Over several ranks it is the largest
of them all, and all read it at the same step.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from math import isfinite
from statistics import median

import numpy as np
import torch

from ..runtime.exchange import largest
from ..runtime.late import LateScalar
from ..runtime.ranks import ALONE, Groups
from .kernel import Kernel
from .rollout import DEPTH, Weights, least_squares, missed_by

HARD = 2.0  # times the largest ratio of the calibration: one more step is computed
FOREIGN = 8.0  # times its median, over a whole generation: these are not the weights that were measured


class Guard:
    """Watches the guided outputs of one generation; `usual` is the median and the largest ratio of the calibration."""

    def __init__(self, kernel: Kernel, usual: tuple[float, float] = (1.0, 1.0), groups: Groups = ALONE) -> None:
        self._kernel, self._usual, self._groups = kernel, usual, groups
        self._outputs: deque[tuple[int, torch.Tensor]] = deque(maxlen=DEPTH)
        self._pending: deque[LateScalar] = deque()
        self._passed_over = 0
        self.ratios: list[float] = []

    def saw(self, step: int, output: torch.Tensor) -> None:
        """A step was computed: compare its output with what the steps before it foretold."""
        if len(self._outputs) > 1:
            weights = least_squares([s for s, _ in self._outputs], step, self._kernel.mean)
            ratio = self._missed(weights, output) / self._largest(weights, step)
            self._pending.append(LateScalar(largest(self._groups, ratio)))
        self._outputs.append((step, output))

    def _missed(self, weights: Weights, output: torch.Tensor) -> torch.Tensor:
        """The squared error of the forecast over the output, of the worst picture in the batch."""
        wrong = output.float()
        for weight, (_, earlier) in zip(weights.values, self._outputs, strict=True):
            wrong = wrong.sub(earlier, alpha=weight)
        size = output.float().flatten(1).square().sum(1).clamp_min(1e-12)
        return (wrong.flatten(1).square().sum(1) / size).max()

    def _largest(self, weights: Weights, step: int) -> float:
        """The same in the measured generation that was hardest at this step."""
        missed = self._kernel.squared(missed_by(weights, step, self._kernel.steps))
        return max(1e-12, float((missed / np.maximum(self._kernel.grams[:, step, step], 1e-12)).max()))

    def alarmed(self) -> bool:
        """Whether a number that has arrived since the last call is far outside what was measured."""
        arrived = [self._pending.popleft().read() for _ in range(self._due())]
        self.ratios += arrived
        return any(not isfinite(ratio) or ratio > HARD * self._usual[1] for ratio in arrived)

    def _due(self) -> int:
        """How many numbers to read: those that have arrived; over several ranks all but those of this very step."""
        if not self._groups.every or all(number.immediate for number in self._pending):
            return sum(1 for _ in takewhile(lambda number: number.ready, self._pending))
        due, self._passed_over = self._passed_over, len(self._pending) - self._passed_over
        return due

    def foreign(self) -> float | None:
        """How far the whole generation was off, where that is more than a hard prompt can explain."""
        self.alarmed()
        off = median(self.ratios) / self._usual[0] if len(self.ratios) > 2 else 0.0
        return off if off > FOREIGN else None
