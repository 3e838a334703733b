"""What calibrating and planning cost."""

from __future__ import annotations

import time
from typing import Any

from holdover.plan.planner import search_profile
from holdover.profiles import Profile

from .bench import Bench, Course
from .ways import counted, uncached

FEW = 4  # generations: the calibration that `holdover.calibrate` makes unless more are asked for


def costs(bench: Bench) -> dict[str, Any]:
    """Calibration in generations, planning in seconds of one core."""
    course = Course(bench.scale.steps)
    return calibrating(bench, course) | planning(bench.profile(course)) | {"uncached_seconds": _uncached(bench, course)}


def calibrating(bench: Bench, course: Course) -> dict[str, Any]:
    """Forwards of a calibration on a few generations, over those of one uncached generation."""
    count = min(FEW, bench.scale.calibrated_on)
    begin = time.perf_counter()
    with counted(bench.pipe) as forwards:
        bench.profile(course, count)
        steps = forwards()
    generations = count * steps / course.steps
    return {
        "calibration": {
            "generations": count,
            "cost_in_generations": round(generations, 3),
            "over_the_generations": round(generations / count - 1, 4),
            "seconds": round(time.perf_counter() - begin, 2),
        }
    }


def planning(profile: Profile) -> dict[str, Any]:
    """CPU seconds of all threads for the schedules of all budgets, and for the weights of each on top."""
    search_profile(profile).frontier  # noqa: B018
    begin = time.process_time()
    planner = search_profile(profile)
    frontier = planner.frontier
    scheduled = time.process_time() - begin
    for choice in frontier.values():
        planner.weights(choice.computed)
    weighted = time.process_time() - begin - scheduled
    return {
        "planning": {
            "budgets": len(frontier),
            "schedules_seconds": round(scheduled, 4),
            "weights_seconds": round(weighted, 4),
        }
    }


def _uncached(bench: Bench, course: Course) -> float:
    return round(bench.draw(uncached(), course).seconds, 5)
