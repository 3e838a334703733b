"""Better plans by trials on the model: `calibrate(effort=...)` and `polish`.

All trials run on recorded generations (replay.py): one half of the prompts is fitted to, the other judges. First the
planner's options are chosen, each varied in turn for all budgets: `VARIANTS` are the values that trials choose between,
and no option is fixed because of one model. A thorough calibration then moves single computed steps of each budget's
schedule while that improves it, first on a few generations and then on all, and trains its weights through the model
(training.py). A plan is stored only if the pipeline itself keeps more with it, on the half that judges, than with the
plan that the profile had.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..errors import ConfigError
from ..metrics import PSNR_CAP
from ..profiles import MeasuredPlan, PlannerOptions, Profile
from ..profiles.files import decode, encode, parse_json, write_file
from .calls import GENERATIONS, Caller, Prompt, as_prompts, built_in_prompts, hash_each, hash_prompts, make_batches
from .config import steps_for
from .error_model import Weights
from .generation import load_measured
from .planner import search_profile, stored_factors, stored_weights
from .recorded import RecordedBatch
from .replay import UNCHANGED, Factors, Replay
from .search import CandidateSchedule, ScheduleSearch, neighbors
from .training import IMAGES, ITERATIONS, TrainingState, train
from .tune import Trials

MAX_TRIALS = 150  # of moved steps, for each budget
SCREENED = 16  # generations of each half on which a moved step has to be better first
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
_OF_WEIGHTS = (
    "corrected_share",
    "depth",
    "branch_tie",
    "fitted_below",
)  # options that matter once a schedule is chosen
Candidate = tuple[tuple[int, ...], PlannerOptions]  # computed steps, and the options that weights are fitted with


def polish(
    pipe: Any,
    profile: Profile | str | PathLike[str],
    budget: int,
    prompts: Sequence[Prompt] | None = None,
    *,
    trials: int = MAX_TRIALS,
    iterations: int | None = None,
    seed: int = 0,
    batch_size: int = 1,
    progress: bool = True,
    **call: Any,
) -> Profile:
    """The profile with a plan for `budget` computed steps that was improved by trials on the model.

    It is what `calibrate(effort="thorough")` does for one budget, with at most `trials` plans tried and `iterations` of
    training; the planner's options for other budgets stay as they are. If no plan is better than the profile's own, it
    keeps that. `profile` is a Profile, or the path or address of one.
    """
    for name, count in (("trials", trials), ("iterations", iterations)):
        if count is not None and count < 0:
            raise ConfigError(f"{name} must be 0 or more, not {count}.")
    profile = load_measured(profile, pipe)
    shared: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "progress": progress, "iterations": iterations}
    improved = improve(pipe, profile, [budget], prompts, True, trials, **shared, **call)
    return improved.with_facts(options=profile.facts.options, effort=profile.facts.effort, cost=profile.facts.cost)


def improve(
    pipe: Any,
    profile: Profile,
    budgets: Sequence[int | str],
    prompts: Sequence[Prompt] | None = None,
    thorough: bool = False,
    trials: int | None = None,
    *,
    seed: int = 0,
    batch_size: int = 1,
    progress: bool = True,
    iterations: int | None = None,
    log: Path | None = None,
    **call: Any,
) -> Profile:
    """The profile with better planner options, and with a plan for each budget, by trials on the model.

    `trials` limits the plans tried, and `iterations` the training of each budget. With `log`, every result is kept
    in that file, and a run that was stopped continues from it. Raises a ReplayError where generations cannot be
    replayed without the pipeline.
    """
    chosen = as_prompts(built_in_prompts(pipe)[:GENERATIONS] if prompts is None else prompts)
    frontier = search_profile(profile).frontier
    counts = budget_counts(budgets, frontier, len(profile.facts.noise))
    if len(chosen) < 2:
        raise ConfigError("Trials need two prompts at least: one half is fitted to, the other judges.")
    iterations = ITERATIONS if iterations is None else iterations
    begin, caller, half = time.perf_counter(), Caller.like(profile, pipe, call), len(chosen) // 2
    most = expected_generations(counts, len(profile.facts.noise), len(chosen), thorough, iterations)
    with tqdm(
        total=round(most), disable=not progress, desc=f"trials, at most {most:.0f} generations", unit="generation"
    ) as bar:
        fitted, judge = (
            Replay(caller, profile, make_batches(part, batch_size, first))
            for part, first in ((chosen[:half], seed), (chosen[half:], seed + half))
        )
        fitted.check(caller, profile, make_batches(chosen[:half], batch_size, seed)[0])
        known = TrialLog(log, f"{profile.digest} {hash_prompts(chosen)} {seed} {batch_size}")
        known.meter = lambda: (fitted.runs + judge.runs, time.perf_counter() - begin)
        search = _TrialSearch(profile, type(pipe.scheduler).__name__, fitted, judge, known, trials, bar)
        options, improved = search.choose_options(counts), profile
        references = [i.to("cpu", torch.float32) for b in judge.batches if (i := b.images) is not None]
        checks = Trials(caller, chosen[half:], seed + half, batch_size, references)
        for count in counts:
            best, own = search.best_plan(count, options, thorough, iterations), search.own_plan(count, frontier[count])
            estimate, own_estimate = None, None
            if len(references) == len(judge.batches):  # judged by the images of the pipeline itself
                tried, tried_own = (checks.run(profile.with_plan(plan), "psnr", plan.computed) for plan in (best, own))
                ours, theirs = tried.values, tried_own.values
                estimate, own_estimate = tried.estimate, tried_own.estimate
                best = replace(best, psnr=min(fmean(ours), PSNR_CAP))
            else:
                ours, theirs = (search.quality(plan) for plan in (best, own))
            if score(ours) > score(theirs):
                improved = improved.with_plan(best).with_estimate(estimate)
                continue
            if options != profile.facts.options:  # which would change this plan
                improved = improved.with_plan(own)
            improved = improved.with_estimate(own_estimate)
    hashes = dict.fromkeys((*profile.facts.prompt_hashes, *hash_each(chosen)))
    generations, seconds = known.spent
    cost = (("generations", round(generations, 1)), ("seconds", round(seconds, 1)))
    return improved.with_facts(options=options, prompt_hashes=tuple(hashes), cost=cost)


def budget_counts(budgets: Sequence[int | str], known: Mapping[int, Any], steps: int) -> list[int]:
    """The computed steps of each budget, each once; an error for a number of steps that cannot be planned."""
    least, most = min(known), max(known)
    wanted = (b if isinstance(b, int) else max(least, steps_for(b, steps)) for b in budgets)
    for count in (counts := list(dict.fromkeys(wanted))):
        if count not in known:
            raise ConfigError(f"A budget for this profile is {least} to {most} computed steps, not {count}.")
    return counts


def expected_generations(
    counts: Sequence[int], steps: int, prompts: int, thorough: bool, iterations: int = ITERATIONS
) -> float:
    """What trials cost at most, in uncached generations; a gradient counts as three runs of its plan."""
    variants = 1 + sum(len(values) - 1 for values in VARIANTS.values())
    plans = prompts * (variants + 1 + (MAX_TRIALS if thorough else 0))
    training = iterations * 3 * min(max(IMAGES, 1), prompts) + 7 * prompts if thorough else 0
    return 2 * prompts + sum(counts) / steps * (plans + training)  # recorded, and one plan checked


class TrialLog:
    """The results of trials by name; with a file, they are kept there, and a run that was stopped finds them again.

    `meter` returns the generations and seconds that this run has taken; those of earlier runs are kept in the file.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self._path, self._identity = path, identity
        self._found: dict[str, Any] = {}
        self._before = (0.0, 0.0)
        self.meter: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        if path is not None and path.exists():
            try:
                known = parse_json(path.read_text(encoding="utf-8"), str(path))
            except UnicodeDecodeError:
                known = None
            if not isinstance(known, dict) or not isinstance(known.get("trials"), dict) or "spent" not in known:
                raise ConfigError(f"{path} is damaged; remove it to begin again.")
            if known.get("identity") != identity:
                raise ConfigError(f"{path} is from another calibration; remove it to begin again.")
            self._found, self._before = known["trials"], tuple(known["spent"])

    @property
    def spent(self) -> tuple[float, float]:
        """The generations and seconds of all runs."""
        generations, seconds = self.meter()
        return self._before[0] + generations, self._before[1] + seconds

    def get(self, name: str) -> tuple[float, MeasuredPlan, TrainingState | None] | None:
        """Score and plan of a trial, and the state of its training."""
        known = self._found.get(name)
        if known is None:
            return None
        state = None if known["state"] is None else decode(TrainingState, known["state"], str(self._path))
        return known["score"], decode(MeasuredPlan, known["plan"], str(self._path)), state

    def add(self, name: str, score: float, plan: MeasuredPlan, state: TrainingState | None = None) -> None:
        """Keep a result."""
        self._found[name] = {"score": score, "plan": encode(plan), "state": None if state is None else encode(state)}
        if self._path is not None:
            text = json.dumps({"identity": self._identity, "spent": self.spent, "trials": self._found})
            write_file(self._path, text.encode())


class _TrialSearch:
    """Tries plans on recorded generations, each once, while trials are left; at least one for each budget."""

    def __init__(
        self, profile: Profile, scheduler: str, fitted: Replay, judge: Replay, log: TrialLog, most: int | None, bar: Any
    ) -> None:
        self._profile, self._scheduler, self._fitted, self._judge = profile, scheduler, fitted, judge
        self._log, self._left, self._bar = log, np.inf if most is None else most, bar
        self._tried: dict[Candidate, tuple[float, MeasuredPlan]] = {}
        self._screened: dict[Candidate, float] = {}
        self._generations = sum(batch.size for batch in (*fitted.batches, *judge.batches))
        self._frontiers: dict[PlannerOptions, dict[int, CandidateSchedule]] = {}

    def choose_options(self, counts: Sequence[int]) -> PlannerOptions:
        """Vary one option after the other; keep the value with the best mean score over all budgets."""
        best = self._profile.facts.options
        for name, values in VARIANTS.items():
            if name == "branch_tie" and not self._fitted.problem.branches:
                continue
            scores = {}
            for options in dict.fromkeys([best, *(replace(best, **{name: value}) for value in values)]):
                candidates = [self._candidate(count, options) for count in counts]
                if self._can_try(candidates):
                    scores[options] = fmean(map(self._score, candidates))
            best = max(scores, key=scores.__getitem__, default=best)
        return best

    def best_plan(self, count: int, options: PlannerOptions, thorough: bool, iterations: int) -> MeasuredPlan:
        """The best plan that was tried for a budget; a thorough search moves single steps and trains weights first."""
        facts, order = self._profile.facts, random.Random(0)
        self._score(self._candidate(count, options))
        trial = self._generations * count / len(facts.noise)  # what one plan costs at most
        most, better = self._runs + (MAX_TRIALS - 1) * trial, thorough
        while better:
            best, better = max((c for c in self._tried if len(c[0]) == count), key=self._score), False
            near = neighbors(best[0], len(facts.noise), facts.starts)
            moved = [(other, best[1]) for other in near if (other, best[1]) not in self._tried]
            order.shuffle(moved)
            for candidate in moved:
                if better or self._runs + trial > most or not self._can_try([candidate]):
                    break
                better = self._is_better(candidate, best)
        best = max((c for c in self._tried if len(c[0]) == count), key=self._score)
        reached, plan = self._tried[best]
        if not thorough or count == len(facts.noise) or not iterations:
            return plan
        return self._train(best, reached, plan, iterations)

    def _train(self, candidate: Candidate, best: float, plan: MeasuredPlan, iterations: int) -> MeasuredPlan:
        """The plan with weights trained through the model, if they are better."""
        name = f"trained {_name(candidate)} {iterations}"
        begin, separate = stored_weights(plan, self._fitted.spec.ranges), bool(plan.branches)
        known, state = self._log.get(name), None
        if known is not None:
            best, plan, state = known

        def report(
            reached: TrainingState, value: float, weights: Mapping[int, Weights], factors: Mapping[int, float]
        ) -> None:
            nonlocal best, plan, state
            self._count_runs()
            if value > best:
                trained = self._measured_plan(candidate, weights, len(candidate[0]), separate, value)
                told = tuple(factors.get(step, 1.0) for step in candidate[0]) if factors else ()
                best, plan = value, replace(trained, timestep_factors=told)
            state = reached
            self._log.add(name, best, plan, state)

        if state is None or state.iteration < iterations:
            judge = partial(self._judged, candidate[0])
            train(self._fitted, candidate[0], begin, judge, iterations, report=report, state=state)
            assert state is not None
            self._log.add(name, best, plan, replace(state, iteration=iterations))
        return plan

    def own_plan(self, count: int, planned: CandidateSchedule) -> MeasuredPlan:
        """The profile's own plan of a budget: one that was tried before, else the one that it computes."""
        facts, problem = self._profile.facts, self._fitted.problem
        known = next((p for p in facts.schedules if (len(p.computed), p.noise) == (count, facts.noise)), None)
        if known is not None:
            return known
        assert problem.search is not None
        weights = problem.search.model.fit_weights(planned.computed)
        plan = self._measured_plan(
            (planned.computed, facts.options), weights, facts.options.depth, bool(problem.branches), 0.0
        )
        return replace(plan, origin=planned.origin)

    def quality(self, plan: MeasuredPlan) -> list[float]:
        """What each generation should keep with a plan, by the error of its latents."""
        return self._quality(plan.computed, stored_weights(plan, self._fitted.spec.ranges), stored_factors(plan))

    def _judged(self, computed: tuple[int, ...], weights: Mapping[int, Weights], factors: Factors = UNCHANGED) -> float:
        return score(self._quality(computed, weights, factors))

    def _quality(
        self,
        computed: tuple[int, ...],
        weights: Mapping[int, Weights],
        factors: Factors,
        batches: Sequence[RecordedBatch] | None = None,
    ) -> list[float]:
        """The PSNR that the images should have, by the error of the latents; by default of all batches."""
        errors = np.maximum(self._judge.run(computed, weights, factors, batches), 10 ** (-PSNR_CAP / 10))
        return [float(value) for value in (self._profile.facts.psnr_offset or 0.0) - 10 * np.log10(errors)]

    def _candidate(self, count: int, options: PlannerOptions) -> Candidate:
        """The plan that the planner makes with these options; options that only matter for the schedule are reset."""
        if options not in self._frontiers:
            search = replace(self._fitted.problem, options=options).search
            assert isinstance(search, ScheduleSearch)
            self._frontiers[options] = search.frontier
        computed = self._frontiers[options][count].computed
        return computed, PlannerOptions(**{name: getattr(options, name) for name in _OF_WEIGHTS})

    def _can_try(self, candidates: Sequence[Candidate]) -> bool:
        new = len(set(candidates) - self._tried.keys())
        return new <= self._left or not self._tried

    def _score(self, candidate: Candidate) -> float:
        if candidate not in self._tried:
            self._tried[candidate] = self._measure(
                _name(candidate), candidate, self._fitted.batches, self._judge.batches
            )
            self._left -= candidate not in self._screened
        return self._tried[candidate][0]

    def _is_better(self, candidate: Candidate, best: Candidate) -> bool:
        """Whether a plan is better than another; if that saves half of a trial, on a few generations first."""
        few = self._fitted.first(SCREENED), self._judge.first(SCREENED)
        if 2 * sum(batch.size for part in few for batch in part) <= self._generations:
            for plan in {candidate, best} - self._screened.keys():
                self._screened[plan] = self._measure(f"screened {_name(plan)}", plan, *few)[0]
                self._left -= plan not in self._tried
            if self._screened[candidate] <= self._screened[best]:
                return False
        return self._score(candidate) > self._score(best)

    def _measure(
        self, name: str, candidate: Candidate, fitted: Sequence[RecordedBatch], judge: Sequence[RecordedBatch]
    ) -> tuple[float, MeasuredPlan]:
        """The score of a plan that is fitted on some batches and judged on others, and the plan."""
        known = self._log.get(name)
        if known is None:
            computed, options = candidate
            weights = self._fitted.fit(computed, options, fitted)
            value = score(self._quality(computed, weights, UNCHANGED, judge))
            separate = bool(self._fitted.problem.branches) and options.branch_tie is not None
            known = value, self._measured_plan(candidate, weights, options.depth, separate, value), None
            self._log.add(name, *known)
            self._count_runs()
        return known[:2]

    def _measured_plan(
        self, candidate: Candidate, weights: Mapping[int, Weights], depth: int, separate: bool, psnr: float
    ) -> MeasuredPlan:
        facts = self._profile.facts
        values = tuple(value for _, held in sorted(weights.items()) for value in held.values)
        branches, psnr = facts.branches if separate else (), max(min(psnr, PSNR_CAP), 0.0)
        origin = facts.noise, self._scheduler, candidate[0]
        return MeasuredPlan(*origin, values, "polished", psnr, branches, facts.guidance, depth)

    @property
    def _runs(self) -> float:
        return self._fitted.runs + self._judge.runs

    def _count_runs(self) -> None:
        """Show what was computed so far."""
        self._bar.update(round(self._runs) - self._bar.n)


def _name(candidate: Candidate) -> str:
    return json.dumps([candidate[0], {name: asdict(candidate[1])[name] for name in _OF_WEIGHTS}])


def score(values: Sequence[float]) -> float:
    """Half the mean plus half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
