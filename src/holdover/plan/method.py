"""The planned cache at run time: a fixed schedule, weights from a plan, and a guard that may add computed steps.

Before the first step of a generation, `PlanMethod` looks up or makes the plan for this kind of generation. After that
nothing is decided: the policy is a table of computed steps, and the predictor a table of weights.

The guard notices a generation that is harder to predict than those the plan was made on. At each computed step t the
output is also predicted from the computed steps before it. The *ratio* of the step is the relative squared error of
that prediction, |v_t - sum_j w_j v_j|^2 / |v_t|^2, divided by the largest relative error in the measured generations.
Calibration records how large ratios usually are in a generation with held steps.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import dropwhile, takewhile
from math import isfinite
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..engine.backend import EngineBackend
from ..engine.clock import SchedulerStep
from ..engine.install import CachedTransformer
from ..engine.method import Method, Runner
from ..engine.output import OutputRunner
from ..engine.parallel import SINGLE_PROCESS, Groups, largest_on_device
from ..engine.signals import AsyncScalar
from ..engine.storage import RecentDict
from ..errors import ConfigError, HoldoverWarning, ProfileError
from ..grid import Grid
from ..policies.base import Scheduled
from ..predictors import Newton
from ..profiles import Profile
from ..profiles.profile import display_name
from .config import NO_PROFILE, PlanConfig
from .error_model import DEPTH, Measurements, Weights, fit_output, prediction_error
from .generation import check_profile, describe_generation, generation_key, model_output, resolve_profile
from .planner import Plan, Planner, PlanProblem, plan_problem

HARD_FACTOR = 2.0  # times the largest ratio in the calibration: compute one more step
MISMATCH_FACTOR = 8.0  # times its median ratio, over a whole generation: the model is not the one that was measured
_CACHED_KINDS = 32  # kinds of generation whose plans are kept


class Guard:
    """Watches the outputs of one generation; `usual` is the median and the largest ratio in the calibration.

    Ratios are read one step later. Over several ranks all read the largest, at the same step.
    """

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
            measured = self._measurements
            weights = fit_output([s for s, _ in self._outputs], step, measured.mean_gram)
            error = output.float()
            for weight, (_, earlier) in zip(weights.values, self._outputs, strict=True):
                error = error.sub(earlier, alpha=weight)
            size = output.float().flatten(1).square().sum(1).clamp_min(1e-12)
            relative = (error.flatten(1).square().sum(1) / size).max()  # of the worst image in the batch
            known = measured.squared_norm(prediction_error(weights, step, measured.steps))
            largest = float((known / np.maximum(measured.grams[:, step, step], 1e-12)).max())
            self._pending.append(AsyncScalar(largest_on_device(self._groups, relative / max(1e-12, largest))))
        self._outputs.append((step, output))

    def is_alarmed(self) -> bool:
        """Read the ratios that have arrived (over ranks, those before this step); True if one is far above usual."""
        if not self._groups.all or all(ratio.immediate for ratio in self._pending):
            due = sum(1 for _ in takewhile(lambda ratio: ratio.ready, self._pending))
        else:
            due, self._postponed = self._postponed, len(self._pending) - self._postponed
        arrived = [self._pending.popleft().read() for _ in range(due)]
        self.ratios += arrived
        return any(not isfinite(ratio) or ratio > HARD_FACTOR * self._usual[1] for ratio in arrived)

    def mismatch(self) -> float | None:
        """How many times the usual the median ratio of the generation is, if no hard prompt can explain it."""
        self.is_alarmed()
        factor = median(self.ratios) / self._usual[0] if len(self.ratios) > 2 else 0.0
        return factor if factor > MISMATCH_FACTOR else None


@dataclass(frozen=True)
class PlanPredictor:
    """Predicts held steps of one branch with the weights `planned` returns, or with Newton where anchors differ."""

    planned: Callable[[int], Weights | None]
    branch: int
    fallback: Newton
    depth: int = DEPTH

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        planned = self.planned(step)
        if planned is None or planned.anchors != tuple(anchors[-len(planned.anchors) :]):
            return self.fallback.weights(step, anchors)
        return (0.0,) * (len(anchors) - len(planned.anchors)) + planned.of(self.branch)


class PlanMemory:
    """What the plan methods of one backend share: plan problems, and which profiles were checked on which model."""

    def __init__(self) -> None:
        self.problems: RecentDict[Any, PlanProblem] = RecentDict(_CACHED_KINDS)
        self.checked: WeakKeyDictionary[CachedTransformer, set[str]] = WeakKeyDictionary()
        self.warned_unmeasured = False


@dataclass
class _GenerationState:
    """The running generation: its plan, the steps that the guard added, and the branches seen."""

    problem: PlanProblem
    plan: Plan
    guard: Guard | None = None
    added: set[int] = field(default_factory=set)
    branches: set[str] = field(default_factory=set)
    branches_known: bool = False


class PlanMethod(Method[PlanConfig]):
    """Holds the transformer's output: nothing inside it runs at a held step. Plans each kind of generation once."""

    name = "plan"
    needs_steps = True
    uses_profile = True  # False: plans are made without a profile, even if one ships for this model

    def __init__(self, config: PlanConfig, memory: PlanMemory | None = None) -> None:
        super().__init__(config)
        self._memory = memory or PlanMemory()
        self._transformers: list[CachedTransformer] = []
        self._pipeline: Any = None
        self._profile: Profile | None = None
        self._planner = Planner(config, None)
        self._plans: RecentDict[PlanProblem, Plan] = RecentDict(_CACHED_KINDS)
        self._weights: RecentDict[tuple[PlanProblem, tuple[int, ...]], dict[int, Weights]] = RecentDict(_CACHED_KINDS)
        self._state: _GenerationState | None = None
        self._warned = False

    @property
    def follows(self) -> bool:  # type: ignore[override]
        return self.config.guard and self._profile is not None

    @property
    def least_steps(self) -> int:  # type: ignore[override]
        measured = self._profile is not None or self.config.schedule is not None
        return 0 if measured else Method.least_steps

    @property
    def digest(self) -> str:
        """A hash of the weights of the plan that was made last."""
        return next(reversed(self._plans.values())).digest if self._plans else ""

    @property
    def generation_notes(self) -> tuple[str, ...]:
        return () if self._state is None else self._state.plan.notes

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return OutputRunner(transformer)

    def timestep_factor(self, step: int) -> float | None:
        return None if self._state is None else self._state.plan.timestep_factors.get(step)

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        self._transformers.append(transformer)
        self._pipeline = pipeline
        if len(self._transformers) == 1:
            self._profile = resolve_profile(self.config.profile, transformer.core) if self.uses_profile else None
            self._planner = Planner(self.config, self._profile)
        if self._profile is None:
            if self.uses_profile:
                self._check_unmeasured(transformer)
            return (f"{transformer.name}: no profile, so Newton's extrapolation; its quality here was not measured",)
        checked = self._memory.checked.setdefault(transformer, set())
        if self._profile.digest not in checked:
            check_profile(self._profile, transformer.name, transformer.core)
            checked.add(self._profile.digest)
        return (f"{transformer.name}: profile {display_name(self._profile)}",)

    def _check_unmeasured(self, transformer: CachedTransformer) -> None:
        """Refuse a plan without a profile; warn where one is asked for, and accept a schedule that the caller gives."""
        config = self.config
        fitted = config.predictor if config.predictor == "least_squares" else None
        for name, value in (("quality", config.quality), ("target", config.target), ("predictor", fitted)):
            if value is not None:
                raise ConfigError(
                    f'{name}="{value}" needs a profile of this {transformer.class_name}: measure one with '
                    "holdover.calibrate(pipe, prompts) or `holdover calibrate --model MODEL`, and give it as profile=."
                )
        if config.profile is None and config.schedule is None:
            raise ProfileError(
                f"plan has no profile of this {transformer.class_name}. Measure one with "
                "holdover.calibrate(pipe, prompts) or `holdover calibrate --model MODEL`, and give it as profile=.\n"
                'Without a profile use "easy_cache", or "mag_cache" where ratios ship; profile="none" plans unmeasured.'
            )
        if config.profile == NO_PROFILE and config.schedule is None and not self._memory.warned_unmeasured:
            self._memory.warned_unmeasured = True
            warnings.warn(
                f"This plan was not measured on this {transformer.class_name}: compare its images with uncached ones, "
                "or measure a profile with holdover.calibrate.",
                HoldoverWarning,
                stacklevel=8,  # the caller of holdover.enable
            )

    def on_start(self) -> None:
        self._state = None

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Scheduled:
        state = self._current_state(grid)
        return Scheduled(frozenset(state.plan.computed), state.added)

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> PlanPredictor:
        state = self._current_state(grid)
        state.branches.add(branch)
        separate = state.problem.branches
        index = separate.index(branch) if branch in separate else 0
        depth = max(DEPTH, max((len(weights.anchors) for weights in state.plan.weights.values()), default=0))
        return PlanPredictor(partial(self._planned_weights, state), index, state.problem.spec.newton, depth)

    def _current_state(self, grid: Grid) -> _GenerationState:
        """The state of the running generation; its plan is made, or found, at the first forward."""
        if self._state is None:
            running, profile = (self._pipeline, self._transformers, grid), self._profile
            key = (None if profile is None else profile.digest, *generation_key(*running))
            problem = self._memory.problems.get(key)
            if problem is None:
                problem = self._memory.problems[key] = plan_problem(describe_generation(*running), profile)
            if problem not in self._plans:
                self._plans[problem] = self._planner.plan(problem)
                self._transformers[0].notes.update(self._plans[problem].notes)
            self._state = _GenerationState(problem, self._plans[problem])
        return self._state

    def _planned_weights(self, state: _GenerationState, step: int) -> Weights | None:
        """The weights of a held step in the current plan."""
        if not state.branches_known:
            self._check_branches(state)
        return state.plan.weights.get(step)

    def _check_branches(self, state: _GenerationState) -> None:
        """After the first step: if the branches are not those that were measured, all of them get the same weights."""
        state.branches_known = True
        measured = set(state.problem.branches)
        count = len(state.branches) * self._transformers[0].groups.cfg_rank[1]
        if measured and (not state.branches <= measured or count != len(measured)):
            state.problem = state.problem.merged
            self._replan(state, state.plan.computed)

    def _replan(self, state: _GenerationState, computed: tuple[int, ...]) -> None:
        """Continue with another schedule and its weights."""
        weights = self._weights.get((state.problem, computed))
        if weights is None:
            weights = self._weights[state.problem, computed] = self._planner.weights(state.problem, computed)
        factors = self._planner.timestep_factors(state.problem, computed)
        state.plan = replace(state.plan, computed=computed, weights=weights, timestep_factors=factors)

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        """Show the guard the output of a computed step; if it is alarmed, add a computed step."""
        state = self._state
        if state is None or not isinstance(stepped.output, torch.Tensor):
            return
        if not state.branches_known:
            self._check_branches(state)
        state.guard = state.guard or self._make_guard(state.problem)
        if state.guard is None:
            return
        if stepped.step in state.plan.computed:
            state.guard.observe(stepped.step, model_output(stepped, state.problem.preconditioning))
        if state.guard.is_alarmed():
            self._add_step(state, stepped.step)

    def _make_guard(self, problem: PlanProblem) -> Guard | None:
        """A guard for one generation; None without measured ratios, or on a finer grid than was measured."""
        facts, measurements = None if self._profile is None else self._profile.facts, problem.measurements
        if facts is None or measurements is None or not facts.surprise or measurements.steps > len(facts.noise):
            return None
        usual, largest = facts.surprise
        return Guard(measurements.merged, (usual, largest), self._transformers[0].groups)

    def _add_step(self, state: _GenerationState, step: int) -> None:
        """Compute one more step, in the middle of the next gap; a plan grows by a quarter at most."""
        computed = state.plan.computed
        if len(state.added) >= max(1, (len(computed) - len(state.added)) // 4):
            return
        later = dropwhile(computed.__contains__, range(step + 1, state.problem.spec.last + 1))
        gap = list(takewhile(lambda held: held not in computed, later))
        if gap:
            state.added.add(gap[len(gap) // 2])
            self._replan(state, tuple(sorted({*computed, *state.added})))

    def on_end(self) -> None:
        state, self._state = self._state, None
        factor = None if state is None or state.guard is None else state.guard.mismatch()
        if factor is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"The outputs of this model are {factor:.0f} times less predictable than its profile says. "
                "If a LoRA or quantized weights were added since it was measured, calibrate again with them.",
                HoldoverWarning,
                stacklevel=2,
            )


class ResidualPlanMethod(PlanMethod):
    """Holds the residuals of the blocks instead: embedders and output layers run at every step."""

    follows = False

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return Method.make_runner(self, transformer)

    def timestep_factor(self, step: int) -> float | None:
        return None  # factors were trained together with weights for outputs

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> PlanPredictor:
        state = self._current_state(grid)
        weights = self._planner.residual_weights(state.problem.spec, transformer.name, state.plan.computed)
        return PlanPredictor(weights.get, 0, state.problem.spec.newton)


class PlanBackend(EngineBackend[PlanConfig]):
    """Computes the steps of a plan and predicts the others; nothing is decided while it runs."""

    config_class = PlanConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._memory = PlanMemory()

    def make_method(self, settings: PlanConfig) -> PlanMethod:
        kind = ResidualPlanMethod if settings.quantity == "seam" else PlanMethod
        return kind(settings, self._memory)

    def plan_digest(self) -> str:
        """A hash of the plan of the last generation."""
        method = self._require_engine().method
        assert isinstance(method, PlanMethod)
        return method.digest
