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
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Self

import numpy as np
import torch
from tqdm.auto import tqdm

from ..engine.backend import find_transformers
from ..engine.clock import SchedulerStep
from ..engine.engine import Engine
from ..engine.install import CachedTransformer
from ..engine.method import Method
from ..engine.state import ComputedForward
from ..errors import ConfigError
from ..grid import Grid
from ..metrics import PSNR_CAP
from ..models.inputs import iter_tensors
from ..predictors import Predictor
from ..profiles import MeasuredPlan, Profile
from .calls import GENERATIONS, Caller, Prompt, batches, built_in_prompts, without_progress_bars
from .config import PlanConfig
from .error_model import Preconditioning
from .method import OutputPlanMethod, model_output
from .planner import PlanProblem, plan_problem, search_profile
from .recording import OutputRecorder, TensorStore, TrajectoryRecord
from .search import neighbors
from .tune import Trials
from .weights import BRANCH_TIE, DEPTH, Weights, solve_ridge

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

    Weights are fitted along the real path of the plan, on a batch of `batch_size` images of the first half of the
    prompts. First the planner's other schedules are tried, then single steps of the best one are moved. Every plan is
    judged by the mean PSNR and the mean of the worst tenth on the second half. If no plan is better than the profile's
    own, the profile is returned unchanged.
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
    fitted_on = next(batches(chosen[:half], batch_size, seed))
    with (
        without_progress_bars(pipe),
        tqdm(total=trials, disable=not progress, desc="polishing", unit="trial") as bar,
        WeightFitter(caller, profile, *fitted_on) as fitter,
        Trials(caller, chosen[half:], seed + half, batch_size) as judge,
    ):
        judge.generate_references()
        score, best = _LocalSearch(profile, type(pipe.scheduler).__name__, fitter, judge, bar).run(starts)
        own_score = _score(judge.values(profile, "psnr", starts[0]))
    return _with_schedule(profile, best) if score > own_score else profile


class WeightFitter:
    """Fits the weights of schedules on one batch of prompts; a context manager that frees the uncached outputs."""

    def __init__(self, caller: Caller, profile: Profile, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
        self._caller, self._profile = caller, profile
        self._prompts, self._seeds = prompts, seeds
        preconditioning = Preconditioning.of(profile.facts, np.array(profile.facts.noise))
        self._uncached = TrajectoryRecord("device", keep_outputs=True, preconditioning=preconditioning)

    def __enter__(self) -> Self:
        self._run(OutputRecorder(self._uncached))
        self._uncached.latents.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._uncached.close()

    def fit(self, computed: tuple[int, ...], tie: float | None) -> tuple[float, ...]:
        """The weights of all held steps, in order; branches have their own unless `tie` is None."""
        fit = RealPathFit(self._profile, computed, self._uncached.outputs, tie)
        self._run(fit)
        return tuple(weight for step in sorted(fit.fitted) for weight in fit.fitted[step])

    def _run(self, method: Method) -> None:
        engine = Engine(self._caller.pipe, find_transformers(self._caller.pipe), method)
        engine.install()
        try:
            self._caller(self._prompts, self._seeds)
        finally:
            engine.uninstall()


class RealPathFit(OutputPlanMethod):
    """Runs a schedule and fits the weights of each held step when it comes, next to the outputs of the uncached run.

    Branches have weights of their own unless `tie` is None.
    """

    follows = True
    observes = True

    def __init__(self, profile: Profile, computed: tuple[int, ...], uncached: TensorStore, tie: float | None) -> None:
        super().__init__(PlanConfig(schedule=computed, guard=False))
        facts = profile.facts
        self._measured_profile, self._computed, self._uncached = profile, computed, uncached
        self._mix = {} if tie is None else dict(zip(facts.branches, facts.mix, strict=True))
        self._tie = tie or 0.0
        self._problem: PlanProblem | None = None
        self._simulated: dict[int, Weights] = {}
        self._branch_outputs: dict[tuple[str, int], torch.Tensor] = {}
        self._outputs: list[torch.Tensor] = []
        self.fitted: dict[int, tuple[float, ...]] = {}

    def _find_profile(self, transformer: CachedTransformer) -> None:
        """The schedule runs without a profile; the profile's weights are used for early steps only."""

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Predictor:
        if self._problem is None:
            self._problem = problem = plan_problem(self._current_state(grid).problem.spec, self._measured_profile)
            search = problem.search if self._mix else problem.merged.search
            assert search is not None
            simulated, noise = search.weights(self._computed), problem.spec.noise
            self._simulated = {step: w for step, w in simulated.items() if noise[step] > FITTED_BELOW}
        return _FittedPredictor(self, list(self._mix).index(branch) if self._mix else 0)

    def observe(self, computed: ComputedForward) -> None:
        if self._mix:
            output = next(iter_tensors(computed.output)).detach().float().clone()
            self._branch_outputs[computed.branch, computed.step] = output

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        assert self._problem is not None
        self._outputs.append(model_output(stepped, self._problem.preconditioning).detach().float().clone())

    def weights(self, step: int, anchors: Sequence[int], branch: int) -> tuple[float, ...]:
        """The weights of a held step for one branch."""
        if step not in self.fitted:
            simulated = self._simulated.get(step)
            self.fitted[step] = self._fit(step, anchors) if simulated is None else simulated.values
        return self.fitted[step][branch * len(anchors) : (branch + 1) * len(anchors)]

    def _fit(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        outputs = [self._outputs[a] for a in anchors]
        if self._mix:
            outputs = [share * self._branch_outputs[branch, a] for branch, share in self._mix.items() for a in anchors]
        features = torch.stack([output.flatten() for output in outputs]).double()
        normal = (features @ features.T).cpu().numpy()
        known = (features @ self._target(step).flatten().double()).cpu().numpy()
        return tuple(map(float, solve_ridge(normal, known, max(1, len(self._mix)), self._tie)))

    def _target(self, step: int) -> torch.Tensor:
        """The output that puts the next latent where the uncached generation has it."""
        assert self._problem is not None
        target = self._uncached[step].clone()
        row = self._problem.response[step + 1]
        for earlier in range(step if abs(row[step]) > 1e-12 else 0):
            error = self._outputs[earlier] - self._uncached[earlier]
            target.sub_(error, alpha=float(row[earlier] / row[step]))
        return target


@dataclass(frozen=True)
class _FittedPredictor:
    """The predictor of one branch, which has its weights fitted when they are needed."""

    fit: RealPathFit
    branch: int
    depth: int = DEPTH

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        return self.fit.weights(step, anchors, self.branch)


class _LocalSearch:
    """Tries plans on the model, each once: first where to start, then the tie, then moving one step at a time."""

    def __init__(self, profile: Profile, scheduler: str, fitter: WeightFitter, judge: Trials, bar: Any) -> None:
        self._profile, self._scheduler = profile, scheduler
        self._fitter, self._judge, self._bar = fitter, judge, bar
        self._tried: dict[Option, tuple[float, MeasuredPlan]] = {}

    def run(self, starts: Sequence[tuple[int, ...]]) -> tuple[float, MeasuredPlan]:
        """The best plan found and its score."""
        facts, order = self._profile.facts, random.Random(0)
        ties = TIES if facts.branches else (None,)
        start = max(self._allowed((start, ties[0]) for start in starts), key=self._score_of)
        best: Option = max(self._allowed((start[0], tie) for tie in ties), key=self._score_of)
        better: Option | None = best
        while better is not None:
            best, (computed, tie) = better, better
            moved = [(other, tie) for other in neighbors(computed, len(facts.noise), facts.starts)]
            order.shuffle(moved)
            better = next((m for m in self._allowed(moved) if self._score_of(m) > self._score_of(best)), None)
        return self._try(best)

    def _allowed(self, options: Iterable[Option]) -> Iterator[Option]:
        """The options that were tried already, and others while trials are left; at least one is tried."""
        for option in options:
            if option in self._tried or len(self._tried) < max(self._bar.total, 1):
                yield option

    def _score_of(self, option: Option) -> float:
        return self._try(option)[0]

    def _try(self, option: Option) -> tuple[float, MeasuredPlan]:
        if option not in self._tried:
            (computed, tie), facts = option, self._profile.facts
            branches = facts.branches if tie is not None else ()
            weights = self._fitter.fit(computed, tie)
            plan = MeasuredPlan(
                facts.noise, self._scheduler, computed, weights, "polished", 0.0, branches, facts.guidance
            )
            values = self._judge.values(_with_schedule(self._profile, plan), "psnr", computed)
            self._tried[option] = _score(values), replace(plan, psnr=min(fmean(values), PSNR_CAP))
            self._bar.update()
        return self._tried[option]


def _with_schedule(profile: Profile, plan: MeasuredPlan) -> Profile:
    """The profile with one more plan, in place of an older one of the same budget."""
    known = profile.facts.schedules
    others = [s for s in known if (len(s.computed), s.noise) != (len(plan.computed), plan.noise)]
    return profile.with_facts(schedules=(*others, plan))


def _score(values: Sequence[float]) -> float:
    """Half the mean plus half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
