"""A plan for the generation at hand: from the settings, a profile if there is one, and the scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..grid import Grid
from ..profiles import Certificate, Profile, Schedule
from .config import DEFAULT_BUDGET, PlanConfig
from .kernel import Array, Kernel
from .plan import Plan
from .planner import Choice, Planner
from .response import euler, response_of
from .rollout import DEPTH, Course, Ranges, Weights, least_squares
from .schedules import growing
from .target import Target, steps_for


@dataclass(frozen=True, eq=False)
class Setting:
    """The kind of generation a plan is for: its grid, the steps that run, and the scheduler."""

    grid: Grid
    ranges: Ranges
    scheduler: Any = None

    @property
    def noise(self) -> Array:
        """The noise level of each step; even steps where only their number is known."""
        count = self.grid.count
        return np.array(self.grid.noise) if self.grid.noise else np.linspace(1.0, 1.0 / count, count)

    @property
    def length(self) -> int:
        """How many steps run."""
        return sum(last - first + 1 for first, last in self.ranges)

    def response(self) -> Array:
        """Where the scheduler takes the latents; Euler's way where it cannot be asked."""
        first = self.ranges[0][0]
        found = (
            None if self.scheduler is None else response_of(self.scheduler, self.grid.between(first, self.grid.last))
        )
        return euler(self.noise, first) if found is None else found


class PlanMaker:
    """Makes plans by one set of settings."""

    def __init__(self, settings: PlanConfig, profile: Profile | None) -> None:
        self._settings, self._profile = settings, profile

    @property
    def fitted(self) -> bool:
        """Whether weights are fitted to what was measured."""
        return self._profile is not None and self._settings.predictor in ("auto", "least_squares")

    def kernel(self, setting: Setting) -> Kernel | None:
        """What was measured, on the grid at hand."""
        profile = self._profile
        if profile is None:
            return None
        return Kernel(np.array(profile.facts.noise), profile.grams, profile.growth).on(setting.noise)

    def planner(self, setting: Setting) -> Planner | None:
        """The planner for a kind of generation; None without a profile."""
        kernel = self.kernel(setting)
        return None if kernel is None else Planner(Course(kernel, setting.response()), setting.ranges)

    def plan(self, setting: Setting) -> Plan:
        """The plan the settings ask for."""
        planner = self.planner(setting)
        choice = self._chosen(setting, planner)
        notes = (self._told(choice, setting),)
        return Plan(choice.computed, self.weights(setting, planner, choice.computed), notes)

    def weights(self, setting: Setting, planner: Planner | None, computed: Collection[int]) -> dict[int, Weights]:
        """The weights of the held steps of a schedule; none where Newton's extrapolation serves."""
        if self._settings.predictor == "hold":
            return _held(computed, setting.ranges)
        if planner is None or not self.fitted:
            return {}
        tried = next((known for known in self._tried(setting) if known.computed == tuple(computed)), None)
        return planner.weights(computed) if tried is None else _weights_of(tried, setting.ranges)

    def seam_weights(self, setting: Setting, transformer: str, computed: Collection[int]) -> dict[int, Weights]:
        """The same for residuals at the seam, each fitted to the residual it stands for."""
        if self._settings.predictor == "hold" or not self.fitted or self._profile is None:
            return _held(computed, setting.ranges) if self._settings.predictor == "hold" else {}
        seams = self._profile.seams.get(transformer)
        if seams is None:
            return {}
        growth = np.zeros((len(seams), seams.shape[1] + 1))
        gram = Kernel(np.array(self._profile.facts.noise), seams, growth).on(setting.noise).mean
        anchors = _anchors(computed, setting.ranges)
        return {
            step: least_squares(before[-2:], step, gram) for step, before in anchors.items() if gram[step, step] > 0
        }

    def _chosen(self, setting: Setting, planner: Planner | None) -> Choice:
        settings = self._settings
        if settings.schedule is not None:
            return _given(settings.schedule, setting, planner)
        if settings.target is not None:
            return self._aimed(Target.parsed(settings.target), setting, planner)
        budget = steps_for(DEFAULT_BUDGET if settings.budget is None else settings.budget, setting.length)
        if planner is None:
            return Choice(_windows(setting, budget), "growing window, nothing measured", 0.0)
        tried = next((known for known in self._tried(setting) if len(known.computed) == budget), None)
        if tried is not None:
            return planner.judged(tried.computed, tried.origin)
        return planner.frontier[max(budget, len(setting.ranges))]

    def _tried(self, setting: Setting) -> list[Schedule]:
        """The schedules that were tried on the model itself, on this grid and with this scheduler."""
        facts = None if self._profile is None else self._profile.facts
        return [] if facts is None else [s for s in facts.schedules if _applies(s, setting)]

    def _aimed(self, target: Target, setting: Setting, planner: Planner | None) -> Choice:
        """The fastest schedule that is certified for a target, or expected to meet it."""
        if planner is None or self._profile is None:
            raise ConfigError(f"{target} needs a profile: measure one with holdover.calibrate(pipe, ...).")
        certificate = self.certificate(target, setting)
        if certificate is not None:
            return planner.judged(certificate.computed, f"certified for {certificate.target}")
        offset = self._profile.facts.psnr_offset
        if target.metric != "psnr" or offset is None:
            raise ConfigError(f"Nothing is certified for {target} here: run holdover.tune(pipe, profile, ...) first.")
        return next(c for c in planner.frontier.values() if c.psnr(offset) >= target.least)

    def certificate(self, target: Target, setting: Setting) -> Certificate | None:
        """The certificate of the fastest plan that meets a target on this grid."""
        known = () if self._profile is None else self._profile.facts.certificates
        fitting = [c for c in known if _covers(Target.parsed(c.target), target) and _applies(c, setting)]
        return min(fitting, key=lambda c: len(c.computed), default=None)

    def _told(self, choice: Choice, setting: Setting) -> str:
        text = f"plan: {len(choice.computed)} of {setting.length} steps computed ({choice.origin})"
        offset = None if self._profile is None else self._profile.facts.psnr_offset
        if offset is None or choice.cost <= 0:
            return text
        return f"{text}, expected to keep {choice.psnr(offset):.0f} dB in nine pictures of ten"


def _covers(certified: Target, wanted: Target) -> bool:
    return certified.metric == wanted.metric and certified.least >= wanted.least


def _applies(tried: Schedule | Certificate, setting: Setting) -> bool:
    """Whether what was tried is what runs now: the same grid and scheduler, all steps, in one transformer."""
    return (
        setting.ranges == ((0, setting.grid.count - 1),)
        and tried.scheduler == type(setting.scheduler).__name__
        and len(tried.noise) == setting.grid.count
        and np.allclose(tried.noise, setting.noise)
    )


def _weights_of(tried: Schedule, ranges: Ranges) -> dict[int, Weights]:
    """The weights of a schedule that was tried, by held step."""
    left, found = list(tried.weights), {}
    for step, before in sorted(_anchors(tried.computed, ranges).items()):
        anchors = tuple(before[-DEPTH:])
        found[step] = Weights(anchors, tuple(left[: len(anchors)]))
        del left[: len(anchors)]
    return found


def _given(schedule: tuple[int, ...], setting: Setting, planner: Planner | None) -> Choice:
    """The user's own schedule; the first step of each range is computed in any case."""
    last = setting.ranges[-1][1]
    if max(schedule) > last:
        raise ConfigError(f"The schedule names step {max(schedule)}, but the last step of this generation is {last}.")
    begun = {first for first, _ in setting.ranges}
    computed = tuple(sorted(begun | {step for step in schedule if step >= setting.ranges[0][0]}))
    return Choice(computed, "given", 0.0) if planner is None else planner.judged(computed, "given")


def _windows(setting: Setting, budget: int) -> tuple[int, ...]:
    """A growing window over all steps that run; the first step of each range is computed in any case."""
    first = setting.ranges[0][0]
    spread = {first + step for step in growing(setting.length, budget)}
    return tuple(sorted(spread | {start for start, _ in setting.ranges}))


def _anchors(computed: Collection[int], ranges: Ranges) -> dict[int, list[int]]:
    """The computed steps of its own range before each held step."""
    return {
        step: sorted(s for s in computed if first <= s < step)
        for first, last in ranges
        for step in range(first, last + 1)
        if step not in computed
    }


def _held(computed: Collection[int], ranges: Ranges) -> dict[int, Weights]:
    return {step: Weights((before[-1],), (1.0,)) for step, before in _anchors(computed, ranges).items()}
