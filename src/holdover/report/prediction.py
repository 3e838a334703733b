"""The PSNR that a profile predicts for plans, and what the plans that were tried achieved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ..metrics import Summary
from ..plan import TuningResult
from ..plan.config import Target
from ..plan.planner import search_profile
from ..profiles import Profile


@dataclass(frozen=True)
class Trial:
    """One plan on held-out prompts: the expected PSNR, and what was measured of the metric of the target."""

    computed: int
    expected: float | None
    p10: float
    worst: float
    images: int
    passed: bool


@dataclass(frozen=True)
class Prediction:
    """The frontier that a profile predicts: `psnr` is the 10th percentile of PSNR for every budget below all steps.

    `trials` are the plans that were tried to meet `target`, `certified` is the number of computed steps of the plan
    that is certified for it, and `words` describe the certificate.
    """

    steps: int
    psnr: tuple[tuple[int, float], ...]
    target: Target
    trials: tuple[Trial, ...] = ()
    certified: int | None = None
    words: str = ""

    @classmethod
    def of(cls, tuned: TuningResult, target: str) -> Self:
        """The prediction of a profile, with the outcome of tuning it to a target."""
        trials = tuple(
            Trial(len(tried.computed), tried.expected, summary.p10, summary.worst, summary.count, tried.passed)
            for tried, summary in ((tried, Summary.of(tried.values)) for tried in tuned.tried)
        )
        certified = None if tuned.certificate is None else len(tuned.certificate.computed)
        steps = len(tuned.profile.facts.noise)
        return cls(steps, predict_psnr(tuned.profile), Target.parsed(target), trials, certified, str(tuned))

    def at(self, computed: float | None) -> float | None:
        """The expected PSNR of a plan with this number of computed steps; None where it is unknown."""
        return next((value for count, value in self.psnr if count == computed), None)


def predict_psnr(profile: Profile) -> tuple[tuple[int, float], ...]:
    """The expected 10th percentile of PSNR by computed steps; empty for a profile without an offset to dB."""
    offset = profile.facts.psnr_offset
    if offset is None:
        return ()
    frontier = search_profile(profile).frontier
    return tuple((count, choice.psnr(offset)) for count, choice in frontier.items() if choice.cost > 0)
