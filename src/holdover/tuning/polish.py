"""Better plans by trial: steps are moved, and weights fitted, until pictures of the calibration prompts are closest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from ..calibration.calls import Caller, quiet
from ..calibration.prompts import GENERATIONS, Prompt, built_in
from ..errors import ConfigError
from ..metrics import PSNR_CAP
from ..plan.rollout import Weights
from ..plan.search import neighbours
from ..profiles import Profile, Schedule
from .refit import refitted
from .setting import planner_for
from .trials import Trials

ROUNDS = 60  # schedules tried, at most


def polish(
    pipe: Any,
    profile: Profile,
    budget: int,
    prompts: Sequence[Prompt] | None = None,
    *,
    trials: int = ROUNDS,
    seed: int = 0,
    batch_size: int = 1,
    progress: bool = True,
    **call: Any,
) -> Profile:
    """The profile with a plan for `budget` computed steps that was improved on the model itself.

    Single steps of the schedule are moved; then the weights are fitted along the way the plan really goes, on one batch
    of `batch_size` pictures. Judged by the mean over the pictures and the mean of the worst tenth, in dB. Use other
    prompts to see what it is worth: these are fitted.
    """
    caller = Caller(pipe, len(profile.facts.noise), profile.facts.guidance, {**dict(profile.facts.call), **call})
    chosen = list(built_in(pipe)[:GENERATIONS] if prompts is None else prompts)
    planner = planner_for(profile)
    if budget not in planner.frontier:
        raise ConfigError(f"A budget for this profile is 1 to {max(planner.frontier)} computed steps, not {budget}.")
    bar = tqdm(total=trials, disable=not progress, desc="polishing", unit="trial")
    with quiet(pipe), bar, Trials(caller, chosen, seed, batch_size) as tried:
        tried.reference()
        best = _climbed(planner.frontier[budget].computed, profile, tried, bar)
        fitted = (_flat(planner.weights(best)), refitted(caller, best, *tried.parts[0]))
        plans = [_plan(profile, pipe, best, weights) for weights in fitted]
        values = [tried.values(_with(profile, plan), "psnr", best) for plan in plans]
    value, plan = max(zip(values, plans, strict=True), key=lambda pair: _worth(pair[0]))
    return _with(profile, replace(plan, psnr=min(fmean(value), PSNR_CAP)))


def _climbed(start: tuple[int, ...], profile: Profile, tried: Trials, bar: Any) -> tuple[int, ...]:
    """The best schedule found by moving one step at a time."""
    worth: dict[tuple[int, ...], float] = {}

    def judged(schedule: tuple[int, ...]) -> float:
        if schedule not in worth:
            worth[schedule] = _worth(tried.values(profile, "psnr", schedule))
            bar.update()
        return worth[schedule]

    best, improved = start, True
    while improved:
        improved = False
        for other in neighbours(best, len(profile.facts.noise)):
            if len(worth) >= bar.total:
                return best
            if judged(other) > judged(best):
                best, improved = other, True
                break
    return best


def _flat(weights: dict[int, Weights]) -> tuple[float, ...]:
    return tuple(value for step in sorted(weights) for value in weights[step].values)


def _plan(profile: Profile, pipe: Any, computed: tuple[int, ...], weights: tuple[float, ...]) -> Schedule:
    return Schedule(profile.facts.noise, type(pipe.scheduler).__name__, computed, weights, "polished", 0.0)


def _with(profile: Profile, plan: Schedule) -> Profile:
    """The profile with one more plan, in the place of an older one of the same budget."""
    known = profile.facts.schedules
    kept = [s for s in known if (len(s.computed), s.noise) != (len(plan.computed), plan.noise)]
    return profile.with_facts(schedules=(*kept, plan))


def _worth(values: Sequence[float]) -> float:
    """Half the mean, half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
