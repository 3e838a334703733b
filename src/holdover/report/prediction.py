"""What plans were expected to keep before any was run, and what those that were tried kept."""

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
    """One plan on held-back prompts: what was expected of nine pictures in ten, what they kept, and the worst."""

    computed: int
    expected: float | None
    kept: float
    worst: float
    pictures: int
    passed: bool


@dataclass(frozen=True)
class Prediction:
    """The frontier as a profile has it: `keeps` is the PSNR of nine pictures in ten, for every budget that holds.

    `trials` are the plans that were tried to meet `target`, and `certified` is how many steps the one computes that is
    certified for it, as `words` say.
    """

    steps: int
    keeps: tuple[tuple[int, float], ...]
    target: Target
    trials: tuple[Trial, ...] = ()
    certified: int | None = None
    words: str = ""

    @classmethod
    def of(cls, found: TuningResult, target: str) -> Self:
        """What a profile predicts, beside what tuning it to a target found."""
        trials = tuple(
            Trial(len(tried.computed), tried.expected, kept.p10, kept.worst, kept.count, tried.passed)
            for tried, kept in ((tried, Summary.of(tried.values)) for tried in found.tried)
        )
        certified = None if found.certificate is None else len(found.certificate.computed)
        steps = len(found.profile.facts.noise)
        return cls(steps, predicted(found.profile), Target.parsed(target), trials, certified, str(found))

    def at(self, computed: float | None) -> float | None:
        """What a plan is expected to keep that computes so many steps; None where that is not known."""
        return next((value for count, value in self.keeps if count == computed), None)


def predicted(profile: Profile) -> tuple[tuple[int, float], ...]:
    """The PSNR that nine pictures in ten are expected to keep, by computed steps; nothing without an offset to dB."""
    offset = profile.facts.psnr_offset
    if offset is None:
        return ()
    frontier = search_profile(profile).frontier
    return tuple((count, choice.psnr(offset)) for count, choice in frontier.items() if choice.cost > 0)
