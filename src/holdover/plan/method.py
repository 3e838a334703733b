"""The planned cache at run time: a fixed schedule, weights from a plan, and a guard that may add computed steps.

Before the first step of a generation, `PlanMethod` looks up or makes the plan for this kind of generation. After that
nothing is decided: the policy is a table of computed steps, and the predictor a table of weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..engine.backend import EngineBackend
from ..engine.clock import SchedulerStep
from ..engine.install import CachedTransformer
from ..engine.method import Method, Runner
from ..engine.output import OutputRunner
from ..engine.storage import RecentDict
from ..errors import ConfigError, HoldoverWarning
from ..grid import Grid
from ..policies.base import Scheduled
from ..predictors import Newton, Predictor
from ..profiles import Profile
from .config import PlanConfig
from .error_model import Preconditioning
from .guard import Guard
from .identity import check_profile, resolve_profile
from .planner import GenerationSpec, Planner, PlanProblem, describe_generation, generation_key, plan_problem
from .weights import Plan, PlanPredictor, Weights, digest_weights

NEWTON_DEPTH = 2
_CACHED_KINDS = 32  # kinds of generation whose plans are kept


class PlanMemory:
    """What the plan methods of one backend share: plan problems, and which profiles were checked on which model."""

    def __init__(self) -> None:
        self._problems: RecentDict[Any, PlanProblem] = RecentDict(_CACHED_KINDS)
        self.checked: set[tuple[CachedTransformer, str]] = set()

    def problem(
        self, pipeline: Any, transformers: list[CachedTransformer], grid: Grid, profile: Profile | None
    ) -> PlanProblem:
        """The plan problem of a generation that starts."""
        key = (None if profile is None else profile.digest, *generation_key(pipeline, transformers, grid))
        found = self._problems.get(key)
        if found is None:
            found = self._problems[key] = plan_problem(describe_generation(pipeline, transformers, grid), profile)
        return found


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
    """Plans each kind of generation once, before its first step."""

    name = "plan"

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
    def digest(self) -> str:
        """A hash of the weights of the plan that was made last."""
        return digest_weights(next(reversed(self._plans.values())).weights) if self._plans else ""

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        self._transformers.append(transformer)
        self._pipeline = pipeline
        if len(self._transformers) == 1:
            self._profile = self._find_profile(transformer)
            self._planner = Planner(self.config, self._profile)
        if self._profile is None:
            if self.config.predictor == "least_squares" or self.config.target is not None:
                raise ConfigError("This needs a profile: measure one with holdover.calibrate(pipe, ...).")
            return (f"{transformer.name}: no profile, so Newton's extrapolation; its quality here was not measured",)
        if (transformer, self._profile.digest) not in self._memory.checked:
            check_profile(self._profile, transformer.name, transformer.core)
            self._memory.checked.add((transformer, self._profile.digest))
        return (f"{transformer.name}: profile {self._profile.name}",)

    def _find_profile(self, transformer: CachedTransformer) -> Profile | None:
        """The profile that plans are made from."""
        return resolve_profile(self.config.profile, transformer.core)

    def on_start(self) -> None:
        self._state = None

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Scheduled:
        state = self._current_state(grid)
        return Scheduled(frozenset(state.plan.computed), state.added)

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Predictor:
        state = self._current_state(grid)
        state.branches.add(branch)
        separate = state.problem.branches
        newton = Newton(NEWTON_DEPTH, newton_nodes(state.problem.spec))
        return PlanPredictor(
            self._plan_source(transformer, state), separate.index(branch) if branch in separate else 0, newton
        )

    def _current_state(self, grid: Grid) -> _GenerationState:
        """The state of the running generation; its plan is made, or found, at the first forward."""
        if self._state is None:
            if not grid.bounded:
                raise ConfigError(
                    "A plan needs the number of steps: call cache.refresh(transformer, num_inference_steps) before "
                    "the loop, or enable it on the pipeline."
                )
            problem = self._memory.problem(self._pipeline, self._transformers, grid, self._profile)
            if problem not in self._plans:
                self._plans[problem] = self._planner.plan(problem)
                self._transformers[0].notes.update(self._plans[problem].notes)
            self._state = _GenerationState(problem, self._plans[problem])
        return self._state

    def _plan_source(self, transformer: CachedTransformer, state: _GenerationState) -> Callable[[], Plan]:
        """A function that returns the current plan with the weights for this transformer."""
        return partial(self._current_plan, state)

    def _current_plan(self, state: _GenerationState) -> Plan:
        """The current plan. After the first step the branches are known: if they are not those that were measured, all
        of them get the same weights.
        """
        if not state.branches_known:
            state.branches_known = True
            measured, count = (
                set(state.problem.branches),
                len(state.branches) * self._transformers[0].groups.cfg_rank[1],
            )
            if measured and (not state.branches <= measured or count != len(measured)):
                state.problem = state.problem.merged
                self._replan(state, state.plan.computed)
        return state.plan

    def _replan(self, state: _GenerationState, computed: tuple[int, ...]) -> None:
        """Continue with another schedule and its weights."""
        weights = self._weights.get((state.problem, computed))
        if weights is None:
            weights = self._weights[state.problem, computed] = self._planner.weights(state.problem, computed)
        state.plan = replace(state.plan, computed=computed, weights=weights)

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        """Show the guard the output of a computed step; if it is alarmed, add a computed step."""
        state = self._state
        if state is None or not isinstance(stepped.output, torch.Tensor):
            return
        self._current_plan(state)
        state.guard = state.guard or self._make_guard(state.problem)
        if state.guard is None:
            return
        if stepped.step in state.plan.computed:
            state.guard.observe(stepped.step, model_output(stepped, state.problem.preconditioning))
        if state.guard.is_alarmed():
            self._add_step(state, stepped.step)

    def _make_guard(self, problem: PlanProblem) -> Guard | None:
        """A guard for one generation; None without measured ratios, or on a finer grid than was measured."""
        profile, measurements = self._profile, problem.measurements
        if not self.follows or profile is None or measurements is None or not profile.facts.surprise:
            return None
        if measurements.steps > len(profile.facts.noise):
            return None
        usual, largest = profile.facts.surprise
        return Guard(measurements.merged, (usual, largest), self._transformers[0].groups)

    def _add_step(self, state: _GenerationState, step: int) -> None:
        """Compute one more step, in the middle of the next gap; a plan grows by a quarter at most."""
        computed = state.plan.computed
        if len(state.added) >= max(1, (len(computed) - len(state.added)) // 4):
            return
        gap: list[int] = []
        for later in range(step + 1, state.problem.spec.last + 1):
            if later not in computed:
                gap.append(later)
            elif gap:
                break
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


class OutputPlanMethod(PlanMethod):
    """Holds the transformer's output: nothing inside the transformer runs at a held step."""

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return OutputRunner(transformer)


class ResidualPlanMethod(PlanMethod):
    """Holds the residuals of the blocks: embedders and output layers run at every step."""

    follows = False

    def _plan_source(self, transformer: CachedTransformer, state: _GenerationState) -> Callable[[], Plan]:
        weights = self._planner.residual_weights(state.problem.spec, transformer.name, state.plan.computed)
        plan = replace(state.plan, weights=weights)
        return lambda: plan


class PlanBackend(EngineBackend[PlanConfig]):
    """Computes the steps of a plan and predicts the others; nothing is decided while it runs."""

    config_class = PlanConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._memory = PlanMemory()

    def make_method(self, settings: PlanConfig) -> PlanMethod:
        kind = ResidualPlanMethod if settings.quantity == "seam" else OutputPlanMethod
        return kind(settings, self._memory)

    def plan_digest(self) -> str:
        """A hash of the plan of the last generation."""
        method = self._require_engine().method
        assert isinstance(method, PlanMethod)
        return method.digest


def model_output(stepped: SchedulerStep, preconditioning: Preconditioning | None) -> torch.Tensor:
    """The model's output at a scheduler step, with its branches mixed."""
    output: torch.Tensor = stepped.output
    if preconditioning is None:
        return output
    return preconditioning.model_output(stepped.step, output, stepped.sample)


def newton_nodes(spec: GenerationSpec) -> tuple[float, ...]:
    """The nodes of Newton's extrapolation: the noise levels, or the step indices where two levels are equal (Heun)."""
    nodes = spec.noise.tolist()
    return tuple(nodes) if len(set(nodes)) == len(nodes) else tuple(map(float, range(len(nodes))))
