"""Better schedules by trial: computed steps are moved as long as pictures of the calibration prompts get closer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from ..calibration.calls import Caller, quiet
from ..calibration.prompts import GENERATIONS, Prompt, built_in
from ..errors import ConfigError
from ..plan.search import neighbours
from ..profiles import Profile, Schedule
from .setting import planner_for
from .trials import Trials

ROUNDS = 150  # schedules tried, at most


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
    """The profile with a schedule for `budget` computed steps that was improved on the model itself.

    Judged by the mean over the pictures and the mean of the worst tenth, in dB. Use other prompts to see what it is
    worth: these are fitted.
    """
    caller = Caller(pipe, len(profile.facts.noise), profile.facts.guidance, {**dict(profile.facts.call), **call})
    chosen = list(built_in(pipe)[:GENERATIONS] if prompts is None else prompts)
    frontier = planner_for(profile).frontier
    if budget not in frontier:
        raise ConfigError(f"A budget for this profile is 1 to {max(frontier)} computed steps, not {budget}.")
    bar = tqdm(total=trials, disable=not progress, desc="polishing", unit="trial")
    with quiet(pipe), bar, Trials(caller, profile, chosen, seed, batch_size) as tried:
        tried.reference(lambda: None)
        best, value = _climbed(frontier[budget].computed, tried, trials, bar)
    kept = [s for s in profile.facts.schedules if len(s.computed) != budget or s.noise != profile.facts.noise]
    found = Schedule(profile.facts.noise, best, "polished", value)
    return profile.with_facts(schedules=(*kept, found))


def _climbed(start: tuple[int, ...], tried: Trials, trials: int, bar: Any) -> tuple[tuple[int, ...], float]:
    """The best schedule found by moving one step at a time, and the mean quality of its pictures."""
    seen: dict[tuple[int, ...], list[float]] = {}

    def judged(schedule: tuple[int, ...]) -> float:
        if schedule not in seen:
            seen[schedule] = tried.values("psnr", schedule, lambda: None, lambda _: False)
            bar.update()
        return _worth(seen[schedule])

    best, steps = start, tried.steps
    improved = True
    judged(best)
    while improved and len(seen) < trials:
        improved = False
        for other in neighbours(best, steps):
            if len(seen) < trials and judged(other) > judged(best):
                best, improved = other, True
                break
    return best, fmean(seen[best])


def _worth(values: list[float]) -> float:
    """Half the mean, half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
