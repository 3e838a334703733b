"""Better plans by trial: weights are fitted where the plan really goes, and steps moved, until pictures are closest.

Fitted to one half of the prompts, judged by the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from ..calibration.calls import Caller, batches, quiet
from ..calibration.prompts import GENERATIONS, Prompt, built_in
from ..errors import ConfigError
from ..metrics import PSNR_CAP
from ..plan.rollout import TIE
from ..plan.search import neighbours
from ..profiles import Profile, Schedule
from .refit import Refit
from .setting import planner_for
from .trials import Trials

ROUNDS = 60  # plans tried, at most
TIES = (TIE, 10 * TIE, None)  # how closely the weights of branches are tied together; None: they are the same


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

    Weights are fitted along the way the plan really goes, on a batch of `batch_size` pictures of the first half of the
    prompts; single steps of the schedule are moved; every plan is judged by the pictures of the second half, by their
    mean and the mean of the worst tenth in dB. Where none is better than the profile's own, the profile comes back.
    """
    caller = Caller(pipe, len(profile.facts.noise), profile.facts.guidance, {**dict(profile.facts.call), **call})
    chosen = list(built_in(pipe)[:GENERATIONS] if prompts is None else prompts)
    frontier = planner_for(profile).frontier
    if budget not in frontier:
        raise ConfigError(f"A budget for this profile is 1 to {max(frontier)} computed steps, not {budget}.")
    if len(chosen) < 2:
        raise ConfigError("Polishing needs two prompts at least: one half is fitted to, the other judges.")
    polished = (
        s.computed for s in profile.facts.schedules if (len(s.computed), s.noise) == (budget, profile.facts.noise)
    )
    start = next(polished, frontier[budget].computed)
    half = len(chosen) // 2
    fitted_on = next(batches(chosen[:half], batch_size, seed))
    bar = tqdm(total=trials, disable=not progress, desc="polishing", unit="trial")
    with (
        quiet(pipe),
        bar,
        Refit(caller, profile, *fitted_on) as refit,
        Trials(caller, chosen[half:], seed + half, batch_size) as judges,
    ):
        judges.reference()
        worth, best = _Search(profile, type(pipe.scheduler).__name__, refit, judges, bar).best(start)
        known = _worth(judges.values(profile, "psnr", start))
    return _with(profile, best) if worth > known else profile


@dataclass
class _Search:
    """Tries plans, each once."""

    profile: Profile
    scheduler: str
    refit: Refit
    judges: Trials
    bar: Any
    tried: dict[tuple[tuple[int, ...], float | None], tuple[float, Schedule]] = field(default_factory=dict)

    def best(self, start: tuple[int, ...]) -> tuple[float, Schedule]:
        """The best plan found and its worth: first how branches are tied, then moving one step at a time."""
        ties = TIES if self.profile.facts.branches else (None,)
        tie = max(ties, key=lambda tie: self._judged(start, tie)[0])
        best, improved = start, True
        while improved:
            improved = False
            for other in neighbours(best, len(self.profile.facts.noise)):
                if len(self.tried) >= self.bar.total:
                    break
                if self._judged(other, tie)[0] > self._judged(best, tie)[0]:
                    best, improved = other, True
                    break
        return self._judged(best, tie)

    def _judged(self, computed: tuple[int, ...], tie: float | None) -> tuple[float, Schedule]:
        if (computed, tie) not in self.tried:
            plan = self._plan(computed, tie)
            values = self.judges.values(_with(self.profile, plan), "psnr", computed)
            self.tried[computed, tie] = _worth(values), replace(plan, psnr=min(fmean(values), PSNR_CAP))
            self.bar.update()
        return self.tried[computed, tie]

    def _plan(self, computed: tuple[int, ...], tie: float | None) -> Schedule:
        facts = self.profile.facts
        branches = facts.branches if tie is not None else ()
        weights = self.refit.weights(computed, tie)
        return Schedule(facts.noise, self.scheduler, computed, weights, "polished", 0.0, branches, facts.guidance)


def _with(profile: Profile, plan: Schedule) -> Profile:
    """The profile with one more plan, in the place of an older one of the same budget."""
    known = profile.facts.schedules
    kept = [s for s in known if (len(s.computed), s.noise) != (len(plan.computed), plan.noise)]
    return profile.with_facts(schedules=(*kept, plan))


def _worth(values: Sequence[float]) -> float:
    """Half the mean, half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
