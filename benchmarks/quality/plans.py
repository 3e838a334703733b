"""Plans, with and without a profile, and what needs no searching beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdover.plan.search import growing, uniform
from holdover.profiles import Profile

from .bench import Bench, Course, Row
from .verdict import PLAN, POLISHED
from .ways import Way, cached, fewer


def plan(profile: Profile, title: str = PLAN, guard: bool = False, **wanted: Any) -> Way:
    """A plan on a profile."""
    return cached(title, "plan", profile=profile, guard=guard, **wanted)


def planned(bench: Bench, course: Course, budgets: Sequence[int]) -> list[Row]:
    """Plans on a profile of the same steps, guard on and off."""
    profile = bench.profile(course)
    titles = {True: "plan", False: PLAN}
    return [
        bench.row(plan(profile, title, guard, budget=budget), course, budget)
        for guard, title in titles.items()
        for budget in budgets
    ]


def transferred(bench: Bench, course: Course, budgets: Sequence[int]) -> list[Row]:
    """Plans on a profile that was measured at another number of steps."""
    profile = bench.profile(Course(bench.scale.steps))
    title = f"{PLAN}, profile of {bench.scale.steps} steps"
    return [bench.row(plan(profile, title, budget=budget), course, budget) for budget in budgets]


def unmeasured(bench: Bench, course: Course, budgets: Sequence[int]) -> list[Row]:
    """Newton's extrapolation on a growing window, as a plan without a profile does it."""
    title, settings = "plan without a profile", {"predictor": "newton", "guard": False}
    ways = {b: cached(title, "plan", schedule=growing(course.steps, b), **settings) for b in budgets}
    return [bench.row(way, course, budget) for budget, way in ways.items()]


def held(bench: Bench, course: Course, budgets: Sequence[int]) -> list[Row]:
    """The last computed output, held evenly."""
    settings = {"predictor": "hold", "guard": False}
    ways = {b: cached("hold, uniform", "plan", schedule=uniform(course.steps, b), **settings) for b in budgets}
    return [bench.row(way, course, budget) for budget, way in ways.items()]


def fewer_steps(bench: Bench, course: Course, budgets: Sequence[int]) -> list[Row]:
    """No cache, fewer steps, of both orders."""
    return [bench.row(fewer(budget, order), course, budget) for order in (1, 2) for budget in budgets]


def polished(bench: Bench, course: Course, budgets: Sequence[int]) -> list[Row]:
    """Plans that were improved by trial on the model, on calibration prompts alone."""
    return [bench.row(plan(bench.polished(course, b), POLISHED, budget=b), course, b) for b in budgets]
