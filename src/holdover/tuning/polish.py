"""Better plans by trial: weights are fitted where the plan really goes, and steps moved, until pictures are closest.

Fitted to one half of the prompts, judged by the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
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
from ..profiles import MeasuredPlan, Profile
from .refit import Refit
from .setting import planner_for
from .trials import Trials

ROUNDS = 60  # plans tried, at most
Plan = tuple[tuple[int, ...], float | None]  # computed steps, and how closely the weights of branches are tied
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
    prompts. The planner's other schedules are tried first, then single steps of the best one are moved; every plan is
    judged by the pictures of the second half, by their mean and the mean of the worst tenth in dB. Where none is better
    than the profile's own, the profile comes back.
    """
    caller = Caller(pipe, len(profile.facts.noise), profile.facts.guidance, {**dict(profile.facts.call), **call})
    chosen = list(built_in(pipe)[:GENERATIONS] if prompts is None else prompts)
    planner = planner_for(profile)
    if budget not in planner.frontier:
        least, most = min(planner.frontier), max(planner.frontier)
        raise ConfigError(f"A budget for this profile is {least} to {most} computed steps, not {budget}.")
    if len(chosen) < 2:
        raise ConfigError("Polishing needs two prompts at least: one half is fitted to, the other judges.")
    polished = [
        s.computed for s in profile.facts.schedules if (len(s.computed), s.noise) == (budget, profile.facts.noise)
    ]
    starts = polished[:1] + planner.alternatives(budget)
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
        worth, best = _Search(profile, type(pipe.scheduler).__name__, refit, judges, bar).best(starts)
        known = _worth(judges.values(profile, "psnr", starts[0]))
    return _with(profile, best) if worth > known else profile


@dataclass
class _Search:
    """Tries plans, each once."""

    profile: Profile
    scheduler: str
    refit: Refit
    judges: Trials
    bar: Any
    tried: dict[Plan, tuple[float, MeasuredPlan]] = field(default_factory=dict)

    def best(self, starts: Sequence[tuple[int, ...]]) -> tuple[float, MeasuredPlan]:
        """The best plan found and its worth: where to start, how branches are tied, then moving one step at a time."""
        ties = TIES if self.profile.facts.branches else (None,)
        best = max(self._allowed((start, ties[0]) for start in starts), key=self._worth)
        found: Plan | None = max(self._allowed((best[0], tie) for tie in ties), key=self._worth)
        order = random.Random(0)
        while found is not None:
            best, found = found, self._moved(found, order)
        return self._judged(best)

    def _moved(self, plan: Plan, order: random.Random) -> Plan | None:
        """The first that is better of the plans with one step moved."""
        computed, tie = plan
        facts = self.profile.facts
        moved = [(other, tie) for other in neighbours(computed, len(facts.noise), facts.starts)]
        order.shuffle(moved)
        return next((other for other in self._allowed(moved) if self._worth(other) > self._worth(plan)), None)

    def _allowed(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """The plans that were tried, and others as long as more may be; one is tried in any case."""
        for plan in plans:
            if plan in self.tried or len(self.tried) < max(self.bar.total, 1):
                yield plan

    def _worth(self, plan: Plan) -> float:
        return self._judged(plan)[0]

    def _judged(self, plan: Plan) -> tuple[float, MeasuredPlan]:
        if plan not in self.tried:
            made = self._plan(*plan)
            values = self.judges.values(_with(self.profile, made), "psnr", made.computed)
            self.tried[plan] = _worth(values), replace(made, psnr=min(fmean(values), PSNR_CAP))
            self.bar.update()
        return self.tried[plan]

    def _plan(self, computed: tuple[int, ...], tie: float | None) -> MeasuredPlan:
        facts = self.profile.facts
        branches = facts.branches if tie is not None else ()
        weights = self.refit.weights(computed, tie)
        return MeasuredPlan(facts.noise, self.scheduler, computed, weights, "polished", 0.0, branches, facts.guidance)


def _with(profile: Profile, plan: MeasuredPlan) -> Profile:
    """The profile with one more plan, in the place of an older one of the same budget."""
    known = profile.facts.schedules
    kept = [s for s in known if (len(s.computed), s.noise) != (len(plan.computed), plan.noise)]
    return profile.with_facts(schedules=(*kept, plan))


def _worth(values: Sequence[float]) -> float:
    """Half the mean, half the mean of the worst tenth."""
    worst = sorted(values)[: max(1, len(values) // 10)]
    return 0.5 * fmean(values) + 0.5 * fmean(worst)
