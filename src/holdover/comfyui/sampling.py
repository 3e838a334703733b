"""One generation in ComfyUI: which evaluation of the model this is, and whether each branch is computed or held.

`predict_noise` is one evaluation of the model by the sampler: it tells the step. `diffusion_model` is one forward, of
one or more conditionings in one batch: each row of the batch is a branch, known by the id that ComfyUI gives its
conditioning. Nothing is imported from ComfyUI.

A sampler may evaluate the model several times per noise level (Heun), so a *step* is one evaluation. Which evaluations
there are, and how much of each output is in each latent, is found before the first one (evaluations.py).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ..engine.clock import SchedulerStep
from ..engine.method import BLOCK_PASSES, NoneConfig
from ..engine.parallel import SINGLE_PROCESS
from ..engine.state import HOLD, BranchState, ComputedForward, elapsed_seconds, mark_time
from ..engine.storage import HeldTensors, map_output
from ..errors import ConfigError
from ..grid import Grid
from ..magcache.backend import make_policy
from ..magcache.config import MagCacheConfig
from ..methods.easy_cache import EasyCacheConfig, EasyCacheMethod, HeldForward, add_difference
from ..methods.spectrum import SpectrumConfig, SpectrumOutputMethod
from ..models.inputs import iter_tensors, unwrap_module
from ..plan.config import PlanConfig
from ..plan.error_model import Weights
from ..plan.generation import GenerationSpec, check_profile
from ..plan.method import PlanPredictor
from ..plan.planner import Plan, Planner, PlanProblem, plan_problem
from ..plan.recording import TrajectoryRecord
from ..policies.base import AlwaysCompute, Decision, Policy, Scheduled
from ..predictors import Predictor
from ..profiles import Profile
from ..stats import GenerationStats, StepRecord
from .evaluations import SAME_LEVEL, Evaluations

if TYPE_CHECKING:
    from .model_cache import Settings

KEY = "holdover"
OUTSIDE = Decision(True, "before start_percent or after end_percent")
NOT_LISTED = Decision(True, "the sampler evaluates a noise level that is not in its schedule")


@dataclass
class Branch:
    """One conditioning in one generation: its name, its state and the kind of input that was held for."""

    name: str
    state: BranchState
    input_kind: Hashable = None


@dataclass(frozen=True)
class _Forward:
    """One forward: when it began, its conditionings, their parts of the input, and what was decided for each."""

    begin: Any
    branches: list[Branch]
    parts: list[Any]
    decisions: list[Decision]


@dataclass
class Sampling:
    """One generation: which steps there are, what is held of each branch, and what was decided."""

    settings: Settings
    guider: Any
    sampler: Any
    sigmas: torch.Tensor
    record: TrajectoryRecord | None = None
    magnitudes: Callable[[ComputedForward], None] | None = None
    stats: GenerationStats = field(init=False)
    notes: list[str] = field(default_factory=list)
    evaluations: Evaluations | None = None
    spec: GenerationSpec | None = None
    grid: Grid | None = None
    plan: Plan | None = None
    branches: dict[Hashable, Branch] = field(default_factory=dict)
    step: int | None = None
    skipped: int = 0  # forwards of the model that did not run

    def __post_init__(self) -> None:
        config = self.settings.config
        self.stats = GenerationStats(config.method, config.as_dict())
        self._last, self._calls = -1, Counter[Hashable]()
        self._problem: PlanProblem | None = None
        self._weights: dict[int, Weights] | None = None
        self._pending: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def predict_noise(self, executor: Any, x: torch.Tensor, timestep: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """One evaluation of the model by the sampler."""
        if self._last < 0 and not self.notes:
            self._start()
        self._calls.clear()
        self.step = None
        if self.evaluations is not None:
            self.step = self.evaluations.locate(float(timestep.flatten()[0]), self._last)
            self._last = self._last if self.step is None else self.step
        denoised = executor(x, timestep, *args, **kwargs)
        if self.record is not None and self.step is not None:
            self._record_until(x)
            sampling, one = self.guider.inner_model.model_sampling, torch.ones_like(x)
            carry = sampling.calculate_denoised(timestep, torch.zeros_like(x), one)
            scale = sampling.calculate_denoised(timestep, one, torch.zeros_like(x))
            self._pending = (self.step, x, (denoised - carry * x) / scale)
        return denoised

    def finish_record(self, latent: torch.Tensor) -> None:
        """Record the final latent."""
        if self.record is not None:
            self._record_until(latent)
            self.record.finish()

    def _record_until(self, latent: torch.Tensor) -> None:
        """Record the last evaluation, whose result is known now."""
        if self.record is not None and self._pending is not None:
            step, sample, output = self._pending
            self.record.add_step(SchedulerStep(step, sample, output, (latent,)))
            self._pending = None

    def _start(self) -> None:
        """Before the first evaluation: list the evaluations and make the plan, or note why nothing can be held."""
        settings, config = self.settings, self.settings.config
        if "context_handler" in self.guider.model_options:
            self.notes.append("nothing is held: context windows give the model another part of the video each time")
            return
        try:
            found = Evaluations.of(self.guider, self.sampler, self.sigmas)
        except ConfigError as error:
            self.notes.append(f"nothing is held: {error}")
            return
        if found.adds_noise and isinstance(config, MagCacheConfig):
            self.notes.append(
                f"nothing is held: the sampler {found.sampler} adds noise at each step, and mag_cache would take what "
                "the noise adds to the model's input for a change of its output. Use easy_cache, spectrum or plan"
            )
            return
        sampling = self.guider.inner_model.model_sampling
        is_flow = float(sampling.sigma_max) <= 1.0 + SAME_LEVEL
        if not is_flow and isinstance(config, EasyCacheConfig):
            self.notes.append(
                "nothing is held: easy_cache holds what a flow model adds to its input, and this model predicts the "
                "noise in an input that ComfyUI scales. Use spectrum or plan"
            )
            return
        if found.adds_noise and isinstance(config, (PlanConfig, SpectrumConfig)):
            self.notes.append(f"the sampler {found.sampler} adds noise at each step, which held steps do not know of")
        start, end = (float(sampling.percent_to_sigma(p)) for p in (settings.start_percent, settings.end_percent))
        lowest, highest = end * (1.0 - SAME_LEVEL), start * (1.0 + SAME_LEVEL)
        inside = [i for i, sigma in enumerate(found.sigmas) if lowest <= sigma <= highest]
        if not inside:
            self.notes.append("nothing is held: no step lies between start_percent and end_percent")
            return
        noise = tuple(sigma if is_flow else sigma / (1.0 + sigma) for sigma in found.sigmas)
        self.evaluations, self.grid = found, Grid(len(noise), noise, inside[0], inside[-1])
        self.stats.steps = len(noise)
        guidance = getattr(self.guider, "cfg", None)
        guidance = float(guidance) if isinstance(guidance, (int, float)) else None
        ranges = ((inside[0], inside[-1]),)
        self.spec = GenerationSpec(np.array(noise), ranges, found.response, found.sampler, guidance)
        if settings.profile is not None:
            self._check_weights(settings.profile)
        if isinstance(config, PlanConfig):
            self._problem = plan_problem(self.spec, settings.profile)
            self.plan = Planner(config, settings.profile).plan(self._problem)
            self.notes += self.plan.notes

    def _check_weights(self, profile: Profile) -> None:
        """Note whether the profile is of other weights."""
        model, patcher = self.guider.inner_model, getattr(self.guider, "model_patcher", None)
        if getattr(model, "model_lowvram", False) and getattr(patcher, "patches", None):
            self.notes.append("in low-VRAM mode it is not known whether the profile was measured with these LoRAs")
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_profile(profile, KEY, unwrap_module(model.diffusion_model))
        self.notes += [str(warning.message) for warning in caught]

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def diffusion_model(self, executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """One forward of the model: compute it, unless every row of its batch is held."""
        asked = self._ask(x, (*args, *kwargs.values()))
        if asked is None:
            return executor(x, *args, **kwargs)
        computes = any(decision.compute for decision in asked.decisions)
        return self._answer(asked, executor(x, *args, **kwargs) if computes else None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ask(self, x: Any, arguments: Sequence[Any]) -> _Forward | None:
        """What is decided for each conditioning of a forward; None if it runs as it would without a cache."""
        begin = mark_time(next(iter_tensors([x])).device)
        options: Mapping[str, Any] | None = next((v for v in arguments if isinstance(v, dict) and "uuids" in v), None)
        if options is None:
            if not self.notes:
                self.notes.append("nothing is held: the model is not told which conditioning it runs")
            return None
        ids, kinds = options["uuids"], options["cond_or_uncond"]
        if len(ids) != len(kinds) or any(len(tensor) % len(ids) for tensor in iter_tensors([x])):
            if self.evaluations is not None:
                self.notes.append("nothing is held: another node runs the conditionings of a batch one by one")
                self.evaluations = None
            return None
        if self.evaluations is None:
            return None
        branches = [self._branch(*each) for each in zip(ids, kinds, strict=True)]
        parts = _split(x, len(branches))
        decisions = [self._decide(branch, part) for branch, part in zip(branches, parts, strict=True)]
        return _Forward(begin, branches, parts, decisions)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _answer(self, asked: _Forward, output: Any) -> Any:
        """The output of a forward, with the held rows predicted; `output` is None if it did not run."""
        branches, decisions = asked.branches, asked.decisions
        rows = [None] * len(branches) if output is None else _split(output, len(branches))
        self.skipped += output is None
        for number, (branch, part, decision) in enumerate(zip(branches, asked.parts, decisions, strict=True)):
            if decision.compute:
                self._keep(branch, part, rows[number], decision)
            else:
                rows[number] = self._predict(branch.state, part)
        begin, end, share = asked.begin, mark_time(next(iter_tensors([asked.parts])).device), 1.0 / len(branches)
        for branch, decision in zip(branches, decisions, strict=True):
            step = -1 if self.step is None else self.step
            made = (KEY, branch.name, step, decision.compute, decision.reason)
            self.stats.forwards.append(StepRecord(*made, lambda: share * elapsed_seconds(begin, end)))
        nbytes = sum(branch.state.nbytes for branch in self.branches.values())
        self.stats.peak_bytes = max(self.stats.peak_bytes, nbytes)
        return output if all(decision.compute for decision in decisions) else _join(rows)

    def _branch(self, uuid: Hashable, kind: int) -> Branch:
        """The branch of a conditioning; one that runs twice in an evaluation is two branches."""
        self._calls[uuid] += 1
        key = (uuid, self._calls[uuid])
        if key not in self.branches:
            name, used = self._conditioning(uuid, kind), {branch.name for branch in self.branches.values()}
            names = (name, *(f"{name} {number}" for number in range(2, len(used) + 3)))
            name = next(free for free in names if free not in used)
            policy, predictor = self._make_rule(name)
            self.branches[key] = Branch(name, BranchState(policy, policy.start(), BLOCK_PASSES, predictor))
        return self.branches[key]

    def _conditioning(self, uuid: Hashable, kind: int) -> str:
        """The guider's name of a conditioning; `positive` and `negative` alone are cond and uncond."""
        named: Mapping[str, Any] = getattr(self.guider, "conds", {})
        found = next((name for name, conds in named.items() if any(c.get("uuid") == uuid for c in conds)), None)
        if found is None or set(named) <= {"positive", "negative"}:
            return "uncond" if kind == 1 else "cond"
        return found

    def _make_rule(self, branch: str) -> tuple[Policy, Predictor]:
        """The policy and the predictor of the method for one branch."""
        config, grid, nothing = self.settings.config, self.grid, cast(Any, None)  # these read no transformer
        assert grid is not None
        if self.plan is not None and self.spec is not None and self._problem is not None:
            separate = self._problem.branches
            index = separate.index(branch) if branch in separate else 0
            rule = PlanPredictor(self._planned_weights, index, self.spec.newton)
            return Scheduled(frozenset(self.plan.computed)), rule
        if isinstance(config, SpectrumConfig):
            method = SpectrumOutputMethod(config)
            return method.policy(nothing, branch, grid), method.predictor(nothing, branch, grid)
        if isinstance(config, EasyCacheConfig):
            return EasyCacheMethod(config).policy(nothing, branch, grid), HOLD
        if isinstance(config, MagCacheConfig) and self.settings.profile is not None:
            return make_policy(config, dict(self.settings.profile.facts.mag_cache)[KEY], branch, grid), HOLD
        return AlwaysCompute(), HOLD

    def _planned_weights(self, step: int) -> Weights | None:
        """The weights of a held step; if the branches are not those that were measured, all get the same weights."""
        assert self.plan is not None
        assert self._problem is not None
        if self._weights is None:
            measured, running = self._problem.branches, {branch.name for branch in self.branches.values()}
            self._weights = dict(self.plan.weights)
            if measured and running != set(measured):
                assert isinstance(self.settings.config, PlanConfig)
                planner = Planner(self.settings.config, self.settings.profile)
                self._weights = planner.weights(self._problem.merged, self.plan.computed)
        return self._weights.get(step)

    def _decide(self, branch: Branch, part: Any) -> Decision:
        """Ask the policy; what was held for another shape, dtype or device is dropped first."""
        state, tensors = branch.state, list(iter_tensors([part]))
        kind = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        if kind != branch.input_kind:
            state.forget()
            branch.input_kind = kind
        if self.step is None:
            return NOT_LISTED
        assert self.grid is not None
        if not self.grid.first <= self.step <= self.grid.last:
            return OUTSIDE
        change = None
        if isinstance(self.settings.config, EasyCacheConfig):
            value = torch.cat([tensor.flatten() for tensor in tensors])  # a copy
            state.signal = EasyCacheMethod(self.settings.config).read_signal(value, state, SINGLE_PROCESS)
            change = state.signal.change()
        return state.policy.decide(self.step, change, state.policy_state)

    def _keep(self, branch: Branch, part: Any, row: Any, decision: Decision) -> None:
        """Hold a computed row, and record it where this is measured."""
        if self.step is None or decision is OUTSIDE or self.grid is None:
            return
        state, held = branch.state, HeldForward.copy_of(row)
        if isinstance(self.settings.config, (EasyCacheConfig, MagCacheConfig)):
            held.entered = tuple(tensor.clone() for tensor in iter_tensors([part]))
        if isinstance(self.settings.config, EasyCacheConfig) and state.held:
            held.measure(cast(HeldForward, state.held[-1]))
        if not isinstance(self.settings.config, NoneConfig):
            state.store(self.step, held)
        if self.record is not None or self.magnitudes is not None:
            pairs = zip(iter_tensors([row]), iter_tensors([part]), strict=False)
            added = tuple((after - before).movedim(1, -1) for after, before in pairs if after.shape == before.shape)
            named = cast(Any, _NamedModel(type(unwrap_module(self.guider.inner_model.diffusion_model)).__name__))
            computed = ComputedForward(named, branch.name, self.step, self.grid, None, added, row)
            if self.record is not None:
                self.record.add_forward(computed)
            if self.magnitudes is not None and added:
                self.magnitudes(computed)

    def _predict(self, state: BranchState, part: Any) -> Any:
        """The output of a held row."""
        assert self.step is not None
        predicted: HeldTensors = state.predict(self.step)
        assert isinstance(predicted, HeldForward)
        if not predicted.entered:
            return predicted.build_output()
        moved: list[torch.Tensor | None] = list(predicted.tensors)
        for number, (output, entered, latent) in enumerate(
            zip(predicted.tensors, predicted.entered, iter_tensors([part]), strict=False)
        ):
            if output is not None and output.ndim == latent.ndim:
                moved[number] = add_difference(output, entered, latent)
        return predicted.copy_with(moved).build_output()

    def close(self) -> None:
        """Free everything that is held."""
        self.branches.clear()
        self._pending = None

    def __str__(self) -> str:
        """The statistics, with the reason if nothing was held."""
        if not self.stats.forwards:
            missing = "nothing is held: this model does not call ComfyUI's diffusion_model wrappers"
            return "holdover: " + "; ".join(self.notes or [missing])
        lines = [str(self.stats), *(f"  {note}" for note in self.notes)]
        if not self.stats.held_total and not any(note.startswith("nothing is held") for note in self.notes):
            reasons = Counter(forward.reason for forward in self.stats.forwards)
            why = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
            lines.append(f"  nothing was held: {why}")
        elif self.stats.held_total:
            lines.append(f"  {self.skipped} forwards of the model did not run")
        return "\n".join(["holdover: " + lines[0], *lines[1:]])


@dataclass(frozen=True)
class _NamedModel:
    """What a measurement needs to know of the model."""

    class_name: str
    name: str = KEY


def _split(value: Any, rows: int) -> list[Any]:
    """A model's input or output by conditioning."""

    def take(row: int) -> Any:
        return map_output(value, lambda tensor: tensor.chunk(rows)[row])

    return [value] if rows == 1 else [take(row) for row in range(rows)]


def _join(rows: Sequence[Any]) -> Any:
    """The rows of a batch as one output."""
    if len(rows) == 1:
        return rows[0]
    columns = iter([torch.cat(column) for column in zip(*(list(iter_tensors([row])) for row in rows), strict=True)])
    return map_output(rows[0], lambda _: next(columns))
