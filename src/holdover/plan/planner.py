"""From settings, a profile and a generation about to start to a plan.

`plan_problem` brings a profile's measurements to the noise levels and the guidance of the generation. `Planner` then
chooses a schedule and its weights: one that was tried on the model itself where the profile has it, else the best one
found by search.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ..errors import ConfigError, ProfileError
from ..profiles import Certificate, MeasuredPlan, PlannerOptions, Profile
from ..profiles.facts import COMFYUI
from ..profiles.targets import Target
from .config import DEFAULT_BUDGET, PlanConfig, steps_for
from .error_model import DEFAULT_OPTIONS, Array, ErrorModel, Measurements, Ranges, Weights, fit_output, held_steps
from .estimate import OutputTable
from .generation import GenerationSpec, Preconditioning, euler_response
from .search import CandidateSchedule, ScheduleSearch, cautious, growing

_MIX_TOLERANCE = 1e-2  # a branch mix measured in bfloat16 is off by less
_MOST_STEPS = 3  # times those measured: with 5, the model in the box kept 14 dB less than expected of nine in ten


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule and the weights of its held steps; `notes` say where it comes from and what quality to expect.

    `timestep_factors` multiply the transformer's timestep argument at computed steps.
    """

    computed: tuple[int, ...]
    weights: Mapping[int, Weights]
    notes: tuple[str, ...] = ()
    timestep_factors: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A hash of the weights and factors, rounded to six digits."""
        return digest_weights(self.weights, self.timestep_factors)


def digest_weights(weights: Mapping[int, Weights], timestep_factors: Mapping[int, float]) -> str:
    """A hash of a plan's weights and factors, rounded to six digits."""
    rounded: list[Any] = [(step, w.anchors, [f"{x:.6g}" for x in w.values]) for step, w in sorted(weights.items())]
    rounded += [(step, f"{factor:.6g}") for step, factor in sorted(timestep_factors.items())]
    return hashlib.sha256(str(rounded).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """A kind of generation with the profile's measurements on its grid; one is kept for many generations.

    `branches` are those with weights of their own, empty if all have the same weights. `merged_measurements` has the
    branches merged. `preconditioning` is None where the scheduler gets the model's outputs unchanged.
    """

    spec: GenerationSpec
    measurements: Measurements | None
    branches: tuple[str, ...] = ()
    merged_measurements: Measurements | None = None
    preconditioning: Preconditioning | None = None
    options: PlannerOptions = DEFAULT_OPTIONS

    @cached_property
    def response(self) -> Array:
        """How much of each of the model's outputs is in each latent."""
        response = self.spec.response
        return response if self.preconditioning is None else self.preconditioning.response(response)

    @cached_property
    def search(self) -> ScheduleSearch | None:
        """The schedule search on the measurements; None without a profile."""
        if self.measurements is None:
            return None
        return ScheduleSearch(ErrorModel(self.measurements, self.response, self.spec.ranges, self.options))

    @cached_property
    def output_table(self) -> OutputTable | None:
        """The weights with which the outputs of a generation are compared; None without a profile."""
        if self.measurements is None:
            return None
        return OutputTable(self.measurements, self.response[-1], self.spec.ranges)

    @cached_property
    def merged(self) -> PlanProblem:
        """The same problem with one set of weights for whatever branches there are."""
        if not self.branches:
            return self
        return replace(self, measurements=self.merged_measurements, branches=(), merged_measurements=None)


def plan_problem(spec: GenerationSpec, profile: Profile | None) -> PlanProblem:
    """Bring a profile's measurements to the noise levels and the guidance of a generation."""
    if profile is None:
        return PlanProblem(spec, None)
    facts = profile.facts
    if facts.guider != spec.guider:
        raise ProfileError(
            f"The profile {facts.name!r} was measured with {facts.guider or 'no guider'}, and the pipeline has "
            f"{spec.guider or 'none'}: the passes are mixed in another way. Measure a profile with this guider, or "
            'plan without one: profile="none".'
        )
    mix = mix_for_guidance(facts.mix, facts.guidance, spec.guidance)
    tied = not facts.branches
    measurements = Measurements(np.array(facts.noise), profile.grams, profile.growth, mix, tied).at(spec.noise)
    # A custom loop may run both branches although the guidance scale needs one only: use the mix as measured.
    separate = measurements if tied or all(mix) else replace(measurements, mix=facts.mix)
    preconditioning = Preconditioning.of(facts, spec.noise)
    return PlanProblem(spec, separate, facts.branches, measurements.merged, preconditioning, facts.options)


def search_profile(profile: Profile) -> ScheduleSearch:
    """The schedule search on the grid that a profile was measured on, with Euler steps: it needs no pipeline."""
    noise, starts = np.array(profile.facts.noise), profile.facts.starts
    ranges = tuple((first, after - 1) for first, after in pairwise((*starts, len(noise))))
    spec = GenerationSpec(noise, ranges, euler_response(noise), guider=profile.facts.guider)
    search = plan_problem(spec, profile).search
    assert search is not None
    return search


def mix_for_guidance(mix: tuple[float, ...], measured: float | None, wanted: float | None) -> tuple[float, ...]:
    """The mix of two branches at another guidance scale: s and 1 - s for classifier-free guidance, else unchanged.

    Some pipelines count guidance from 0 instead of 1; their mix is 1 + s and -s.
    """
    if measured is None or wanted is None or len(mix) != 2 or not np.isclose(sum(mix), 1.0, atol=_MIX_TOLERANCE):
        return mix
    wanted = max(wanted, 1.0)  # below 1, pipelines run one branch
    for cond, offset in ((0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0)):
        if np.isclose(mix[cond], measured + offset, atol=_MIX_TOLERANCE):
            share = wanted + offset
            return (share, 1 - share) if cond == 0 else (1 - share, share)
    return mix


class Planner:
    """Makes plans for one configuration."""

    def __init__(self, config: PlanConfig, profile: Profile | None) -> None:
        self._config, self._profile = config, profile

    @property
    def fits_weights(self) -> bool:
        """Whether weights are fitted to measurements."""
        return self._profile is not None and self._config.predictor in ("auto", "least_squares")

    def plan(self, problem: PlanProblem) -> Plan:
        """The plan for a kind of generation."""
        chosen = self._choose(problem)
        note = f"plan: {len(chosen.computed)} of {problem.spec.length} steps computed ({chosen.origin})"
        if chosen.error > 0 and self.fits_weights and self._profile is not None:
            offset, measured = self._profile.facts.psnr_offset, len(self._profile.facts.noise)
            if self._is_too_coarse(problem):
                note += f"; what it keeps is not known, because the profile was measured with {measured} steps"
            elif not problem.spec.known:
                note += f"; what it keeps is not known, because {problem.spec.scheduler} is random or not linear"
            elif offset is not None:
                note += f", expected to keep {chosen.psnr(offset):.0f} dB in nine images of ten"
        weights, factors = self.weights(problem, chosen.computed), self.timestep_factors(problem, chosen.computed)
        return Plan(chosen.computed, weights, (note,), factors)

    def weights(self, problem: PlanProblem, computed: Collection[int]) -> dict[int, Weights]:
        """The weights of the held steps of a schedule; empty where held steps are extrapolated with Newton."""
        ranges = problem.spec.ranges
        if self._config.predictor == "hold":
            return _hold_weights(computed, ranges)
        if problem.search is None or not self.fits_weights:
            return {}
        tried = next((s for s in self._tried_schedules(problem) if s.computed == tuple(computed)), None)
        return problem.search.model.fit_weights(computed) if tried is None else stored_weights(tried, ranges)

    def timestep_factors(self, problem: PlanProblem, computed: Collection[int]) -> dict[int, float]:
        """The factors of the timestep argument at computed steps, of a schedule that was trained on the model."""
        if problem.search is None or not self.fits_weights:
            return {}
        tried = next((s for s in self._tried_schedules(problem) if s.computed == tuple(computed)), None)
        return {} if tried is None else stored_factors(tried)

    def residual_weights(self, spec: GenerationSpec, transformer: str, computed: Collection[int]) -> dict[int, Weights]:
        """The weights for residuals instead of outputs, each fitted to the residual of its own step."""
        if self._config.predictor == "hold":
            return _hold_weights(computed, spec.ranges)
        grams = None if self._profile is None else self._profile.seams.get(transformer)
        if grams is None or self._profile is None or not self.fits_weights:
            return {}
        no_growth = np.zeros((len(grams), grams.shape[1] + 1))
        gram = Measurements(np.array(self._profile.facts.noise), grams, no_growth).at(spec.noise).mean_gram
        held = {step: before for step, before in held_steps(computed, spec.ranges).items() if gram[step, step] > 0}
        return {step: fit_output(before[-2:], step, gram) for step, before in held.items()}

    def _choose(self, problem: PlanProblem) -> CandidateSchedule:
        """The schedule that the configuration asks for."""
        config, spec, search = self._config, problem.spec, problem.search
        first, starts = spec.ranges[0][0], {first for first, _ in spec.ranges}  # starts are computed in any case
        if config.schedule is not None:
            latest, last = max(config.schedule), spec.last
            if latest > last:
                raise ConfigError(f"The schedule names step {latest}, but the last step of this generation is {last}.")
            computed = tuple(sorted(starts | {step for step in config.schedule if step >= first}))
            return CandidateSchedule(computed, "given") if search is None else search.evaluate(computed, "given")
        wanted = config.target
        if config.quality is not None:
            assert self._profile is not None  # enabling for a quality without a profile is refused
            wanted = self._profile.target_of(config.quality)
        if wanted is not None:
            return self._choose_for_target(Target.parsed(wanted), problem)
        budget = steps_for(DEFAULT_BUDGET if config.budget is None else config.budget, spec.length)
        if search is None:
            steps = cautious(spec.length) if config.budget is None else growing(spec.length, budget)
            origin = "single late steps held" if config.budget is None else "growing window"
            return CandidateSchedule(tuple(sorted(starts | {first + s for s in steps})), f"{origin}, nothing measured")
        return self._candidates(problem, search)[max(budget, len(spec.ranges))]

    def _candidates(self, problem: PlanProblem, search: ScheduleSearch) -> dict[int, CandidateSchedule]:
        """The schedule of each number of computed steps: one that was tried on the model, else the planned one."""
        tried = self._tried_schedules(problem) if self.fits_weights else ()
        return search.frontier | {len(s.computed): search.evaluate(s.computed, s.origin) for s in tried}

    def _choose_for_target(self, target: Target, problem: PlanProblem) -> CandidateSchedule:
        """The fastest schedule certified for a target under these conditions, else the fastest expected to meet it.

        The latter computes no fewer steps than a schedule that is certified for a lower target.
        """
        assert problem.search is not None  # enabling for a target without a profile is refused
        assert self._profile is not None
        quality = self._config.quality
        named = "" if quality is None else f"quality {quality} is {target}: "
        setting = f'target="{target}"' if quality is None else f'quality="{quality}"'
        valid = [
            certificate
            for certificate in self._profile.facts.certificates
            if self.fits_weights
            and self._config.quantity == "output"
            and applies(certificate, problem.spec)
            and certificate.adapters == problem.spec.adapters
            and certificate.plan
            == digest_weights(
                self.weights(problem, certificate.computed), self.timestep_factors(problem, certificate.computed)
            )
        ]
        certified = [certificate for certificate in valid if Target.parsed(certificate.target).implies(target)]
        if certified:
            fastest = min(certified, key=lambda certificate: len(certificate.computed))
            return problem.search.evaluate(fastest.computed, f"{named}certified for {fastest.target}")
        if self._is_too_coarse(problem):
            measured, steps = len(self._profile.facts.noise), len(problem.spec.noise)
            raise ConfigError(
                f"The profile was measured with {measured} steps, so {target} is not known of {steps}: calibrate with "
                f"num_inference_steps={steps}."
            )
        offset = self._profile.facts.psnr_offset
        if target.metric != "psnr" or offset is None or not problem.spec.known:
            raise ConfigError(
                f"Nothing is certified for {target} here: run holdover.tune(pipe, profile, {setting}) first."
            )
        candidates = self._candidates(problem, problem.search).values()
        least = max((len(c.computed) for c in valid if target.implies(Target.parsed(c.target))), default=1)
        expected = next(c for c in candidates if c.psnr(offset) >= target.least and len(c.computed) >= least)
        if quality is None:
            return expected
        origin = f"{named}expected, not certified"
        if self._profile.facts.pipeline != COMFYUI:
            origin += f"; holdover.tune(pipe, profile, {setting}) certifies it"
        return replace(expected, origin=origin)

    def _is_too_coarse(self, problem: PlanProblem) -> bool:
        """Whether the profile has so few of the noise levels that an expected quality means nothing."""
        assert self._profile is not None
        return len(problem.spec.noise) > _MOST_STEPS * len(self._profile.facts.noise)

    def _tried_schedules(self, problem: PlanProblem) -> list[MeasuredPlan]:
        """The profile's schedules that were tried on the model under the same conditions and branches."""
        known = () if self._profile is None else self._profile.facts.schedules
        return [s for s in known if s.branches in ((), problem.branches) and applies(s, problem.spec)]


def _hold_weights(computed: Collection[int], ranges: Ranges) -> dict[int, Weights]:
    """Weights that repeat the last computed output."""
    return {step: Weights(before[-1:], (1.0,)) for step, before in held_steps(computed, ranges).items()}


def applies(tried: MeasuredPlan | Certificate, spec: GenerationSpec) -> bool:
    """Whether a trial is valid for a generation: same noise levels, all of them run, same scheduler and guidance."""
    return (
        tried.scheduler == spec.scheduler
        and (spec.guidance is None or tried.guidance in (None, spec.guidance))
        and (spec.ranges[0][0], spec.last) == (0, len(spec.noise) - 1)
        and all(first in tried.computed for first, _ in spec.ranges)
        and len(tried.noise) == len(spec.noise)
        and np.allclose(tried.noise, spec.noise)
    )


def stored_factors(tried: MeasuredPlan) -> dict[int, float]:
    """The factors of the timestep argument of a schedule in a profile, by computed step; empty if it has none."""
    return {step: f for step, f in zip(tried.computed, tried.timestep_factors, strict=False) if f != 1.0}


def stored_weights(tried: MeasuredPlan, ranges: Ranges) -> dict[int, Weights]:
    """The weights of a schedule in a profile, which stores them in one sequence, by held step."""
    values, weights = iter(tried.weights), {}
    for step, before in sorted(held_steps(tried.computed, ranges).items()):
        anchors = before[-tried.depth :]
        weights[step] = Weights(anchors, tuple(islice(values, len(anchors) * max(1, len(tried.branches)))))
    return weights
