"""Better plans by trials on the model, with weights fitted along the path that the plan really takes.

`RealPathFit` runs a schedule on the model and fits the weights of each held step when it comes. At held step i the last
computed outputs of each branch are regressed on the output that puts the next latent where the uncached generation has
it,

    v_i - sum_{k<i} R[i+1,k] / R[i+1,i] (u_k - v_k),

with u the outputs of this run, v those of the uncached run, and R the scheduler response (error_model.py has the same
formula for simulated outputs). Held steps above the noise level `fitted_below` keep their simulated weights: in some
models the effect of an early error differs from image to image, and weights fitted to some images mislead others.

Plans are fitted on one half of the prompts and judged on the other. `VARIANTS` are the values of the planner's options
that trials choose between; no option is fixed because of one model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..engine.clock import SchedulerStep
from ..engine.install import CachedTransformer
from ..engine.method import Method
from ..engine.state import ComputedForward
from ..errors import ConfigError
from ..grid import Grid
from ..metrics import PSNR_CAP
from ..models.inputs import iter_tensors
from ..profiles import MeasuredPlan, PlannerOptions, Profile
from .calls import GENERATIONS, Batch, Caller, Prompt, built_in_prompts, installed_engine, make_batches
from .config import PlanConfig, steps_for
from .error_model import Array, Weights, held_steps, solve_ridge
from .generation import Preconditioning, model_output
from .method import PlanMethod, PlanPredictor
from .planner import PlanProblem, plan_problem, search_profile
from .recording import OutputRecorder, TrajectoryRecord
from .search import neighbors
from .tune import Trials

MAX_TRIALS = 60
VARIANTS: dict[str, tuple[Any, ...]] = {  # by option, in the order in which they are tried
    "fitted_below": (0.5, 1.0),
    "corrected_share": (0.7, 0.85, 1.0),
    "growth_percentile": (None, 50.0, 75.0, 90.0),
    "longest_gap": (8, 12, 16),
    "last_gap_factor": (1.0, 3.0, 6.0),
    "first_steps": (1, 2, 3),
    "depth": (3, 4, 6),
    "branch_tie": (1e-3, 1e-2, None),
}
Candidate = tuple[tuple[int, ...], PlannerOptions]  # computed steps, and the options that weights are fitted with
Sums = dict[int, tuple[Array, Array]]  # normal matrix and right side by held step, over batches


def polish(
    pipe: Any,
    profile: Profile,
    budget: int,
    prompts: Sequence[Prompt] | None = None,
    *,
    trials: int = MAX_TRIALS,
    seed: int = 0,
    batch_size: int = 1,
    progress: bool = True,
    **call: Any,
) -> Profile:
    """The profile with a plan for `budget` computed steps that was improved by trials on the model.

    It is `improve` for one budget, with at most `trials` trials; the planner's options for other budgets stay as they
    are. If no plan is better than the profile's own, the profile is unchanged.
    """
    improved = improve(
        pipe, profile, [budget], prompts, True, trials, seed=seed, batch_size=batch_size, progress=progress, **call
    )
    return improved.with_facts(options=profile.facts.options, effort=profile.facts.effort)


def improve(
    pipe: Any,
    profile: Profile,
    budgets: Sequence[int | str],
    prompts: Sequence[Prompt] | None = None,
    moves: bool = False,
    trials: int | None = None,
    *,
    seed: int = 0,
    batch_size: int = 1,
    progress: bool = True,
    **call: Any,
) -> Profile:
    """The profile with better planner options, and with a plan for each budget, by trials on the model.

    Weights are fitted on the first half of the prompts. Every plan is judged by the mean PSNR and the mean of the worst
    tenth on the second half. Each planner option is varied in turn; the value with the best mean over all budgets is
    kept. With `moves`, single steps of each budget's best schedule are then moved. `trials` limits the plans tried.
    """
    chosen = list(built_in_prompts(pipe)[:GENERATIONS] if prompts is None else prompts)
    facts, frontier = profile.facts, search_profile(profile).frontier
    least, most = min(frontier), max(frontier)
    wanted = (b if isinstance(b, int) else max(least, steps_for(b, len(facts.noise))) for b in budgets)
    counts = list(dict.fromkeys(wanted))
    for count in counts:
        if count not in frontier:
            raise ConfigError(f"A budget for this profile is {least} to {most} computed steps, not {count}.")
    if len(chosen) < 2:
        raise ConfigError("Trials need two prompts at least: one half is fitted to, the other judges.")
    caller, half = Caller.like(profile, pipe, call), len(chosen) // 2
    with tqdm(
        total=trials or most_trials(len(counts), moves), disable=not progress, desc="trials", unit="trial"
    ) as bar:
        fitter = WeightFitter(caller, profile, make_batches(chosen[:half], batch_size, seed))
        judge = Trials(caller, chosen[half:], seed + half, batch_size)
        judge.generate_references()
        search = _TrialSearch(profile, type(pipe.scheduler).__name__, fitter, judge, bar)
        options, improved = search.choose_options(counts), profile
        for count in counts:
            score, best = search.best_plan(count, options, moves)
            own = next(
                (p.computed for p in facts.schedules if _same_budget(p, count, profile)), frontier[count].computed
            )
            if score > _score(judge.run(profile, "psnr", own)[0]):
                improved = _with_schedule(improved, best)
    return improved.with_facts(options=options)


def most_trials(budgets: int, moves: bool) -> int:
    """The number of plans that are tried at most."""
    return budgets * (1 + sum(len(values) - 1 for values in VARIANTS.values()) + (MAX_TRIALS if moves else 0))


class WeightFitter:
    """Fits the weights of schedules on some batches of prompts, which are first generated uncached."""

    def __init__(self, caller: Caller, profile: Profile, batches: Sequence[Batch]) -> None:
        self._caller, self._profile, self._batches = caller, profile, batches
        preconditioning = Preconditioning.of(profile.facts, np.array(profile.facts.noise))
        self._outputs: list[list[torch.Tensor]] = []
        for batch in batches:
            uncached = TrajectoryRecord("device", ["outputs"], preconditioning)
            self._run(OutputRecorder(uncached), batch)
            uncached.latents.clear()
            self._outputs.append(uncached.outputs)

    def fit(self, computed: tuple[int, ...], options: PlannerOptions) -> tuple[float, ...]:
        """The weights of all held steps, in order.

        Batches run one after the other. Each follows the weights fitted to it and the batches before it.
        """
        sums: Sums = {}
        weights: dict[int, Weights] = {}
        for batch, outputs in zip(self._batches, self._outputs, strict=True):
            fit = RealPathFit(self._profile, computed, outputs, options, sums)
            self._run(fit, batch)
            weights = fit.weights
        return tuple(value for _, held in sorted(weights.items()) for value in held.values)

    def _run(self, method: Method[Any], batch: Batch) -> None:
        with installed_engine(self._caller.pipe, method):
            self._caller(*batch)


class RealPathFit(PlanMethod):
    """Runs a schedule and fits the weights of each held step when it comes; `sums` has those of earlier batches."""

    follows = True
    observes = True
    uses_profile = False  # weights of early steps come from the measured profile, all others are fitted here

    def __init__(
        self,
        profile: Profile,
        computed: tuple[int, ...],
        uncached: Sequence[torch.Tensor],
        options: PlannerOptions,
        sums: Sums,
    ) -> None:
        super().__init__(PlanConfig(schedule=computed, guard=False))
        facts = profile.facts
        self._measured_profile, self._computed, self._uncached = profile, computed, uncached
        separate = bool(facts.branches) and options.branch_tie is not None
        self._mix = dict(zip(facts.branches, facts.mix, strict=True)) if separate else {}
        self._options, self._sums = options, sums
        self._problem: PlanProblem | None = None
        self._branch_outputs: dict[tuple[str, int], torch.Tensor] = {}
        self._outputs: list[torch.Tensor] = []
        self.weights: dict[int, Weights] = {}

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> PlanPredictor:
        spec = self._current_state(grid).problem.spec
        if self._problem is None:
            self._problem = problem = replace(plan_problem(spec, self._measured_profile), options=self._options)
            search = problem.search if self._mix else problem.merged.search
            assert search is not None
            below, simulated = self._options.fitted_below, search.model.fit_weights(self._computed)
            self.weights = {step: weights for step, weights in simulated.items() if spec.noise[step] > below}
        return PlanPredictor(self._weights_of, list(self._mix).index(branch) if self._mix else 0, spec.newton)

    def observe(self, computed: ComputedForward) -> None:
        if self._mix:
            output = next(iter_tensors(computed.output)).detach().float().clone()
            self._branch_outputs[computed.branch, computed.step] = output

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        assert self._problem is not None
        self._outputs.append(model_output(stepped, self._problem.preconditioning).detach().float().clone())

    def _weights_of(self, step: int) -> Weights:
        """The weights of a held step, which are fitted when they are first needed."""
        if step in self.weights:
            return self.weights[step]
        assert self._problem is not None
        anchors = held_steps(self._computed, self._problem.spec.ranges)[step][-self._options.depth :]
        row, target = self._problem.response[step + 1], self._uncached[step].clone()
        for earlier in range(step if abs(row[step]) > 1e-12 else 0):
            share = self._options.corrected_share if earlier < anchors[-1] else 1.0  # an error that the model has seen
            error = self._outputs[earlier] - self._uncached[earlier]
            target.sub_(error, alpha=share * float(row[earlier] / row[step]))
        outputs = [self._outputs[a] for a in anchors]
        if self._mix:
            outputs = [share * self._branch_outputs[branch, a] for branch, share in self._mix.items() for a in anchors]
        features = torch.stack([output.flatten() for output in outputs]).double()
        normal = (features @ features.T).cpu().numpy()
        known = (features @ target.flatten().double()).cpu().numpy()
        if step in self._sums:
            normal, known = normal + self._sums[step][0], known + self._sums[step][1]
        self._sums[step] = normal, known
        values = solve_ridge(normal, known, max(1, len(self._mix)), self._options.branch_tie or 0.0)
        self.weights[step] = Weights(anchors, tuple(map(float, values)))
        return self.weights[step]


class _TrialSearch:
    """Tries plans on the model, each once, while trials are left; at least one is tried for each budget."""

    def __init__(self, profile: Profile, scheduler: str, fitter: WeightFitter, judge: Trials, bar: Any) -> None:
        self._profile, self._scheduler, self._fitter, self._judge, self._bar = profile, scheduler, fitter, judge, bar
        self._tried: dict[Candidate, tuple[float, MeasuredPlan]] = {}

    def choose_options(self, counts: Sequence[int]) -> PlannerOptions:
        """Vary one option after the other; keep the value with the best mean score over all budgets."""
        best = self._profile.facts.options
        for name, values in VARIANTS.items():
            if name == "branch_tie" and not self._profile.facts.branches:
                continue
            scores = {}
            for options in dict.fromkeys([best, *(replace(best, **{name: value}) for value in values)]):
                candidates = [self._candidate(count, options) for count in counts]
                if self._can_try(candidates):
                    scores[options] = fmean(map(self._score, candidates))
            best = max(scores, key=scores.__getitem__, default=best)
        return best

    def best_plan(self, count: int, options: PlannerOptions, moves: bool) -> tuple[float, MeasuredPlan]:
        """The best plan that was tried for a budget and its score; with `moves`, single steps are moved first."""
        facts, order = self._profile.facts, random.Random(0)
        self._score(self._candidate(count, options))
        while True:
            best = max((c for c in self._tried if len(c[0]) == count), key=self._score)
            moved = [(other, best[1]) for other in neighbors(best[0], len(facts.noise), facts.starts)] if moves else []
            order.shuffle(moved)
            better = (m for m in moved if self._can_try([m]) and self._score(m) > self._score(best))
            if next(better, None) is None:
                return self._tried[best]

    def _candidate(self, count: int, options: PlannerOptions) -> Candidate:
        """The plan that the planner makes with these options; options that only matter for the schedule are reset."""
        frontier = search_profile(self._profile.with_facts(options=options)).frontier
        fitted = ("corrected_share", "depth", "branch_tie", "fitted_below")
        computed = frontier[count].computed
        return computed, PlannerOptions(**{name: getattr(options, name) for name in fitted})

    def _can_try(self, candidates: Sequence[Candidate]) -> bool:
        new = len(set(candidates) - self._tried.keys())
        return len(self._tried) + new <= self._bar.total or (new > 0 and not self._tried)

    def _score(self, candidate: Candidate) -> float:
        if candidate not in self._tried:
            (computed, options), facts = candidate, self._profile.facts
            branches = () if options.branch_tie is None else facts.branches
            origin, weights = (facts.noise, self._scheduler, computed), self._fitter.fit(computed, options)
            plan = MeasuredPlan(*origin, weights, "polished", 0.0, branches, facts.guidance, options.depth)
            values, _ = self._judge.run(_with_schedule(self._profile, plan), "psnr", computed)
            self._tried[candidate] = _score(values), replace(plan, psnr=min(fmean(values), PSNR_CAP))
            self._bar.update()
        return self._tried[candidate][0]


def _same_budget(plan: MeasuredPlan, count: int, profile: Profile) -> bool:
    return (len(plan.computed), plan.noise) == (count, profile.facts.noise)


def _with_schedule(profile: Profile, plan: MeasuredPlan) -> Profile:
    """The profile with one more plan, in place of an older one of the same budget."""
    known = profile.facts.schedules
    others = [other for other in known if not _same_budget(other, len(plan.computed), profile)]
    return profile.with_facts(schedules=(*others, plan))


def _score(values: Sequence[float]) -> float:
    """Half the mean plus half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
