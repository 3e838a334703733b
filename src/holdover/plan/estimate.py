"""The quality that an image of a plan is expected to have, from the outputs that were computed while it was generated.

Two errors can be seen without the uncached image, and both are linear in the outputs u_t that the scheduler gets:

- the *forecast error* of a computed step b: its output minus its best prediction from the computed steps before it;
- the *hindsight error* after b: what held steps put into the final latent minus what they would have put into it if
  they had been interpolated with the outputs computed since, sum_t R[N,t] (u_t - w_b u_b - sum_j w_j u_j).

The logarithms of their mean squares are the features of an image. A ridge regression predicts the PSNR from them. It is
fitted where a plan is compared with uncached images of many prompts, and its error is that of predictions for prompts
that were left out of the fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor

from ..engine.signals import AsyncScalar
from ..metrics import PSNR_CAP
from ..profiles import QualityEstimate
from ..stats import ExpectedQuality
from .error_model import DEPTH, Array, Measurements, Ranges, fit_output, prediction_error

MISMATCH_FACTOR = 8.0  # times the usual ratio, over a whole generation: the model is not the one that was measured
FEWEST_PROMPTS = 32  # that an estimate is fitted to
LEAST_CORRELATION = 0.7  # between estimated and measured PSNR of images, by rank, to report estimates at all
_RIDGE = 1.0  # of the regression on standardized features
_SMALLEST = 1e-20  # mean squared error that a feature can show


class OutputTable:
    """The weights with which outputs are compared with each other, for one kind of generation.

    `effect` is how much of the output of each step is in the final latent.
    """

    def __init__(self, measurements: Measurements, effect: Array, ranges: Ranges) -> None:
        self.effect: list[float] = effect.tolist()
        self.first = {step: first for first, last in ranges for step in range(first, last + 1)}
        self._measured = measurements.merged
        self._forecasts: dict[tuple[tuple[int, ...], int], tuple[tuple[float, ...], float]] = {}
        self._interpolations: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}

    def forecast(self, anchors: tuple[int, ...], step: int) -> tuple[tuple[float, ...], float]:
        """The weights that predict an output, and their largest relative squared error in a measured generation."""
        if (anchors, step) not in self._forecasts:
            measured = self._measured
            weights = fit_output(anchors, step, measured.mean_gram)
            error = measured.squared_norm(prediction_error(weights, step, measured.steps))
            largest = float((error / np.maximum(measured.grams[:, step, step], 1e-12)).max())
            self._forecasts[anchors, step] = weights.values, max(1e-12, largest)
        return self._forecasts[anchors, step]

    def interpolation(self, anchors: tuple[int, ...], held: tuple[int, ...]) -> list[float]:
        """The weights of outputs on both sides of held steps for the sum of the effects of these steps."""
        if (anchors, held) not in self._interpolations:
            fits = [fit_output(anchors, step, self._measured.mean_gram).values for step in held]
            summed = np.array([self.effect[step] for step in held]) @ np.array(fits)
            self._interpolations[anchors, held] = summed.tolist()
        return self._interpolations[anchors, held]


class OutputMonitor:
    """Watches the outputs of one generation as its scheduler gets them. Nothing waits for what it finds.

    The *ratio* of a computed step is its relative squared forecast error over the largest one in a measured generation.
    `plan` is the digest of the plan that runs; held steps are observed if it `looks_back`.
    """

    def __init__(self, table: OutputTable, plan: str = "", looks_back: bool = False) -> None:
        self.plan, self.looks_back = plan, looks_back
        self._table = table
        self._outputs: deque[tuple[int, Tensor]] = deque(maxlen=DEPTH)
        self._held: list[int] = []  # since the last computed step
        self._effect: Tensor | None = None  # of these held steps on the final latent
        self._error: Tensor | None = None  # of all held steps, in hindsight
        self._squares: list[Tensor] = []
        self._ratios: list[AsyncScalar] = []

    def observe(self, step: int, output: Tensor, computed: bool) -> None:
        """Take note of the output of a computed step, or, to look back at it later, of a held one."""
        if computed:
            output = output.to(torch.float32, copy=True)  # a CUDA graph may write the next one to the same memory
            if len(self._outputs) > 1:
                self._forecast(step, output)
            if self._held:
                self._look_back(step, output)
            self._outputs.append((step, output))
        elif self.looks_back:
            effect = output.float() * self._table.effect[step]
            self._effect = effect if self._effect is None else self._effect.add_(effect)
            self._held.append(step)

    def _forecast(self, step: int, output: Tensor) -> None:
        weights, largest = self._table.forecast(tuple(s for s, _ in self._outputs), step)
        error = output
        for weight, (_, earlier) in zip(weights, self._outputs, strict=True):
            error = error.sub(earlier, alpha=weight)
        square = _mean_squares(error)
        relative = square / _mean_squares(output).clamp_min(1e-12)
        self._ratios.append(AsyncScalar(relative.max() / largest))  # of the worst image in the batch
        self._squares.append(square)

    def _look_back(self, step: int, output: Tensor) -> None:
        held, first, effect = tuple(self._held), self._table.first[self._held[0]], self._effect
        self._held, self._effect = [], None
        if self._table.first[step] != first:  # the next expert says nothing about the outputs of the last one
            return
        known = [*((s, earlier) for s, earlier in self._outputs if s >= first), (step, output)]
        error = effect
        assert error is not None
        for weight, (_, near) in zip(self._table.interpolation(tuple(s for s, _ in known), held), known, strict=True):
            error = error.sub(near, alpha=weight)
        self._error = error if self._error is None else self._error + error
        self._squares.append(_mean_squares(self._error))

    def close(self) -> None:
        """The generation has ended: release its outputs."""
        self._outputs.clear()
        self._effect = self._error = None

    @property
    def ratios(self) -> list[float]:
        """The ratios that have arrived on the host."""
        return [ratio.read() for ratio in self._ratios if ratio.ready]

    def mismatch(self, usual: float) -> float | None:
        """How many times the usual the median ratio of the generation is, if no hard prompt can explain it."""
        ratios = self.ratios
        factor = median(ratios) / usual if len(ratios) > 2 else 0.0
        return factor if factor > MISMATCH_FACTOR else None

    def features(self) -> Array:
        """(images, features); waits for the device."""
        if not self._squares:
            return np.empty((0, 0))
        squares = torch.stack(self._squares, dim=1).double().cpu().numpy()
        return np.asarray(np.log(np.maximum(squares, _SMALLEST)))

    def expected_quality(self, estimates: Sequence[QualityEstimate]) -> ExpectedQuality:
        """What the estimate of this plan says about the images of this generation."""
        estimate = next((one for one in estimates if one.plan == self.plan), None)
        if estimate is None:
            return ExpectedQuality(
                reason="its plan was not compared with uncached images of many prompts: holdover.tune does that"
            )
        measured = (estimate.error, estimate.rank_correlation, estimate.prompts)
        if estimate.rank_correlation < LEAST_CORRELATION:
            return ExpectedQuality((), *measured, "what can be seen in a generation tells too little on this model")
        features = self.features()
        if features.shape[1] != len(estimate.coefficients):
            return ExpectedQuality((), *measured, "the generation has not run to its end")
        psnr = estimate.intercept + features @ np.array(estimate.coefficients)
        return ExpectedQuality(tuple(np.clip(psnr, 0.0, PSNR_CAP).tolist()), *measured)


def _mean_squares(batch: Tensor) -> Tensor:
    """The mean square of each image's values."""
    return batch.flatten(1).square().mean(1)


def fit_estimate(plan: str, features: Array, psnr: Sequence[float]) -> QualityEstimate | None:
    """The regression of the PSNR of a plan's images on their features; None for too few images."""
    count, target = len(features), np.minimum(np.array(psnr), PSNR_CAP)
    if count < FEWEST_PROMPTS or len(target) != count or not features.shape[1]:
        return None
    mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-9)
    design = np.hstack([np.ones((count, 1)), (features - mean) / scale])
    penalty = _RIDGE * np.diag([0.0, *np.ones(len(scale))])
    solve = np.linalg.solve(design.T @ design + penalty, design.T)
    intercept, *slopes = solve @ target
    left_out = (target - design @ solve @ target) / (1.0 - np.einsum("if,fi->i", design, solve))
    coefficients = np.array(slopes) / scale
    return QualityEstimate(
        plan=plan,
        coefficients=tuple(map(float, coefficients)),
        intercept=float(intercept - coefficients @ mean),
        error=float(np.sqrt(np.mean(left_out**2))),
        rank_correlation=rank_correlation(target - left_out, target),
        prompts=count,
    )


def rank_correlation(a: Array, b: Array) -> float:
    """Spearman's correlation of two lists without ties; 0 where one of them is constant."""
    if min(np.ptp(a), np.ptp(b)) == 0:
        return 0.0
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])
