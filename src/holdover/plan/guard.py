"""The guard: notices a generation that is harder to predict than those the plan was made on.

At each computed step t the output is also predicted from the computed steps before it. The *ratio* of the step is the
relative squared error of that prediction, |v_t - sum_j w_j v_j|^2 / |v_t|^2, divided by the largest relative error in
the measured generations. Calibration records how large ratios usually are in a generation with held steps. Ratios are
copied to the host asynchronously and read one step later. Over several ranks the ratio is the largest of all ranks, and
all ranks read it at the same step.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from math import isfinite
from statistics import median

import numpy as np
import torch

from ..engine.parallel import SINGLE_PROCESS, Groups, largest_on_device
from ..engine.signals import AsyncScalar
from .error_model import Measurements
from .weights import DEPTH, Weights, fit_output, prediction_error

HARD_FACTOR = 2.0  # times the largest ratio in the calibration: compute one more step
MISMATCH_FACTOR = 8.0  # times its median ratio, over a whole generation: the model is not the one that was measured


class Guard:
    """Watches the outputs of one generation; `usual` is the median and the largest ratio in the calibration."""

    def __init__(
        self, measurements: Measurements, usual: tuple[float, float] = (1.0, 1.0), groups: Groups = SINGLE_PROCESS
    ) -> None:
        self._measurements, self._usual, self._groups = measurements, usual, groups
        self._outputs: deque[tuple[int, torch.Tensor]] = deque(maxlen=DEPTH)
        self._pending: deque[AsyncScalar] = deque()
        self._postponed = 0
        self.ratios: list[float] = []

    def observe(self, step: int, output: torch.Tensor) -> None:
        """Compare the output of a computed step with its prediction from the computed steps before it."""
        if len(self._outputs) > 1:
            weights = fit_output([s for s, _ in self._outputs], step, self._measurements.mean_gram)
            ratio = self._relative_error(weights, output) / self._largest_measured(weights, step)
            self._pending.append(AsyncScalar(largest_on_device(self._groups, ratio)))
        self._outputs.append((step, output))

    def _relative_error(self, weights: Weights, output: torch.Tensor) -> torch.Tensor:
        """The squared error of the prediction over the squared output, of the worst image in the batch."""
        error = output.float()
        for weight, (_, earlier) in zip(weights.values, self._outputs, strict=True):
            error = error.sub(earlier, alpha=weight)
        size = output.float().flatten(1).square().sum(1).clamp_min(1e-12)
        return (error.flatten(1).square().sum(1) / size).max()

    def _largest_measured(self, weights: Weights, step: int) -> float:
        """The same relative error in the measured generation where it is largest."""
        measurements = self._measurements
        errors = measurements.squared_norm(prediction_error(weights, step, measurements.steps))
        return max(1e-12, float((errors / np.maximum(measurements.grams[:, step, step], 1e-12)).max()))

    def is_alarmed(self) -> bool:
        """Read the ratios that have arrived since the last call; True if one is far above those measured."""
        arrived = [self._pending.popleft().read() for _ in range(self._due())]
        self.ratios += arrived
        return any(not isfinite(ratio) or ratio > HARD_FACTOR * self._usual[1] for ratio in arrived)

    def _due(self) -> int:
        """How many ratios to read: those that have arrived; over several ranks, all but those of the current step."""
        if not self._groups.all or all(ratio.immediate for ratio in self._pending):
            return sum(1 for _ in takewhile(lambda ratio: ratio.ready, self._pending))
        due, self._postponed = self._postponed, len(self._pending) - self._postponed
        return due

    def mismatch(self) -> float | None:
        """How many times the usual the median ratio of the generation is, if no hard prompt can explain it."""
        self.is_alarmed()
        factor = median(self.ratios) / self._usual[0] if len(self.ratios) > 2 else 0.0
        return factor if factor > MISMATCH_FACTOR else None
