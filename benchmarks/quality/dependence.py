"""What a plan owes to its calibration: generations, guidance, steps, shift and scheduler, on prompts never seen."""

from __future__ import annotations

from typing import Any

from holdover.profiles import Profile

from ..speed.methods import MAG
from .bench import Bench, Course, Row
from .plans import plan
from .ways import cached


def generations(bench: Bench) -> dict[str, Any]:
    """Calibrated on few and on more generations."""
    course = Course(bench.scale.steps)
    return {
        "rows": [
            row
            for count in bench.scale.generations
            for row in _rows(bench, course, bench.profile(course, count), f"{count} generations")
        ]
    }


def guidance(bench: Bench) -> dict[str, Any]:
    """Calibrated at the usual guidance and used at another, beside a profile of that guidance."""
    own, rows = Course(bench.scale.steps), []
    for scale in bench.scale.guidances:
        course = Course(bench.scale.steps, scale)
        rows += _rows(bench, course, bench.profile(own), f"guidance {own.guidance:g} used at {scale:g}")
        rows += _rows(bench, course, bench.profile(course), f"guidance {scale:g} native")
    return {"rows": rows}


def steps(bench: Bench) -> dict[str, Any]:
    """Calibrated at 50 steps and used at fewer, beside a profile of those."""
    own, rows = Course(bench.scale.steps), []
    for count, budgets in bench.scale.other_steps:
        course = Course(count)
        rows += _rows(bench, course, bench.profile(own), f"{own.steps} steps used at {count}", budgets)
        rows += _rows(bench, course, bench.profile(course), f"{count} steps native", budgets)
    return {"rows": rows}


def schedulers(bench: Bench) -> dict[str, Any]:
    """Calibrated under Euler and used under others; the reference is uncached under that same scheduler."""
    own, rows = Course(bench.scale.steps), []
    for name in ("Euler, shift 3", "DPM-Solver++", "UniPC"):
        course = Course(bench.scale.steps, scheduler=name)
        rows += _rows(bench, course, bench.profile(own), f"Euler used under {name}")
        rows += _rows(bench, course, bench.profile(course), f"{name} native")
    return {"rows": rows}


def residuals(bench: Bench) -> dict[str, Any]:
    """Residuals held as they are, in eight bits, and in the host's memory."""
    course = Course(bench.scale.steps)
    common: dict[str, Any] = {"profile": bench.profile_file(course)}
    methods = {
        "mag_cache": MAG,
        "tea_cache": {"rel_l1_thresh": 0.4},
    }
    return {
        "rows": [
            bench.row(cached(f"{name}, held in {place}", name, hold_in=place, **common, **settings), course, 0)
            for name, settings in methods.items()
            for place in ("device", "fp8", "cpu")
        ]
    }


def _rows(
    bench: Bench, course: Course, profile: Profile, title: str, budgets: tuple[int, ...] | None = None
) -> list[Row]:
    budgets = budgets or bench.scale.probed
    return [bench.row(plan(profile, title, budget=budget), course, budget) for budget in budgets]
