"""The model in the box on two cores: a plan beside no cache, by turns in one process, and a first picture."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

import holdover

from ..first_image import turn as first_image
from ..report import provenance, save
from .box import BUDGET, STEPS, WARM, drawn, loaded
from .results import rounded

THREADS = 2


def on_the_processor(out: Path, turns: int = 3, steps: int = STEPS, threads: int = THREADS) -> None:
    """Measure, write the result file, and print it.

    A plan is made in its first picture, which is timed apart; the picture after it is what every further one takes. The
    least ratio of the turns is kept beside the median, for other work on the machine stretches what runs at that time.
    """
    torch.set_num_threads(threads)
    pipe = loaded("cpu")
    taken = [_turn(pipe, steps) for _ in range(turns)]
    ratios = [each["uncached_s"] / each["plan_s"] for each in taken]
    figures = provenance(threads) | {
        "steps": steps,
        "budget": BUDGET,
        "turns": taken,
        "ratio": {"median": median(ratios), "least": min(ratios)},
        "first_picture": first_image(threads),
    }
    save("speed_cpu", rounded(figures), out)
    print(json.dumps(rounded(figures)))


def _turn(pipe: Any, steps: int) -> dict[str, float | int]:
    """Seconds of one picture without a cache, of the picture in which a plan is made, and of the one after it."""
    drawn(pipe, min(WARM, steps))
    uncached = drawn(pipe, steps)
    with holdover.enable(pipe, "plan", budget=BUDGET, guard=False) as cache:
        drawn(pipe, min(WARM, steps))
        first, after = drawn(pipe, steps), drawn(pipe, steps)
        last = cache.stats().last
        assert last is not None
        computed = last.computed_total // len(last.branches)
    return {"uncached_s": uncached, "plan_first_s": first, "plan_s": after, "computed": computed}
