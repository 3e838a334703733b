"""`polish`: better plans by trial, with weights fitted along the path that the plan really takes.

`RealPathFit` runs a schedule on the model and fits the weights of each held step when it comes. At held step i the last
computed outputs of each branch are regressed on the output that puts the next latent where the uncached generation has
it,

    v_i - sum_{k<i} R[i+1,k] / R[i+1,i] (u_k - v_k),

with u the outputs of this run, v those of the uncached run, and R the scheduler response (error_model.py has the same
formula for simulated outputs). Early held steps keep their simulated weights: the effect of an early error differs
from image to image, and weights fitted to some images mislead others.

`polish` fits on one half of the prompts and judges on the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
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
from ..profiles import MeasuredPlan, Profile
from .calls import GENERATIONS, Batch, Caller, Prompt, built_in_prompts, installed_engine, make_batches
from .config import PlanConfig
from .error_model import BRANCH_TIE, DEPTH, Weights, held_steps, solve_ridge
from .generation import Preconditioning, model_output
from .method import PlanMethod, PlanPredictor
from .planner import PlanProblem, plan_problem, search_profile
from .recording import OutputRecorder, TrajectoryRecord
from .search import neighbors
from .tune import Trials

MAX_TRIALS = 60
FITTED_BELOW = 0.5  # noise level; held steps above it keep their simulated weights
TIES = (BRANCH_TIE, 10 * BRANCH_TIE, None)  # penalties on differences between branches; None: the same weights for all
Option = tuple[tuple[int, ...], float | None]  # computed steps and tie of a plan that may be tried


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

    Weights are fitted on a batch of `batch_size` images of the first half of the prompts. First the planner's other
    schedules are tried, then single steps of the best one are moved. Every plan is judged by the mean PSNR and the mean
    of the worst tenth on the second half. If none is better than the profile's own, the profile is unchanged.
    """
    chosen = list(built_in_prompts(pipe)[:GENERATIONS] if prompts is None else prompts)
    search, facts = search_profile(profile), profile.facts
    if budget not in search.frontier:
        least, most = min(search.frontier), max(search.frontier)
        raise ConfigError(f"A budget for this profile is {least} to {most} computed steps, not {budget}.")
    if len(chosen) < 2:
        raise ConfigError("Polishing needs two prompts at least: one half is fitted to, the other judges.")
    polished = [s.computed for s in facts.schedules if (len(s.computed), s.noise) == (budget, facts.noise)]
    starts = polished[:1] + search.alternatives(budget)
    caller, half = Caller.like(profile, pipe, call), len(chosen) // 2
    batch = make_batches(chosen[:half], batch_size, seed)[0]
    with tqdm(total=trials, disable=not progress, desc="polishing", unit="trial") as bar:
        fitter = WeightFitter(caller, profile, batch)
        judge = Trials(caller, chosen[half:], seed + half, batch_size)
        judge.generate_references()
        score, best = _LocalSearch(profile, type(pipe.scheduler).__name__, fitter, judge, bar).run(starts)
        own_score = _score(judge.run(profile, "psnr", starts[0])[0])
    return _with_schedule(profile, best) if score > own_score else profile


class WeightFitter:
    """Fits the weights of schedules on one batch of prompts, which is first generated uncached."""

    def __init__(self, caller: Caller, profile: Profile, batch: Batch) -> None:
        self._caller, self._profile, self._batch = caller, profile, batch
        preconditioning = Preconditioning.of(profile.facts, np.array(profile.facts.noise))
        uncached = TrajectoryRecord("device", ["outputs"], preconditioning)
        self._run(OutputRecorder(uncached))
        uncached.latents.clear()
        self._outputs = uncached.outputs

    def fit(self, computed: tuple[int, ...], tie: float | None) -> tuple[float, ...]:
        """The weights of all held steps, in order; branches have their own unless `tie` is None."""
        fit = RealPathFit(self._profile, computed, self._outputs, tie)
        self._run(fit)
        return tuple(value for _, weights in sorted(fit.weights.items()) for value in weights.values)

    def _run(self, method: Method[Any]) -> None:
        with installed_engine(self._caller.pipe, method):
            self._caller(*self._batch)


class RealPathFit(PlanMethod):
    """Runs a schedule and fits the weights of each held step when it comes; for each branch unless `tie` is None."""

    follows = True
    observes = True
    uses_profile = False  # weights of early steps come from the measured profile, all others are fitted here

    def __init__(
        self, profile: Profile, computed: tuple[int, ...], uncached: Sequence[torch.Tensor], tie: float | None
    ) -> None:
        super().__init__(PlanConfig(schedule=computed, guard=False))
        facts = profile.facts
        self._measured_profile, self._computed, self._uncached = profile, computed, uncached
        self._mix = {} if tie is None else dict(zip(facts.branches, facts.mix, strict=True))
        self._tie = tie or 0.0
        self._problem: PlanProblem | None = None
        self._branch_outputs: dict[tuple[str, int], torch.Tensor] = {}
        self._outputs: list[torch.Tensor] = []
        self.weights: dict[int, Weights] = {}

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> PlanPredictor:
        spec = self._current_state(grid).problem.spec
        if self._problem is None:
            self._problem = problem = plan_problem(spec, self._measured_profile)
            search = problem.search if self._mix else problem.merged.search
            assert search is not None
            simulated = search.model.fit_weights(self._computed)
            self.weights = {step: weights for step, weights in simulated.items() if spec.noise[step] > FITTED_BELOW}
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
        anchors = held_steps(self._computed, self._problem.spec.ranges)[step][-DEPTH:]
        row, target = self._problem.response[step + 1], self._uncached[step].clone()
        for earlier in range(step if abs(row[step]) > 1e-12 else 0):
            error = self._outputs[earlier] - self._uncached[earlier]
            target.sub_(error, alpha=float(row[earlier] / row[step]))
        outputs = [self._outputs[a] for a in anchors]
        if self._mix:
            outputs = [share * self._branch_outputs[branch, a] for branch, share in self._mix.items() for a in anchors]
        features = torch.stack([output.flatten() for output in outputs]).double()
        normal = (features @ features.T).cpu().numpy()
        known = (features @ target.flatten().double()).cpu().numpy()
        values = solve_ridge(normal, known, max(1, len(self._mix)), self._tie)
        self.weights[step] = Weights(anchors, tuple(map(float, values)))
        return self.weights[step]


class _LocalSearch:
    """Tries plans on the model, each once: first where to start, then the tie, then moving one step at a time."""

    def __init__(self, profile: Profile, scheduler: str, fitter: WeightFitter, judge: Trials, bar: Any) -> None:
        self._profile, self._scheduler, self._fitter, self._judge, self._bar = profile, scheduler, fitter, judge, bar
        self._tried: dict[Option, tuple[float, MeasuredPlan]] = {}

    def run(self, starts: Sequence[tuple[int, ...]]) -> tuple[float, MeasuredPlan]:
        """The best plan found and its score."""
        facts, order = self._profile.facts, random.Random(0)
        ties = TIES if facts.branches else (None,)
        start = max(self._allowed((start, ties[0]) for start in starts), key=self._score)
        best: Option = max(self._allowed((start[0], tie) for tie in ties), key=self._score)
        better: Option | None = best
        while better is not None:
            best, (computed, tie) = better, better
            moved = [(other, tie) for other in neighbors(computed, len(facts.noise), facts.starts)]
            order.shuffle(moved)
            better = next((m for m in self._allowed(moved) if self._score(m) > self._score(best)), None)
        return self._tried[best]

    def _allowed(self, options: Iterable[Option]) -> Iterator[Option]:
        """The options that were tried already, and others while trials are left; at least one is tried."""
        for option in options:
            if option in self._tried or len(self._tried) < max(self._bar.total, 1):
                yield option

    def _score(self, option: Option) -> float:
        if option not in self._tried:
            (computed, tie), facts = option, self._profile.facts
            branches, weights = () if tie is None else facts.branches, self._fitter.fit(computed, tie)
            origin = (facts.noise, self._scheduler, computed)
            plan = MeasuredPlan(*origin, weights, "polished", 0.0, branches, facts.guidance)
            values, _ = self._judge.run(_with_schedule(self._profile, plan), "psnr", computed)
            self._tried[option] = _score(values), replace(plan, psnr=min(fmean(values), PSNR_CAP))
            self._bar.update()
        return self._tried[option][0]


def _with_schedule(profile: Profile, plan: MeasuredPlan) -> Profile:
    """The profile with one more plan, in place of an older one of the same budget."""
    known = profile.facts.schedules
    others = [s for s in known if (len(s.computed), s.noise) != (len(plan.computed), plan.noise)]
    return profile.with_facts(schedules=(*others, plan))


def _score(values: Sequence[float]) -> float:
    """Half the mean plus half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
