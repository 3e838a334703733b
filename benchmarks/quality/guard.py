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


def ordinary(bench: Bench) -> dict[str, Any]:
    """Computed steps, nearness and time of the plans with the guard on and off, by turns."""
    return {"ordinary": [_both(bench, Course(bench.scale.steps), budget) for budget in bench.scale.probed]}


def foreign(bench: Bench) -> dict[str, Any]:
    """The same where every weight of the transformer is off by some part: is it noticed, before and while drawing?"""
    found = []
    for noise in bench.scale.noises:
        with disturbed(bench.pipe.transformer, noise):
            course = Course(bench.scale.steps, weights=f"off by {noise:.0%}")
            found += [{"noise": noise} | _both(bench, course, budget) for budget in bench.scale.probed]
    return {"foreign": found}


def _both(bench: Bench, course: Course, budget: int) -> dict[str, Any]:
    profile = bench.profile(Course(course.steps))
    on, off = (plan(profile, guard=guard, budget=budget) for guard in (True, False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldoverWarning)
        rows = {"guard on": bench.row(on, course, budget), "guard off": bench.row(off, course, budget)}
    said = sorted({str(warning.message) for warning in caught if issubclass(warning.category, HoldoverWarning)})
    seconds = [(bench.draw(on, course).seconds, bench.draw(off, course).seconds) for _ in range(bench.scale.repeats)]
    kept = ("computed", "psnr", "ssim")
    return {
        "wanted": budget,
        **{name: {key: row[key] for key in kept} for name, row in rows.items()},
        "noticed_by_fingerprint": any("was measured" in text for text in said),
        "noticed_by_guard": any("less predictable" in text for text in said),
        "said": said,
        "seconds_on": round(median(pair[0] for pair in seconds), 5),
        "seconds_off": round(median(pair[1] for pair in seconds), 5),
    }


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
