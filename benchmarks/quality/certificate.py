"""Is a certificate kept? A plan certified on held-back prompts, tried on the test prompts."""

from __future__ import annotations

from typing import Any

import holdover
from holdover.metrics import METRICS, Summary, psnr
from holdover.plan import TuningResult
from holdover.plan.config import Target

from .bench import Bench, Course
from .plans import plan


def certificates(bench: Bench) -> dict[str, Any]:
    """The fastest certified plan for each target, and the share of test pictures that meet it."""
    return {"certificates": [_tried(bench, target) for target in bench.scale.targets]}


def _tried(bench: Bench, target: str) -> dict[str, Any]:
    course, tuned = Course(bench.scale.steps), _tuned(bench, target)
    found: dict[str, Any] = {"target": target, "in_words": str(tuned)}
    if tuned.certificate is None:
        return found
    drawn = bench.draw(plan(tuned.profile, target=target), course)
    values = psnr(drawn.pictures, bench.reference(course)).tolist()
    least = Target.parsed(target).least
    return found | {
        "schedule": list(tuned.certificate.computed),
        "computed": drawn.computed,
        "promised_share": tuned.certificate.share,
        "achieved_share": sum(value >= least for value in values) / len(values),
        METRICS["psnr"].name: Summary.of(values).as_dict(),
    }


def _tuned(bench: Bench, target: str) -> TuningResult:
    scale = bench.scale
    begin, end = scale.held_back
    return holdover.tune(
        bench.pipe,
        bench.profile(Course(scale.steps)),
        bench.calibration_prompts[begin:end],
        target,
        scale.confidence,
        share=scale.share,
        batch_size=scale.batch,
        progress=False,
    )
