"""Weights and noise levels trained through the model, along the whole path of a plan.

The weights of every gap are changed together: each held step of a gap has the weights it was fitted with plus the same
change, over all computed outputs so far and for each branch. This is everything that reaches the next computed step
under a scheduler that is linear in the outputs, with K (K + 1) / 2 numbers a branch for K computed steps. Where the
timestep is a floating-point argument, each computed step after the first held one also has a factor exp(p) by which
that argument is multiplied: the noise level that the model is told.

Adam minimizes the mean log of the squared error of the final latent. A parameter changes the weights along an
eigenvector of the gap's normal matrix, or the log of a factor, so that a change of 1 moves the final latent by the
error that it has. The
gradient goes through the computed steps of the transformer. Where its backward does not fit or is not implemented, it
comes from antithetic finite differences: the loss at parameters moved by +e and -e, for random e.

The result is a table of weights as before, and of factors: a generation computes nothing more. Prior work on small
learned linear solvers: bespoke non-stationary solvers, arXiv:2403.01329.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .error_model import Weights
from .recorded import RecordedBatch
from .replay import UNCHANGED, Factors, Replay, Rollout

ITERATIONS = 120
IMAGES = 24  # generations that one gradient is averaged over, at least, if there are so many
_RATE = 0.05  # of Adam, in errors of the final latent
_DAMPING = (
    1e-5  # of a gap's normal matrix, relative to its largest eigenvalue: nearly parallel outputs are not told apart
)
_CHECKS = 12  # how often the plan is judged
_PATIENCE = 6  # checks without a better plan before training stops: the last ones, at low rates, gain most
_DIRECTIONS = 8  # random directions of one gradient by finite differences
_STEP = 0.1  # of finite differences, in errors of the final latent
_NUDGE = 0.01  # of the log of a factor: how far it is moved to see what it does
_LARGEST = 0.02  # change of the log of a factor that one parameter of 1 makes, where it does little
_FURTHEST = 0.5  # the log of a factor
_LARGE = 5e8  # parameters from which intermediate values are computed again instead of kept
Judge = Callable[[Mapping[int, Weights], Mapping[int, float]], float]
Report = Callable[["TrainingState", float, Mapping[int, Weights], Mapping[int, float]], None]


@dataclass(frozen=True)
class TrainingState:
    """How far a training has come; `train` continues from it as if it had not been stopped.

    `best` is the highest score so far, and `stale` counts the checks since. `averages` and `squares` are Adam's.
    """

    iteration: int
    best: float
    stale: int = 0
    parameters: tuple[float, ...] = ()
    averages: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()


def train(
    replay: Replay,
    computed: tuple[int, ...],
    weights: Mapping[int, Weights],
    judge: Judge,
    iterations: int = ITERATIONS,
    differences: bool = False,
    report: Report = lambda *_: None,
    factors: Mapping[int, float] | None = None,
    noise_levels: bool = True,
    state: TrainingState | None = None,
) -> tuple[float, dict[int, Weights], dict[int, float]]:
    """The best plan seen, its score, weights and factors: those it starts from, or others that `judge` scores higher.

    `judge` has generations of its own that the plan is not trained on. With `differences`, or where a gradient cannot
    be computed, finite differences are used. `report` is called with the state, the score and the weights of each plan
    that is judged; with such a `state`, a training continues, and only plans from there on are returned. Without
    `noise_levels`, the factors of the timestep stay as they are.
    """
    factors = dict(factors or {})
    plan = TrainedPlan(replay, computed, weights, factors, noise_levels)
    if state is None:
        state = TrainingState(0, judge(weights, factors))
        report(state, state.best, weights, factors)
    best = state.best, dict(weights), factors
    if not plan.parameters.numel() or state.stale == _PATIENCE:
        return best
    optimizer = torch.optim.Adam([plan.parameters], _RATE)
    if state.iteration:
        _restore(plan.parameters, optimizer, state)
    draws = islice(_draw_batches(replay.batches), state.iteration, iterations)
    with _differentiable(replay):
        for iteration, chosen in enumerate(draws, state.iteration + 1):
            optimizer.param_groups[0]["lr"] = _RATE / 2 * (1 + math.cos(math.pi * (iteration - 1) / iterations))
            optimizer.zero_grad()
            if not differences:
                differences = not _backward(plan, chosen)
            if differences:
                plan.parameters.grad = _differences(plan, chosen)
            torch.nn.utils.clip_grad_norm_([plan.parameters], 1.0)
            optimizer.step()
            if iteration % max(1, iterations // _CHECKS) == 0:
                trained = plan.weights(), plan.factors()
                score = judge(*trained)
                best, stale = ((score, *trained), 0) if score > best[0] else (best, state.stale + 1)
                adam = optimizer.state[plan.parameters]
                kept = (plan.parameters.detach(), adam["exp_avg"], adam["exp_avg_sq"])
                state = TrainingState(iteration, best[0], stale, *(tuple(values.tolist()) for values in kept))
                report(state, score, *trained)
                if stale == _PATIENCE:
                    break
    return best


def _draw_batches(batches: Sequence[RecordedBatch]) -> Iterator[list[RecordedBatch]]:
    """The batches of one gradient after another, without end; each is used once before any is used again."""
    order, left = random.Random(0), list[RecordedBatch]()
    while True:
        chosen = list[RecordedBatch]()
        while sum(batch.size for batch in chosen) < IMAGES and len(chosen) < len(batches):
            left = left or order.sample(batches, len(batches))
            chosen.append(left.pop())
        yield chosen


def _restore(parameters: Tensor, optimizer: torch.optim.Adam, state: TrainingState) -> None:
    """Give the parameters and the optimizer the values of a training that was stopped."""
    stored, averages, squares = (
        torch.tensor(values, device=parameters.device) for values in (state.parameters, state.averages, state.squares)
    )
    with torch.no_grad():
        parameters.copy_(stored)
    step = torch.tensor(float(state.iteration))
    optimizer.state[parameters] = {"step": step, "exp_avg": averages, "exp_avg_sq": squares}


class TrainedPlan:
    """The parameters of one plan, its weights, and the factors of its timesteps."""

    def __init__(
        self,
        replay: Replay,
        computed: tuple[int, ...],
        weights: Mapping[int, Weights],
        factors: Mapping[int, float] | None = None,
        noise_levels: bool = True,
    ) -> None:
        self.replay, self.computed, self._factors = replay, computed, dict(factors or {})
        self._gaps = replay.gaps(computed, len(computed))
        known = replay.tables(computed, weights)
        self._start = {  # over all computed outputs of the expert
            step: torch.nn.functional.pad(known[step], (len(anchors) - known[step].shape[2], 0))
            for step, (_, anchors) in self._gaps.items()
        }
        self._scales, self._nudges = dict[int, Tensor](), dict[int, float]()
        if self._gaps:
            with torch.no_grad():
                self._find_scales(noise_levels and replay.has_noise_levels)
        sizes = [scale.shape[1] for scale in self._scales.values()]
        self._sizes = [*sizes, len(self._nudges)]
        self.parameters = torch.zeros(sum(self._sizes), device=replay.response.device, requires_grad=True)

    def _find_scales(self, noise_levels: bool) -> None:
        """By gap, the change of its weights for each of its parameters: a matrix with one column for each.

        By computed step, the change of the log of its factor.
        """
        replay, batch = self.replay, self.replay.batches[0]
        final = replay.final_difference(batch, self.computed, self._start, self._factors)
        error = float(final.square().mean().sqrt())
        first = min(self._gaps)  # up to this step there is nothing to correct
        for step in (step for step in self.computed if step > first and noise_levels):
            nudged = self._factors | {step: self._factors.get(step, 1.0) * math.exp(_NUDGE)}
            moved = replay.final_difference(batch, self.computed, self._start, nudged) - final
            reached = float(moved.square().mean().sqrt()) / _NUDGE
            self._nudges[step] = min(error / max(reached, 1e-12), _LARGEST)
        rollout = Rollout(batch)
        for step in self.computed:
            replay.compute(rollout, step, self._factors.get(step))
            if step not in self._gaps:
                continue
            gap, anchors = self._gaps[step]
            table = self._start[step]
            features = rollout.features(step, len(anchors), replay.part_sets(len(table) > 1))
            values, vectors = torch.linalg.eigh((features @ features.T / features.shape[1]).cpu())
            reach = float(replay.response[-1, gap].sum().abs().clamp_min(1e-6))
            columns = vectors / (values.clamp_min(0) + _DAMPING * values[-1]).sqrt() * error / reach
            self._scales[step] = columns.float().to(table.device)
            replay.hold(rollout, gap, table)

    def tables(self, parameters: Tensor) -> dict[int, Tensor]:
        """The weights of each gap."""
        found = {}
        *parts, _ = torch.split(parameters, self._sizes)
        for (step, start), part in zip(self._start.items(), parts, strict=True):
            change = (self._scales[step] @ part).reshape(len(start), 1, -1)
            found[step] = start + change
        return found

    def scaled_factors(self, parameters: Tensor) -> Factors:
        """The factor of the timestep at each computed step."""
        if not self._nudges:
            return self._factors or UNCHANGED
        changes = torch.split(parameters, self._sizes)[-1]
        return {
            step: (math.log(self._factors.get(step, 1.0)) + nudge * change).clamp(-_FURTHEST, _FURTHEST).exp()
            for (step, nudge), change in zip(self._nudges.items(), changes, strict=True)
        }

    def loss(self, batch: RecordedBatch, parameters: Tensor) -> Tensor:
        """The mean log of the squared error of the final latents."""
        factors = self.scaled_factors(parameters)
        errors = self.replay.final_errors(batch, self.computed, self.tables(parameters), factors)
        return (errors + 1e-12).log().mean()

    @torch.no_grad()
    def weights(self) -> dict[int, Weights]:
        """The weights of all held steps."""
        found = {}
        for step, table in self.tables(self.parameters).items():
            gap, anchors = self._gaps[step]
            for held, values in zip(range(gap.start, gap.stop), table.transpose(0, 1).double().cpu(), strict=True):
                found[held] = Weights(anchors, tuple(values.flatten().tolist()))
        return found

    @torch.no_grad()
    def factors(self) -> dict[int, float]:
        """The factor of the timestep at each computed step; empty if there are none."""
        return {step: float(factor) for step, factor in self.scaled_factors(self.parameters).items()}


def _backward(plan: TrainedPlan, batches: Sequence[RecordedBatch]) -> bool:
    """Add the gradient of the loss; False if the backward does not fit into memory or is not implemented."""
    total = sum(batch.size for batch in batches)
    for recompute in (False, True) if not plan.replay.recompute else (True,):
        plan.replay.recompute = recompute
        plan.parameters.grad = torch.zeros_like(plan.parameters)
        try:
            for batch in batches:
                with torch.enable_grad():
                    loss = plan.loss(batch, plan.parameters) * (batch.size / total)
                torch.autograd.backward(loss)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        except (RuntimeError, NotImplementedError):
            return False
        else:
            return bool(plan.parameters.grad.isfinite().all())
    return False


@torch.no_grad()
def _differences(plan: TrainedPlan, batches: Sequence[RecordedBatch]) -> Tensor:
    """An estimate of the gradient, from the loss at parameters moved by +e and -e for random e."""
    gradient, total = torch.zeros_like(plan.parameters), sum(batch.size for batch in batches)
    for _ in range(_DIRECTIONS):
        direction = torch.randn_like(gradient)
        change = _STEP / math.sqrt(gradient.numel()) * direction
        for batch in batches:
            ahead, behind = (plan.loss(batch, plan.parameters + sign * change) for sign in (1, -1))
            slope = (ahead - behind) / (2 * _STEP / math.sqrt(gradient.numel()))
            gradient += direction * slope * (batch.size / total / _DIRECTIONS)
    return gradient


@contextmanager
def _differentiable(replay: Replay) -> Iterator[None]:
    """The transformers without gradients of their own, with gradient checkpointing if they are large.

    Attention is not cuDNN's meanwhile, which PyTorch prefers on Hopper: for some shapes its backward returns NaN
    (https://github.com/pytorch/pytorch/issues/196678).
    """
    modules: list[Any] = replay.modules
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    large = [m for m in modules if sum(p.numel() for p in m.parameters()) > _LARGE]
    blocks = [m for m in large if getattr(m, "_supports_gradient_checkpointing", False)]
    blocks = [m for m in blocks if not m.is_gradient_checkpointing]
    replay.recompute = len(blocks) < len(large)
    for module in blocks:
        module.enable_gradient_checkpointing()
    for parameter in parameters:
        parameter.requires_grad_(False)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        replay.recompute = False
        for module in blocks:
            module.disable_gradient_checkpointing()
        for parameter in parameters:
            parameter.requires_grad_(True)
