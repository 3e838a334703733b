"""The planned cache at run time: a fixed schedule, and weights from a plan.

Before the first step of a generation, `PlanMethod` looks up or makes the plan for this kind of generation. After that
nothing is decided: the policy is a table of computed steps, and the predictor a table of weights. The outputs are
watched (estimate.py), to tell afterwards what quality to expect and whether these are the weights that were measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..engine.backend import EngineBackend
from ..engine.clock import SchedulerStep
from ..engine.install import CachedTransformer
from ..engine.method import Method, Runner
from ..engine.output import OutputRunner
from ..engine.signals import AsyncCopy
from ..engine.state import ComputedForward
from ..engine.storage import RecentDict
from ..errors import ConfigError, HoldoverWarning, ProfileError
from ..grid import Grid
from ..models.inputs import iter_tensors
from ..policies.base import Scheduled
from ..predictors import Newton
from ..profiles import Profile
from ..profiles.profile import display_name
from ..stats import GenerationStats
from .config import NO_PROFILE, PlanConfig
from .error_model import DEPTH, Weights
from .estimate import OutputMonitor
from .generation import check_profile, describe_generation, generation_key, model_output, resolve_profile
from .planner import Plan, Planner, PlanProblem, mix_for_guidance, plan_problem
from .recorded import find_shares

_CACHED_KINDS = 32  # kinds of generation whose plans are kept
_SAME_MIX = 0.05  # of the largest share: rescaling a mix to the norm of a branch changes its shares by less
_OTHER_BRANCHES = "other branches run than were measured (another kind of guidance)"
_OTHER_MIX = "the branches are mixed with other weights than were measured (another guidance scale)"


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


@dataclass(frozen=True, eq=False)
class FirstMix:
    """What an expert's first step put out, what the scheduler got of it, and the shares that were measured.

    Both are on the host long before the generation ends, so that nothing waits for the device.
    `separate`: branches were measured separately, so that what the scheduler gets is a linear mix of them.
    """

    outputs: list[list[AsyncCopy]]  # of each branch
    mixed: AsyncCopy
    measured: tuple[float, ...]
    separate: bool

    def find_difference(self) -> str:
        """Why the mix is not the one that was measured; empty if it is, or if that cannot be told."""
        shares = find_shares([[one.wait() for one in branch] for branch in self.outputs], self.mixed.wait())
        if shares is None or (self.separate and not shares):
            return ""
        if shares and len(shares) != len(self.measured):
            return _OTHER_BRANCHES
        largest = max(map(abs, self.measured))
        same = bool(shares) and np.allclose(shares, self.measured, rtol=0, atol=_SAME_MIX * largest)
        return "" if same else _OTHER_MIX


@dataclass
class _GenerationState:
    """The running generation: its plan, and the branches seen."""

    problem: PlanProblem
    plan: Plan
    branches: set[str] = field(default_factory=set)
    branches_known: bool = False
    as_measured: bool = True  # the branches that run are those whose quality is known
    outputs: dict[str, list[AsyncCopy]] = field(default_factory=dict)  # by branch, at an expert's first step
    mixes: list[FirstMix] = field(default_factory=list)  # of each expert, compared when the generation ends

    def is_first_step(self, step: int) -> bool:
        """Whether an expert begins here."""
        return any(step == first for first, _ in self.problem.spec.ranges)


class PlanMethod(Method[PlanConfig]):
    """Holds the transformer's output: nothing inside it runs at a held step. Plans each kind of generation once."""

    name = "plan"
    needs_steps = True
    uses_profile = True  # False: plans are made without a profile, even if one ships for this model
    looks_back = False  # True: held steps are watched even where nothing is estimated from them

    def __init__(self, config: PlanConfig, memory: PlanMemory | None = None) -> None:
        super().__init__(config)
        self._memory = memory or PlanMemory()
        self._transformers: list[CachedTransformer] = []
        self._pipeline: Any = None
        self._profile: Profile | None = None
        self._planner = Planner(config, None)
        self._plans: RecentDict[PlanProblem, Plan] = RecentDict(_CACHED_KINDS)
        self._merged_plans: RecentDict[PlanProblem, Plan] = RecentDict(_CACHED_KINDS)
        self._state: _GenerationState | None = None
        self._stats: GenerationStats | None = None
        self.monitor: OutputMonitor | None = None  # of the generation that runs or ran last
        self.as_measured = True  # the branches of the last generation, and their mix
        self._warned = False

    @property
    def follows(self) -> bool:  # type: ignore[override]
        return self._profile is not None

    @property
    def least_steps(self) -> int:  # type: ignore[override]
        measured = self._profile is not None or self.config.schedule is not None
        return 0 if measured else Method.least_steps

    @property
    def planned(self) -> tuple[PlanProblem, Plan] | None:
        """The kind of generation that was planned last, and its plan."""
        return next(reversed(self._plans.items()), None)

    @property
    def generation_notes(self) -> tuple[str, ...]:
        return () if self._state is None else self._state.plan.notes

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return OutputRunner(transformer)

    def timestep_factor(self, step: int) -> float | None:
        return None if self._state is None else self._state.plan.timestep_factors.get(step)

    @property
    def observes(self) -> bool:  # type: ignore[override]
        return self._state is not None and (bool(self._state.problem.branches) or self._knows_mix(self._state))

    def observe(self, computed: ComputedForward) -> None:
        """Keep the outputs of the branches until the scheduler gets their mix."""
        if self._state is not None and self._state.is_first_step(computed.step):
            self._state.outputs[computed.branch] = [AsyncCopy(tensor) for tensor in iter_tensors(computed.output)]

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

    def on_start(self, stats: GenerationStats) -> None:
        self._state, self._stats, self.monitor, self.as_measured = None, stats, None, True

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Scheduled:
        state = self._current_state(grid)
        return Scheduled(frozenset(state.plan.computed))

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
        """After the first step: if the branches are not those that were measured, all of them get the same weights.

        Then nothing is promised, unless the guidance scale itself leaves one branch.
        """
        state.branches_known = True
        measured = set(state.problem.branches)
        count = len(state.branches) * self._transformers[0].groups.cfg_rank[1]
        if measured and (not state.branches <= measured or count != len(measured)):
            merged = state.problem.merged
            if merged not in self._merged_plans:
                weights = self._planner.weights(merged, state.plan.computed)
                factors = self._planner.timestep_factors(merged, state.plan.computed)
                self._merged_plans[merged] = replace(state.plan, weights=weights, timestep_factors=factors)
            state.problem, state.plan = merged, self._merged_plans[merged]
            state.as_measured = not all(self._mix(state.problem.spec.guidance))
        elif not measured and self._profile is not None and self._profile.facts.passes not in (0, count):
            state.as_measured = False
        if not state.as_measured:
            self._promise_nothing(state, _OTHER_BRANCHES)

    def _knows_mix(self, state: _GenerationState) -> bool:
        """Whether the mix of the first step is known, of branches that were not measured separately.

        Not at another guidance scale that the pipeline tells: what is promised there was found there.
        """
        if self._profile is None or not self._profile.facts.first_mix or self._profile.facts.branches:
            return False
        spec = state.problem.spec
        whole = spec.ranges[0][0] == 0 and self._transformers[0].groups.cfg_rank[1] == 1
        return whole and spec.guidance in (None, self._profile.facts.guidance)

    def _keep_mix(self, state: _GenerationState, stepped: SchedulerStep) -> None:
        """Keep what an expert's first step put out, to find out at the end how it was mixed."""
        outputs, state.outputs = state.outputs, {}
        names, measurements, profile = state.problem.branches, state.problem.measurements, self._profile
        if names and measurements is not None and set(outputs) == set(names):
            branches, measured = [outputs[name] for name in names], tuple(measurements.mix)
        elif profile is not None and not names and not state.mixes and self._knows_mix(state):
            branches, measured = list(outputs.values()), profile.facts.first_mix
        else:
            return
        mixed = AsyncCopy(model_output(stepped, state.problem.preconditioning))
        state.mixes.append(FirstMix(branches, mixed, measured, separate=bool(names)))

    def _promise_nothing(self, state: _GenerationState, reason: str) -> None:
        """Say that the quality of this generation is not known."""
        state.as_measured = False
        note = f"plan: {len(state.plan.computed)} of {state.problem.spec.length} steps computed; what they keep is "
        state.plan = replace(state.plan, notes=(f"{note}not known, because {reason}",))
        if self._stats is not None:
            self._stats.notes = state.plan.notes

    def _mix(self, guidance: float | None) -> tuple[float, ...]:
        """The mix of the measured branches at a guidance scale, empty without a profile."""
        if self._profile is None:
            return ()
        facts = self._profile.facts
        return mix_for_guidance(facts.mix, facts.guidance, guidance)

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        """Show the monitor what the scheduler got."""
        state = self._state
        if state is None or not isinstance(stepped.output, torch.Tensor):
            return
        if not state.branches_known:
            self._check_branches(state)
        if self.monitor is None:
            self._start_monitor(state)
        if state.outputs:
            self._keep_mix(state, stepped)
        computed = stepped.step in state.plan.computed
        if self.monitor is not None and (computed or self.monitor.looks_back):
            self.monitor.observe(stepped.step, model_output(stepped, state.problem.preconditioning), computed)

    def _start_monitor(self, state: _GenerationState) -> None:
        """Watch the outputs, if there are measurements to compare them with; look back where a use of it is known."""
        table = state.problem.output_table
        if table is not None and self._profile is not None:
            estimated = any(state.plan.digest == one.plan for one in self._profile.facts.estimates)
            self.monitor = OutputMonitor(table, state.plan.digest, self.looks_back or estimated)

    def on_end(self) -> None:
        state, self._state, monitor = self._state, None, self.monitor
        if state is None or monitor is None or self._profile is None:
            return
        monitor.close()
        facts = self._profile.facts
        for reason in (mix.find_difference() for mix in state.mixes if state.as_measured):
            if reason:
                self._promise_nothing(state, reason)
        self.as_measured = state.as_measured
        if self._stats is not None and state.as_measured:
            self._stats.estimate = partial(monitor.expected_quality, facts.estimates)
        measured = facts.surprise and state.problem.spec.length <= len(facts.noise)  # not on a finer grid
        factor = monitor.mismatch(facts.surprise[0]) if measured else None
        if factor is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"The outputs of this model are {factor:.0f} times less predictable than its profile says. "
                "If a LoRA or quantized weights were added since it was measured, or the scheduler is another one, "
                "calibrate again with them.",
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
