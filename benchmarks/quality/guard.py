"""What the guard does: nothing on ordinary prompts, something under other weights, and what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from holdover.errors import HoldoverWarning

from .bench import Bench, Course
from .plans import plan
from .ways import Way


def ordinary(bench: Bench) -> dict[str, Any]:
    """Computed steps, nearness and time of the plans with the guard on and off, by turns."""
    course, budgets = Course(bench.scale.steps), bench.scale.probed
    return {"ordinary": [_both(bench, course, budget) | _seconds(bench, course, budget) for budget in budgets]}


def foreign(bench: Bench) -> dict[str, Any]:
    """The same where every weight of the transformer is off by some part: is it noticed, before and while drawing?"""
    found = []
    for noise in bench.scale.noises:
        with disturbed(bench.pipe.transformer, noise):
            course = Course(bench.scale.steps, weights=f"off by {noise:.0%}")
            found += [{"noise": noise} | _both(bench, course, budget) for budget in bench.scale.probed]
    return {"foreign": found}


def _both(bench: Bench, course: Course, budget: int) -> dict[str, Any]:
    on, off = _ways(bench, course, budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldoverWarning)
        rows = {"guard on": bench.row(on, course, budget), "guard off": bench.row(off, course, budget)}
    said = sorted({str(warning.message) for warning in caught if issubclass(warning.category, HoldoverWarning)})
    kept = ("computed", "psnr", "ssim")
    return {
        "wanted": budget,
        **{name: {key: row[key] for key in kept} for name, row in rows.items()},
        "noticed_by_fingerprint": any("was measured" in text for text in said),
        "noticed_by_guard": any("less predictable" in text for text in said),
        "said": said,
    }


def _seconds(bench: Bench, course: Course, budget: int) -> dict[str, float]:
    """For one picture, by turns, without the batch in which the plan is made; meaningful where no step was added."""
    on, off = _ways(bench, course, budget)
    turns = [(bench.draw(on, course).seconds, bench.draw(off, course).seconds) for _ in range(bench.scale.repeats)]
    return {"seconds_on": round(median(t[0] for t in turns), 6), "seconds_off": round(median(t[1] for t in turns), 6)}


def _ways(bench: Bench, course: Course, budget: int) -> tuple[Way, Way]:
    profile = bench.profile(Course(course.steps))
    return plan(profile, guard=True, budget=budget), plan(profile, guard=False, budget=budget)


@contextmanager
def disturbed(transformer: torch.nn.Module, noise: float) -> Iterator[None]:
    """Every weight times one plus a little noise, for as long as the block lasts."""
    own = {name: parameter.detach().clone() for name, parameter in transformer.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator).to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in transformer.named_parameters():
                parameter.copy_(own[name])
