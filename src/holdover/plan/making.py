"""A plan for the generation at hand: from the settings, a profile if there is one, and the scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import ConfigError
from ..profiles import Certificate, MeasuredPlan, Profile
from .config import DEFAULT_BUDGET, PlanConfig
from .intake import Intake, intake_of
from .kernel import Array, Kernel
from .plan import Plan, digest
from .planner import Choice, Planner
from .rollout import DEPTH, Course, Ranges, Weights, least_squares
from .schedules import growing
from .setting import Setting
from .target import Target, steps_for

_SAME = 1e-2  # a mix measured in bfloat16 is off by less


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of generation, with what was measured brought to its grid; kept from request to request.

    `branches` are those with weights of their own; none where all have the same. `together` is what was measured with
    the branches merged. `intake` is None where the scheduler gets outputs as they are.
    """

    setting: Setting
    kernel: Kernel | None
    branches: tuple[str, ...] = ()
    together: Kernel | None = None
    intake: Intake | None = None

    @cached_property
    def planner(self) -> Planner | None:
        """Plans on what was measured."""
        return None if self.kernel is None else Planner(Course(self.kernel, self.response), self.setting.ranges)

    @cached_property
    def response(self) -> Array:
        """How much of each output is in each latent."""
        response = self.setting.response
        return response if self.intake is None else self.intake.response(response)

    @cached_property
    def merged(self) -> Kind:
        """The same with one set of weights for whatever branches there are."""
        return Kind(self.setting, self.together, intake=self.intake) if self.branches else self


def kind_of(setting: Setting, profile: Profile | None) -> Kind:
    """Bring what was measured to the grid and the guidance at hand.

    A loop of one's own may run both branches where the pipeline says that one is enough: they are mixed as measured.
    """
    if profile is None:
        return Kind(setting, None)
    facts = profile.facts
    mix = remixed(facts.mix, facts.guidance, setting.guidance)
    kernel = Kernel(np.array(facts.noise), profile.grams, profile.growth, mix).on(setting.noise)
    apart = kernel if all(mix) else replace(kernel, mix=facts.mix)
    return Kind(setting, apart, facts.branches, kernel.merged, intake_of(facts, setting.noise))


def remixed(mix: tuple[float, ...], measured: float | None, wanted: float | None) -> tuple[float, ...]:
    """The mix of two branches at another guidance: s and 1 - s for classifier-free guidance, else as it was.

    Some pipelines count guidance from 0, not from 1: theirs is 1 + s and -s.
    """
    if measured is None or wanted is None or len(mix) != 2 or not np.isclose(sum(mix), 1.0, atol=_SAME):
        return mix
    wanted = max(wanted, 1.0)  # below it pipelines run one branch
    for cond, more in ((0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0)):
        if np.isclose(mix[cond], measured + more, atol=_SAME):
            share = wanted + more
            return (share, 1 - share) if cond == 0 else (1 - share, share)
    return mix


class PlanMaker:
    """Makes plans by one set of settings."""

    def __init__(self, settings: PlanConfig, profile: Profile | None) -> None:
        self._settings, self._profile = settings, profile

    @property
    def fitted(self) -> bool:
        """Whether weights are fitted to what was measured."""
        return self._profile is not None and self._settings.predictor in ("auto", "least_squares")

    def plan(self, kind: Kind) -> Plan:
        """The plan the settings ask for."""
        choice = self._chosen(kind)
        return Plan(choice.computed, self.weights(kind, choice.computed), (self._told(choice, kind.setting),))

    def weights(self, kind: Kind, computed: Collection[int]) -> dict[int, Weights]:
        """The weights of the held steps of a schedule; none where Newton's extrapolation serves."""
        if self._settings.predictor == "hold":
            return _held(computed, kind.setting.ranges)
        if kind.planner is None or not self.fitted:
            return {}
        tried = next((known for known in self._tried(kind) if known.computed == tuple(computed)), None)
        return kind.planner.weights(computed) if tried is None else _weights_of(tried, kind.setting.ranges)

    def seam_weights(self, setting: Setting, transformer: str, computed: Collection[int]) -> dict[int, Weights]:
        """The same for residuals at the seam, each fitted to the residual it stands for."""
        if self._settings.predictor == "hold":
            return _held(computed, setting.ranges)
        seams = None if self._profile is None else self._profile.seams.get(transformer)
        if seams is None or self._profile is None or not self.fitted:
            return {}
        growth = np.zeros((len(seams), seams.shape[1] + 1))
        gram = Kernel(np.array(self._profile.facts.noise), seams, growth).on(setting.noise).mean
        anchors = {step: a for step, a in _anchors(computed, setting.ranges).items() if gram[step, step] > 0}
        return {step: least_squares(before[-2:], step, gram) for step, before in anchors.items()}

    def _chosen(self, kind: Kind) -> Choice:
        settings, setting = self._settings, kind.setting
        if settings.schedule is not None:
            return _given(settings.schedule, kind)
        if settings.target is not None:
            return self._aimed(Target.parsed(settings.target), kind)
        budget = steps_for(DEFAULT_BUDGET if settings.budget is None else settings.budget, setting.length)
        if kind.planner is None:
            return Choice(_windows(setting, budget), "growing window, nothing measured")
        tried = next((known for known in self._tried(kind) if len(known.computed) == budget), None)
        if tried is not None and self.fitted:
            return kind.planner.judged(tried.computed, tried.origin)
        return kind.planner.frontier[max(budget, len(setting.ranges))]

    def _tried(self, kind: Kind) -> list[MeasuredPlan]:
        """The schedules that were tried on the model itself, on this grid, with this scheduler and these branches."""
        known = () if self._profile is None else self._profile.facts.schedules
        return [s for s in known if s.branches in ((), kind.branches) and _applies(s, kind.setting)]

    def _aimed(self, target: Target, kind: Kind) -> Choice:
        """The fastest schedule that is certified for a target, or expected to meet it."""
        if kind.planner is None or self._profile is None:
            raise ConfigError(f"{target} needs a profile: measure one with holdover.calibrate(pipe, ...).")
        certificate = self.certificate(target, kind)
        if certificate is not None:
            return kind.planner.judged(certificate.computed, f"certified for {certificate.target}")
        offset = self._profile.facts.psnr_offset
        if target.metric != "psnr" or offset is None:
            raise ConfigError(f"Nothing is certified for {target} here: run holdover.tune(pipe, profile, ...) first.")
        return next(c for c in kind.planner.frontier.values() if c.psnr(offset) >= target.least)

    def certificate(self, target: Target, kind: Kind) -> Certificate | None:
        """The certificate of the fastest plan that meets a target; it is for that very plan, and so used."""
        known = () if self._profile is None else self._profile.facts.certificates
        fitting = [c for c in known if _covers(c, target) and self._holds(c, kind)]
        return min(fitting, key=lambda c: len(c.computed), default=None)

    def _holds(self, certificate: Certificate, kind: Kind) -> bool:
        """Whether what is certified is what would run: grid, scheduler, guidance, adapters, schedule and weights."""
        setting = kind.setting
        return (
            self.fitted
            and self._settings.quantity == "output"
            and _applies(certificate, setting)
            and certificate.adapters == setting.adapters
            and certificate.plan == digest(self.weights(kind, certificate.computed))
        )

    def _told(self, choice: Choice, setting: Setting) -> str:
        text = f"plan: {len(choice.computed)} of {setting.length} steps computed ({choice.origin})"
        offset = None if self._profile is None else self._profile.facts.psnr_offset
        if offset is None or choice.error <= 0 or not self.fitted:
            return text
        return f"{text}, expected to keep {choice.psnr(offset):.0f} dB in nine pictures of ten"


def _covers(certificate: Certificate, wanted: Target) -> bool:
    certified = Target.parsed(certificate.target)
    return certified.metric == wanted.metric and certified.least >= wanted.least


def _applies(tried: MeasuredPlan | Certificate, setting: Setting) -> bool:
    """Whether what was tried is what runs now: the same grid, all steps of it, the same scheduler and guidance."""
    first, last = setting.ranges[0][0], setting.last
    return (
        tried.scheduler == setting.scheduler
        and (setting.guidance is None or tried.guidance in (None, setting.guidance))
        and (first, last) == (0, len(setting.noise) - 1)
        and all(first in tried.computed for first, _ in setting.ranges)
        and len(tried.noise) == len(setting.noise)
        and np.allclose(tried.noise, setting.noise)
    )


def _weights_of(tried: MeasuredPlan, ranges: Ranges) -> dict[int, Weights]:
    """The weights of a schedule that was tried, by held step."""
    left, found = list(tried.weights), {}
    for step, before in sorted(_anchors(tried.computed, ranges).items()):
        anchors = tuple(before[-DEPTH:])
        count = len(anchors) * max(1, len(tried.branches))
        found[step] = Weights(anchors, tuple(left[:count]))
        del left[:count]
    return found


def _given(schedule: tuple[int, ...], kind: Kind) -> Choice:
    """The user's own schedule; the first step of each range is computed in any case."""
    ranges, last = kind.setting.ranges, kind.setting.last
    if max(schedule) > last:
        raise ConfigError(f"The schedule names step {max(schedule)}, but the last step of this generation is {last}.")
    begun = {first for first, _ in ranges}
    computed = tuple(sorted(begun | {step for step in schedule if step >= ranges[0][0]}))
    return Choice(computed, "given") if kind.planner is None else kind.planner.judged(computed, "given")


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
