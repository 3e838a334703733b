"""The rows of the main table: plans, fewer steps, and other methods with the best settings that a search finds.

Counted are steps on which all blocks run. Held steps are not free: first-block methods (DBCache, first_block) run
their first blocks, tea_cache runs the first block's modulation, and diffusers' TaylorSeer by default holds attention
alone. None of that is charged to them.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import sqrt
from typing import Any

import numpy as np
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig

from holdover.grid import Grid
from holdover.plan.error_model import Measurements, fit_output, held_steps
from holdover.plan.planner import search_profile
from holdover.plan.search import growing, uniform
from holdover.policies.base import schedule
from holdover.policies.interval import IntervalPolicy
from holdover.policies.magcache import MagCachePolicy
from holdover.profiles import MeasuredPlan, Profile

from .bench import Bench, Method, Row, Sampling, cached, diffusers_cache, fewer, sea_cache_of_diffusers
from .verdict import PLAN

# Rows that need no search


def plan(profile: Profile, title: str = PLAN, **wanted: Any) -> Method:
    """A plan on a profile."""
    return cached(title, "plan", profile=profile, **wanted)


def planned(bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """Plans on a profile of the same steps."""
    profile = bench.profile(sampling)
    return [bench.row(plan(profile, budget=budget), sampling, budget) for budget in budgets]


def transferred(bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """Plans on a profile that was measured at another number of steps."""
    profile = bench.profile(Sampling(bench.scale.steps))
    title = f"{PLAN}, profile of {bench.scale.steps} steps"
    return [bench.row(plan(profile, title, budget=budget), sampling, budget) for budget in budgets]


def unmeasured(bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """Newton extrapolation on a growing window, as in a plan without a profile."""
    title, settings = "plan without a profile", {"predictor": "newton"}
    methods = {b: cached(title, "plan", schedule=growing(sampling.steps, b), **settings) for b in budgets}
    return [bench.row(method, sampling, budget) for budget, method in methods.items()]


def held(bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """The last computed output, held at regular intervals."""
    settings = {"predictor": "hold"}
    methods = {b: cached("hold, uniform", "plan", schedule=uniform(sampling.steps, b), **settings) for b in budgets}
    return [bench.row(method, sampling, budget) for budget, method in methods.items()]


def fewer_steps(bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """No cache, fewer steps, of both orders."""
    return [bench.row(fewer(budget, order), sampling, budget) for order in (1, 2) for budget in budgets]


def planned_with(effort: str, bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """Plans of one effort, calibrated for these budgets on the same prompts as those of the others."""
    profile = bench.calibrate(sampling, effort, budgets)
    return [bench.row(plan(profile, f"plan, {effort}", budget=budget), sampling, budget) for budget in budgets]


def after_l2p(bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """L2P's rule (arXiv 2604.26365): a uniform schedule, weights over all computed outputs fitted to each held one."""
    profile = bench.profile(sampling)
    facts, found = profile.facts, []
    gram = Measurements(np.array(facts.noise), profile.grams, profile.growth, facts.mix).merged.mean_gram
    ranges = ((0, sampling.steps - 1),)
    for budget in budgets:
        computed = uniform(sampling.steps, budget)
        held = sorted(held_steps(computed, ranges).items())
        weights = [value for step, before in held for value in fit_output(before, step, gram).values]
        fixed = {"noise": facts.noise, "scheduler": facts.scheduler, "guidance": facts.guidance, "depth": budget}
        tried = MeasuredPlan(computed=computed, weights=tuple(weights), origin="L2P", psnr=0.0, **fixed)
        fitted = replace(profile, facts=replace(facts, schedules=(tried,)))
        found.append(bench.row(plan(fitted, "after L2P", schedule=computed), sampling, budget))
    return found


def after_dpcache(bench: Bench, sampling: Sampling, budgets: Sequence[int]) -> list[Row]:
    """DPCache's rule (arXiv 2602.22654): a schedule by dynamic programming on calibrated costs, Taylor's prediction."""
    profile = bench.profile(sampling)
    schedules = {budget: search_profile(profile).frontier[budget].computed for budget in budgets}
    title = "after DPCache"
    return [
        bench.row(plan(profile, title, schedule=computed, predictor="newton"), sampling, budget)
        for budget, computed in schedules.items()
    ]


# The search


SLACK = 0.5  # computed steps above the budget that a row may have, in its favor


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting, the steps it computed, and the mean PSNR of its images."""

    method: Method
    computed: float
    psnr: float


class Search:
    """All settings of one method that were tried on some prompts."""

    def __init__(self, bench: Bench, sampling: Sampling) -> None:
        self.bench, self.sampling = bench, sampling
        self._trials: dict[str, Trial] = {}

    def add(self, method: Method) -> float:
        """Try a setting once; returns the steps it computed."""
        if method.key not in self._trials:
            self._trials[method.key] = Trial(method, *self.bench.score(method, self.sampling))
        return self._trials[method.key].computed

    def add_all(self, methods: Iterable[Method]) -> None:
        """Try many."""
        for method in methods:
            self.add(method)

    def best(self, budget: int) -> Trial:
        """The trial of highest PSNR within the budget; if there is none, the one that computes least."""
        within = [trial for trial in self._trials.values() if trial.computed <= budget + SLACK]
        if not within:
            return min(self._trials.values(), key=lambda trial: trial.computed)
        return max(within, key=lambda trial: trial.psnr)

    def rows(self, budgets: Sequence[int]) -> list[Row]:
        """The best setting for each budget, on all prompts."""
        found: dict[str, Row] = {}
        rows = []
        for budget in budgets:
            method = self.best(budget).method
            if method.key not in found:
                found[method.key] = self.bench.row(method, self.sampling, budget)
            rows.append(found[method.key] | {"wanted": budget, "settings_tried": len(self._trials)})
        return rows


def bisect(
    search: Search, make: Callable[[float], Method], budgets: Sequence[int], span: tuple[float, float]
) -> list[float]:
    """Try thresholds by bisection until every budget is met as closely as possible: a larger one computes fewer steps.

    Returns, for each budget, the threshold with the most computed steps within it.
    """
    seen: list[tuple[float, float]] = []
    for budget in budgets:
        low = max((t for t, computed in seen if computed > budget), default=span[0])
        high = min((t for t, computed in seen if computed <= budget), default=span[1])
        for _ in range(search.bench.scale.halvings):
            if high < 1.01 * low or any(budget - SLACK < computed <= budget for _, computed in seen):
                break
            middle = sqrt(low * high)
            seen.append((middle, search.add(make(middle))))
            low, high = (middle, high) if seen[-1][1] > budget else (low, middle)
    return [max(within)[1] for b in budgets if (within := [(c, t) for t, c in seen if c <= b + SLACK])]


def spread(candidates: Sequence[Method], most: int) -> list[Method]:
    """At most `most` of the candidates, evenly spaced in the list."""
    if len(candidates) <= most:
        return list(candidates)
    return [candidates[index * len(candidates) // most] for index in range(most)]


# Rows that are searched


ALWAYS = 1e6  # a threshold that is never reached
_MASKS = ("ultra", "fast", "medium", "slow")
_WARM_UPS = (1, 2, 3, 4, 6, 10, 14)
_SKIPS = (1, 2, 3, 4, 5, 6, 8, 12, 49)
_RETENTIONS = (0.02, 0.06, 0.1, 0.2)
_THRESHOLDS = tuple(0.001 * 1.12**power for power in range(80))
Budgets = Sequence[int]
Ratios = tuple[float, ...]
Schedule = tuple[bool, ...]
MagSettings = tuple[float, int, float]


def tea_cache(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """TeaCache with coefficients of this model, its threshold searched."""
    search, file = Search(bench, sampling), bench.profile_file(sampling)
    bisect(search, lambda t: cached("tea_cache", "tea_cache", rel_l1_thresh=t, profile=file), budgets, (1e-3, 30.0))
    return search.rows(budgets)


def mag_cache(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """MagCache with ratios of this model; threshold, longest hold and retention searched."""
    search, profile = Search(bench, sampling), dict(bench.profile(sampling).facts.mag_cache)["transformer"]
    ratios = [values.ratios for _, values in profile.branches]
    file = bench.profile_file(sampling)

    def make(threshold: float, skip: int, retention: float) -> Method:
        settings = {"mag_threshold": threshold, "mag_max_skip_steps": skip, "mag_retention_ratio": retention}
        return cached("mag_cache", "mag_cache", profile=file, **settings)

    for found in mag_settings(ratios, budgets).values():
        search.add_all(spread([make(*setting) for setting in found], bench.scale.tries))
    return search.rows(budgets)


def diffusers_mag(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """diffusers' MagCache with its own calibration."""
    search, ratios = Search(bench, sampling), diffusers_mag_ratios(bench, sampling)

    def make(threshold: float, skip: int, retention: float) -> Method:
        rule = {"threshold": threshold, "max_skip_steps": skip, "retention_ratio": retention}
        constants = {"num_inference_steps": sampling.steps, "mag_ratios": ratios}
        return diffusers_cache("diffusers MagCache", MagCacheConfig, **rule, **constants)

    for found in mag_settings([ratios], budgets).values():
        search.add_all(spread([make(*setting) for setting in found], bench.scale.tries))
    return search.rows(budgets)


def diffusers_first_block(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """diffusers' first-block cache, its threshold searched."""
    search = Search(bench, sampling)

    def make(threshold: float) -> Method:
        return diffusers_cache("diffusers first-block", FirstBlockCacheConfig, threshold=threshold)

    bisect(search, make, budgets, (1e-3, 3.0))
    return search.rows(budgets)


def diffusers_sea(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """diffusers' SeaCache, its threshold searched with residuals held and extrapolated, up to 2 and 8 steps."""
    search = Search(bench, sampling)

    def make(order: int, longest: int, threshold: float) -> Method:
        rule = {"residual_order": order, "max_consecutive_cached": longest}
        return sea_cache_of_diffusers(threshold=threshold, **rule)

    for order, longest in product((0, 1), (2, 8)):
        bisect(search, partial(make, order, longest), budgets, (1e-3, 30.0))
    return search.rows(budgets)


def diffusers_taylorseer(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """diffusers' TaylorSeer in single precision: order and variant first, then where holding begins."""
    search = Search(bench, sampling)

    def make(budget: int, begin: int, order: int, lite: bool) -> Method:
        interval = _interval(sampling.steps, begin, budget)
        settings = {"cache_interval": interval, "disable_cache_before_step": begin, "max_order": order}
        return diffusers_cache("diffusers TaylorSeer", TaylorSeerCacheConfig, **settings, use_lite_mode=lite)

    for budget in budgets:
        kinds = list(product((1, 2), (False, True)))
        search.add_all(make(budget, 3, order, lite) for order, lite in kinds)
        chosen = search.best(budget).method.settings
        begins = _warm_ups(budget)[: bench.scale.tries]
        search.add_all(make(budget, begin, chosen["max_order"], chosen["use_lite_mode"]) for begin in begins)
    return search.rows(budgets)


def cache_dit(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """cache-dit's DBCache alone and with TaylorSeer of two orders: at regular intervals, and by its threshold."""
    plain = Search(bench, sampling)
    _add_scheduled(plain, budgets, None)
    found = []
    for warm_up in (1, 4)[: bench.scale.tries]:
        make = partial(db_cache, None, warm_up, -1)
        found += [(warm_up, threshold) for threshold in bisect(plain, make, budgets, (1e-3, 3.0))]
    rows = plain.rows(budgets)
    for order in (1, 2):
        search = Search(bench, sampling)
        _add_scheduled(search, budgets, order)
        search.add_all(db_cache(order, warm_up, -1, threshold) for warm_up, threshold in found)
        rows += search.rows(budgets)
    return rows


def db_cache(order: int | None, warm_up: int, longest: int, threshold: float, **more: Any) -> Method:
    """DBCache with its settings, and TaylorSeer of that order where one is given."""
    title = "cache_dit DBCache" if order is None else f"cache_dit DBCache + TaylorSeer {order}"
    taylor = {} if order is None else {"enable_taylorseer": True, "taylorseer_order": order}
    settings = {"max_warmup_steps": warm_up, "max_continuous_cached_steps": longest, **taylor, **more}
    return cached(title, "cache_dit", residual_diff_threshold=threshold, **settings)


def _add_scheduled(search: Search, budgets: Budgets, order: int | None) -> None:
    """Settings that compute the same steps for every image: the library's own masks, and regular intervals."""
    for mask in _MASKS[: search.bench.scale.tries]:
        search.add(db_cache(order, 1, -1, ALWAYS, scm_steps_mask_policy=mask, scm_steps_policy="static"))
    for budget in budgets:
        intervals = list(_intervals(search.sampling.steps, budget))[: search.bench.scale.tries]
        search.add_all(db_cache(order, warm_up, longest, ALWAYS) for warm_up, longest in intervals)


def easy_cache(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """EasyCache, its threshold searched after short and long warm-ups."""
    search = Search(bench, sampling)
    for warm_up in (1, 3, 5)[: bench.scale.tries]:
        make = partial(_with_threshold, "easy_cache", warmup_steps=warm_up)
        bisect(search, make, budgets, (1e-3, 30.0))
    return search.rows(budgets)


def sea_cache(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """SeaCache, its threshold searched with residuals held and extrapolated."""
    search = Search(bench, sampling)
    for order in (0, 1):
        bisect(search, partial(_with_threshold, "sea_cache", order=order), budgets, (1e-3, 30.0))
    return search.rows(budgets)


def first_block(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """First-block cache, its threshold searched after short and long warm-ups."""
    search = Search(bench, sampling)
    for warm_up in (0, 4)[: bench.scale.tries]:
        make = partial(_with_threshold, "first_block", warmup_steps=warm_up)
        bisect(search, make, budgets, (1e-3, 3.0))
    return search.rows(budgets)


def _with_threshold(method: str, threshold: float, **settings: Any) -> Method:
    return cached(method, method, threshold=threshold, **settings)


def taylor_seer(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """TaylorSeer: order, quantity and a static or growing interval first, then warm-up steps."""
    search = Search(bench, sampling)

    def make(budget: int, warm_up: int, grows: bool, **chosen: Any) -> Method:
        interval, growth = 2, _slowest_growth(sampling.steps, warm_up, budget) if grows else 0.0
        if not grows:
            counts = {n: _count_computed(sampling.steps, warm_up, n, 0.0) for n in range(1, sampling.steps)}
            interval = next((n for n, count in counts.items() if count <= budget), sampling.steps)
        rule = {"interval": interval, "growth": growth, "warmup_steps": warm_up}
        return cached("taylor_seer", "taylor_seer", **rule, **chosen)

    for budget in budgets:
        kinds = product((False, True), (1, 2), ("output", "residuals"))
        search.add_all(make(budget, min(3, budget - 1), grows, order=order, quantity=q) for grows, order, q in kinds)
        best = search.best(budget).method.settings
        chosen = {"order": best["order"], "quantity": best["quantity"]}
        warm_ups = _warm_ups(budget)[: bench.scale.tries]
        search.add_all(make(budget, warm_up, best["growth"] > 0, **chosen) for warm_up in warm_ups)
    return search.rows(budgets)


def spectrum(bench: Bench, sampling: Sampling, budgets: Budgets) -> list[Row]:
    """Spectrum: share and quantity first, then warm-up steps; the slowest growth within the budget."""
    search = Search(bench, sampling)

    def make(budget: int, warm_up: int, **chosen: Any) -> Method:
        growth = _slowest_growth(sampling.steps, warm_up, budget)
        return cached("spectrum", "spectrum", growth=growth, warmup_steps=warm_up, **chosen)

    for budget in budgets:
        kinds = product((0.5, 1.0), ("output", "residuals"))
        search.add_all(make(budget, min(5, budget - 1), share=share, quantity=q) for share, q in kinds)
        best = search.best(budget).method.settings
        chosen = {"share": best["share"], "quantity": best["quantity"]}
        search.add_all(make(budget, warm_up, **chosen) for warm_up in _warm_ups(budget)[: bench.scale.tries])
    return search.rows(budgets)


def _slowest_growth(steps: int, warm_up: int, budget: int) -> float:
    """The slowest growth of an interval of 2 with which at most `budget` steps are computed."""
    found = (g / 20 for g in range(1000) if _count_computed(steps, warm_up, 2.0, g / 20) <= budget)
    return next(found, float(steps))


def _count_computed(steps: int, warm_up: int, interval: float, growth: float) -> int:
    """The computed steps of TaylorSeer's and Spectrum's schedules."""
    decisions = schedule(IntervalPolicy(warm_up, interval, growth, Grid(steps)), Grid(steps))
    return sum(decision.compute for decision in decisions)


def mag_settings(ratios: Sequence[Ratios], budgets: Budgets) -> dict[int, list[MagSettings]]:
    """MagCache settings with different schedules for each budget, found without running the model."""
    found: dict[int, dict[tuple[Schedule, ...], MagSettings]] = {budget: {} for budget in budgets}
    for retention, skip in product(_RETENTIONS, _SKIPS):
        tried = [(t, tuple(_schedule(branch, t, skip, retention) for branch in ratios)) for t in _THRESHOLDS]
        for budget in budgets:
            within = ((t, schedules) for t, schedules in tried if sum(map(sum, schedules)) <= budget * len(schedules))
            for threshold, schedules in islice(within, 1):
                found[budget].setdefault(schedules, (threshold, skip, retention))
    return {budget: _nearest(settings, budget) for budget, settings in found.items()}


def _nearest(settings: dict[tuple[Schedule, ...], MagSettings], budget: int) -> list[MagSettings]:
    """Settings less than one step under the budget; if there are none, all."""
    near = [
        setting for schedules, setting in settings.items() if sum(map(sum, schedules)) > (budget - 1) * len(schedules)
    ]
    return near or list(settings.values())


def _schedule(ratios: Ratios, threshold: float, skip: int, retention: float) -> Schedule:
    policy = MagCachePolicy(threshold, skip, retention, ratios, Grid(len(ratios)))
    state = policy.start()
    return tuple(policy.decide(step, None, state).compute for step in range(len(ratios)))


def diffusers_mag_ratios(bench: Bench, sampling: Sampling) -> Ratios:
    """The ratios that diffusers' calibration prints for the conditional branch, which ends first."""
    printed = io.StringIO()
    transformer = bench.pipe.transformer
    transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=sampling.steps))
    try:
        with contextlib.redirect_stdout(printed):
            bench.generate_batch(bench.calibration_prompts[: bench.scale.calibrated_on], 0, sampling)
    finally:
        transformer.disable_cache()
    lists: list[Any] = re.findall(r"^\[[\d.,\se+-]*\]$", printed.getvalue(), re.MULTILINE)
    return tuple(json.loads(lists[0]))


def _intervals(steps: int, budget: int) -> Iterator[tuple[int, int]]:
    """Warm-up steps and consecutive held steps of schedules with at most `budget` computed steps."""
    for warm_up in _warm_ups(budget):
        longest = next((n for n in range(1, steps) if warm_up + (steps - warm_up) // (n + 1) <= budget), None)
        if longest is not None:
            yield warm_up, longest


def _warm_ups(budget: int) -> list[int]:
    """Numbers of warm-up steps, at most half of the budget."""
    return [warm_up for warm_up in _WARM_UPS if warm_up <= max(1, budget // 2)]


def _interval(steps: int, begin: int, budget: int) -> int:
    """The shortest TaylorSeer interval with at most `budget` computed steps; the first held step is `begin`."""
    counts = {n: begin + len(range(begin + 1, steps, n)) for n in range(1, steps + 1)}
    return next((n for n, count in counts.items() if count <= budget), steps)
