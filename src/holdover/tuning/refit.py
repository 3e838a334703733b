"""Weights fitted while the plan runs on the model itself: to the outputs it really gets, along the way it really goes.

At held step i the weights of the last computed outputs, of each branch, are fitted to the output that puts the next
latent where the uncached generation has it: v_i - sum_{k<i} R[i+1,k] (u_k - v_k) / R[i+1,i], with u the outputs of this
run, v those of the uncached one, and R how much of each output is in each latent. Early held steps keep the weights
that were planned on paper: what an early error does differs from picture to picture, and weights fitted to some mislead
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np
import torch

from ..calibration.calls import Caller
from ..calibration.passes import Outputs, Trajectory
from ..calibration.prompts import Prompt
from ..calibration.shelf import Shelf
from ..grid import Grid
from ..models.inputs import iter_tensors
from ..plan.config import PlanConfig
from ..plan.intake import intake_of, output_of
from ..plan.making import Kind, kind_of
from ..plan.method import OutputPlan
from ..plan.rollout import DEPTH, Weights, ridged
from ..predictors import Predictor
from ..profiles import Profile
from ..runtime.backend import transformers_of
from ..runtime.clock import Stepped
from ..runtime.engine import Engine
from ..runtime.method import Computed, Method
from ..runtime.unit import Unit

FITTED_BELOW = 0.5  # noise level; above it weights stay as they were planned


class Refit:
    """Fits schedules on one batch of pictures; a context manager that lets go of their uncached outputs."""

    def __init__(self, caller: Caller, profile: Profile, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        self._caller, self._profile = caller, profile
        self._prompts, self._seeds = prompts, seeds
        self._stack = ExitStack()
        self._uncached = self._stack.enter_context(Shelf("device"))

    def __enter__(self) -> Self:
        facts = self._profile.facts
        with Shelf("device") as latents:
            intake = intake_of(facts, np.array(facts.noise))
            self._run(Outputs(Trajectory(latents, self._uncached, intake=intake)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def weights(self, computed: tuple[int, ...], tie: float | None) -> tuple[float, ...]:
        """The weights of all held steps, in order; branches have their own unless `tie` is None."""
        facts = self._profile.facts
        apart = dict(zip(facts.branches, facts.mix, strict=True)) if tie is not None else {}
        fitting = _Fitting(self._profile, computed, self._uncached, apart, tie or 0.0)
        self._run(fitting)
        return tuple(weight for step in sorted(fitting.fitted) for weight in fitting.fitted[step])

    def _run(self, method: Method) -> None:
        engine = Engine(self._caller.pipe, transformers_of(self._caller.pipe), method)
        engine.install()
        try:
            self._caller(self._prompts, self._seeds)
        finally:
            engine.uninstall()


class _Fitting(OutputPlan):
    """Runs a schedule and fits the weights of each held step when it comes.

    `mix` is the share of each branch that has weights of its own; empty for one set of weights for all.
    """

    follows = True
    observes = True

    def __init__(
        self, profile: Profile, computed: tuple[int, ...], uncached: Shelf, mix: dict[str, float], tie: float
    ) -> None:
        super().__init__(PlanConfig(schedule=computed, guard=False))
        self._known, self._computed = profile, computed
        self._uncached, self._mix, self._tie = uncached, mix, tie
        self._on_paper: dict[int, Weights] = {}
        self._branched: dict[tuple[str, int], torch.Tensor] = {}
        self._outputs: list[torch.Tensor] = []
        self._kind: Kind | None = None
        self.fitted: dict[int, tuple[float, ...]] = {}

    def _measured(self, unit: Unit) -> None:
        """A fit makes its own weights: the profile is asked for the early ones alone."""

    def predictor(self, unit: Unit, branch: str, grid: Grid) -> Predictor:
        if self._kind is None:
            self._kind = kind_of(self._running(grid).kind.setting, self._known)
            self._on_paper = self._early(self._kind)
        return _WhenItComes(self, list(self._mix).index(branch) if self._mix else 0)

    def _early(self, kind: Kind) -> dict[int, Weights]:
        """The weights on paper of the steps that are not fitted."""
        planner = kind.planner if self._mix else kind.merged.planner
        assert planner is not None
        weights = planner.weights(self._computed)
        return {step: made for step, made in weights.items() if kind.setting.noise[step] > FITTED_BELOW}

    def observe(self, computed: Computed) -> None:
        if self._mix:
            self._branched[computed.branch, computed.step] = (
                next(iter_tensors(computed.output)).detach().float().clone()
            )

    def stepped(self, stepped: Stepped) -> None:
        assert self._kind is not None
        self._outputs.append(output_of(stepped, self._kind.intake).detach().float().clone())

    def weights(self, step: int, anchors: Sequence[int], branch: int) -> tuple[float, ...]:
        """The weights of a held step for one branch."""
        if step not in self.fitted:
            on_paper = self._on_paper.get(step)
            self.fitted[step] = self._fit(step, anchors) if on_paper is None else on_paper.values
        return self.fitted[step][branch * len(anchors) : (branch + 1) * len(anchors)]

    def _fit(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        features = torch.stack([f.flatten() for f in self._features(anchors)]).double()
        normal = (features @ features.T).cpu().numpy()
        known = (features @ self._wanted(step).flatten().double()).cpu().numpy()
        return tuple(map(float, ridged(normal, known, max(1, len(self._mix)), self._tie)))

    def _features(self, anchors: Sequence[int]) -> list[torch.Tensor]:
        if not self._mix:
            return [self._outputs[a] for a in anchors]
        return [share * self._branched[branch, a] for branch, share in self._mix.items() for a in anchors]

    def _wanted(self, step: int) -> torch.Tensor:
        assert self._kind is not None
        wanted = self._uncached[step].clone()
        row = self._kind.response[step + 1]
        for earlier in range(step if abs(row[step]) > 1e-12 else 0):
            off = self._outputs[earlier] - self._uncached[earlier]
            wanted.sub_(off, alpha=float(row[earlier] / row[step]))
        return wanted


class _WhenItComes:
    """A predictor of one branch that asks for its weights when they are needed."""

    depth = DEPTH

    def __init__(self, fitting: _Fitting, branch: int) -> None:
        self._fitting, self._branch = fitting, branch

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        return self._fitting.weights(step, anchors, self._branch)
