"""Other methods at a number of computed steps, each with the best settings that a search finds for it.

Counts are of steps on which all blocks ran. Held steps are not free: first-block methods (DBCache, first-block) run
their first blocks, tea_cache runs the first block's modulation, and diffusers' TaylorSeer by default holds attention
alone. None of that is charged to them.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig

from holdover.grid import Grid
from holdover.policies.magcache import MagCachePolicy

from .bench import Bench, Course, Row
from .search import Pool, bisect, spread
from .ways import Way, cached, hooked

ALWAYS = 1e6  # a threshold that nothing passes
_MASKS = ("ultra", "fast", "medium", "slow")
_WARM_UPS = (1, 2, 3, 4, 6, 10, 14)
_SKIPS = (1, 2, 3, 4, 5, 6, 8, 12, 49)
_RETENTIONS = (0.02, 0.06, 0.1, 0.2)
_THRESHOLDS = tuple(0.001 * 1.12**power for power in range(80))
Budgets = Sequence[int]
Ratios = tuple[float, ...]
Strip = tuple[bool, ...]
Magnitude = tuple[float, int, float]


def tea_cache(bench: Bench, course: Course, budgets: Budgets) -> list[Row]:
    """TeaCache with coefficients of this model, its threshold searched."""
    pool, file = Pool(bench, course), bench.profile_file(course)
    bisect(pool, lambda t: cached("tea_cache", "tea_cache", rel_l1_thresh=t, profile=file), budgets, (1e-3, 30.0))
    return pool.rows(budgets)


def mag_cache(bench: Bench, course: Course, budgets: Budgets) -> list[Row]:
    """MagCache with ratios of this model; threshold, longest hold and retention searched."""
    pool, profile = Pool(bench, course), dict(bench.profile(course).facts.mag_cache)["transformer"]
    ratios = [values.ratios for _, values in profile.branches]
    file = bench.profile_file(course)

    def make(threshold: float, skip: int, retention: float) -> Way:
        settings = {"mag_threshold": threshold, "mag_max_skip_steps": skip, "mag_retention_ratio": retention}
        return cached("mag_cache", "mag_cache", profile=file, **settings)

    for found in magnitudes(ratios, budgets).values():
        pool.add_all(spread([make(*setting) for setting in found], bench.scale.tries))
    return pool.rows(budgets)


def diffusers_mag(bench: Bench, course: Course, budgets: Budgets) -> list[Row]:
    """diffusers' MagCache, calibrated by itself."""
    pool, ratios = Pool(bench, course), own_ratios(bench, course)

    def make(threshold: float, skip: int, retention: float) -> Way:
        settings = {"threshold": threshold, "max_skip_steps": skip, "retention_ratio": retention}
        fixed = {"num_inference_steps": course.steps, "mag_ratios": ratios}
        return hooked("diffusers MagCache", settings, lambda: MagCacheConfig(**settings, **fixed))

    for found in magnitudes([ratios], budgets).values():
        pool.add_all(spread([make(*setting) for setting in found], bench.scale.tries))
    return pool.rows(budgets)


def diffusers_first_block(bench: Bench, course: Course, budgets: Budgets) -> list[Row]:
    """diffusers' first-block cache, its threshold searched."""
    pool = Pool(bench, course)

    def make(threshold: float) -> Way:
        settings = {"threshold": threshold}
        return hooked("diffusers first-block", settings, lambda: FirstBlockCacheConfig(**settings))

    bisect(pool, make, budgets, (1e-3, 3.0))
    return pool.rows(budgets)


def diffusers_taylorseer(bench: Bench, course: Course, budgets: Budgets) -> list[Row]:
    """diffusers' TaylorSeer in single precision: order and variant first, then where holding begins."""
    pool = Pool(bench, course)

    def make(budget: int, begin: int, order: int, lite: bool) -> Way:
        interval = _interval(course.steps, begin, budget)
        settings = {"cache_interval": interval, "disable_cache_before_step": begin, "max_order": order}
        more = {"use_lite_mode": lite, "taylor_factors_dtype": torch.float32}
        config = lambda: TaylorSeerCacheConfig(**settings, **more)  # noqa: E731
        return hooked("diffusers TaylorSeer", settings | {"use_lite_mode": lite}, config)

    for budget in budgets:
        kinds = list(product((1, 2), (False, True)))
        pool.add_all(make(budget, 3, order, lite) for order, lite in kinds)
        chosen = pool.best(budget).way.settings
        begins = _warm_ups(budget)[: bench.scale.tries]
        pool.add_all(make(budget, begin, chosen["max_order"], chosen["use_lite_mode"]) for begin in begins)
    return pool.rows(budgets)


def cache_dit(bench: Bench, course: Course, budgets: Budgets) -> list[Row]:
    """cache-dit's DBCache alone and with TaylorSeer of two orders: paced by counting, and by its threshold."""
    plain = Pool(bench, course)
    _add_scheduled(plain, budgets, None)
    found = []
    for warm_up in (1, 4)[: bench.scale.tries]:
        make = partial(db_cache, None, warm_up, -1)
        found += [(warm_up, threshold) for threshold in bisect(plain, make, budgets, (1e-3, 3.0))]
    rows = plain.rows(budgets)
    for order in (1, 2):
        pool = Pool(bench, course)
        _add_scheduled(pool, budgets, order)
        pool.add_all(db_cache(order, warm_up, -1, threshold) for warm_up, threshold in found)
        rows += pool.rows(budgets)
    return rows


def db_cache(order: int | None, warm_up: int, longest: int, threshold: float, **more: Any) -> Way:
    """DBCache with its settings, and TaylorSeer of that order where one is given."""
    title = "cache_dit DBCache" if order is None else f"cache_dit DBCache + TaylorSeer {order}"
    taylor = {} if order is None else {"enable_taylorseer": True, "taylorseer_order": order}
    settings = {"max_warmup_steps": warm_up, "max_continuous_cached_steps": longest, **taylor, **more}
    return cached(title, "cache_dit", residual_diff_threshold=threshold, **settings)


def _add_scheduled(pool: Pool, budgets: Budgets, order: int | None) -> None:
    """Settings that compute the same steps for every picture: the library's own masks, and regular paces."""
    for mask in _MASKS[: pool.bench.scale.tries]:
        pool.add(db_cache(order, 1, -1, ALWAYS, scm_steps_mask_policy=mask, scm_steps_policy="static"))
    for budget in budgets:
        paces = list(_paces(pool.course.steps, budget))[: pool.bench.scale.tries]
        pool.add_all(db_cache(order, warm_up, longest, ALWAYS) for warm_up, longest in paces)


def magnitudes(ratios: Sequence[Ratios], budgets: Budgets) -> dict[int, list[Magnitude]]:
    """MagCache settings with different schedules for each budget, found without running the model."""
    found: dict[int, dict[tuple[Strip, ...], Magnitude]] = {budget: {} for budget in budgets}
    for retention, skip in product(_RETENTIONS, _SKIPS):
        tried = [(t, tuple(_strip(branch, t, skip, retention) for branch in ratios)) for t in _THRESHOLDS]
        for budget in budgets:
            within = ((t, strips) for t, strips in tried if sum(map(sum, strips)) <= budget * len(strips))
            for threshold, strips in islice(within, 1):
                found[budget].setdefault(strips, (threshold, skip, retention))
    return {budget: _nearest(settings, budget) for budget, settings in found.items()}


def _nearest(settings: dict[tuple[Strip, ...], Magnitude], budget: int) -> list[Magnitude]:
    """Those that compute less than one step under the budget; where none does, all."""
    near = [setting for strips, setting in settings.items() if sum(map(sum, strips)) > (budget - 1) * len(strips)]
    return near or list(settings.values())


def _strip(ratios: Ratios, threshold: float, skip: int, retention: float) -> Strip:
    policy = MagCachePolicy(threshold, skip, retention, ratios, Grid(len(ratios)))
    state = policy.start()
    return tuple(policy.decide(step, None, state).compute for step in range(len(ratios)))


def own_ratios(bench: Bench, course: Course) -> Ratios:
    """The ratios that diffusers' own calibration prints for the conditional branch, which ends first."""
    printed = io.StringIO()
    transformer = bench.pipe.transformer
    transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=course.steps))
    try:
        with contextlib.redirect_stdout(printed):
            bench.generate(bench.calibration_prompts[: bench.scale.calibrated_on], 0, course)
    finally:
        transformer.disable_cache()
    lists: list[Any] = re.findall(r"^\[[\d.,\se+-]*\]$", printed.getvalue(), re.MULTILINE)
    return tuple(json.loads(lists[0]))


def _paces(steps: int, budget: int) -> Iterator[tuple[int, int]]:
    """Warm-up steps, and how many are held in a row after them, for schedules of at most that many computed steps."""
    for warm_up in _warm_ups(budget):
        longest = next((n for n in range(1, steps) if warm_up + (steps - warm_up) // (n + 1) <= budget), None)
        if longest is not None:
            yield warm_up, longest


def _warm_ups(budget: int) -> list[int]:
    """Steps at the start that are always computed: at most half of the budget."""
    return [warm_up for warm_up in _WARM_UPS if warm_up <= max(1, budget // 2)]


def _interval(steps: int, begin: int, budget: int) -> int:
    """The shortest interval of TaylorSeer with at most that many computed steps; the first held step is `begin`."""
    counts = {n: begin + len(range(begin + 1, steps, n)) for n in range(1, steps + 1)}
    return next((n for n, count in counts.items() if count <= budget), steps)
