"""Profiles of tiny pipelines, measured once for all tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import holdover
from tiny.pipelines import PIPELINES
from tiny.pipelines_image import TinyPipeline, quiet


def keywords(tiny: TinyPipeline, **call: Any) -> dict[str, Any]:
    """The keywords of a call that a calibration may repeat with steps and seeds of its own."""
    own = ("num_inference_steps", "generator")
    return {name: value for name, value in tiny.call(**call).items() if name not in own}


@cache
def calibrated(name: str, steps: int = 12, count: int = 2) -> holdover.Profile:
    """A profile of `count` generations with the seeds 0, 1, ..."""
    tiny = PIPELINES[name]
    with quiet():
        return holdover.calibrate(tiny.build(), [keywords(tiny)] * count, steps, effort="quick", progress=False)
