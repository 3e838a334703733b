"""`tune`: the fastest plan that meets a quality target, with a certificate.

Candidates are ordered from slow to fast before the held-back prompts are used. Each is tested against the hypothesis
that more than `1 - share` of all images miss the target; the first candidate that cannot refute it ends the sequence
(fixed-sequence testing). With k misses among n images, the p-value is exactly binomial,

    p = sum_{i<=k} C(n, i) (1 - share)^i share^(n-i),

and a candidate passes if p <= 1 - confidence. The probability that any certified candidate does not keep its promise is
then at most `1 - confidence`, without a correction for the number of candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm.auto import tqdm

from ..errors import ConfigError, HoldoverError
from ..metrics import PSNR_CAP, each, psnr
from ..profiles import Certificate, MeasuredPlan, Profile, ProfileFacts, QualityEstimate
from ..profiles.targets import Target
from .calls import (
    GENERATIONS,
    Caller,
    Prompt,
    as_prompts,
    built_in_prompts,
    hash_each,
    hash_prompts,
    installed_engine,
    make_batches,
)
from .config import METRICS, PlanConfig
from .error_model import Array
from .estimate import fit_estimate
from .generation import GenerationSpec, load_measured
from .method import PlanMethod
from .planner import Plan, applies, search_profile
from .search import CandidateSchedule

T = TypeVar("T")
DEFAULT_TARGET = "psnr>=40"
_MARGIN = 20.0  # dB above the target at which the sequence of candidates starts
_FASTER = 1.12  # speed-up from one candidate to the next


class Trials:
    """Runs plans on the model and compares their images with uncached ones of the same prompts and seeds."""

    def __init__(
        self,
        caller: Caller,
        prompts: Sequence[Prompt],
        seed: int = 0,
        batch_size: int = 1,
        references: Sequence[torch.Tensor] = (),
    ) -> None:
        self._caller, self.batches = caller, make_batches(prompts, batch_size, seed)
        self._references = list(references)

    def generate_references(self, progress: Callable[[], Any] = lambda: None) -> None:
        """Generate the uncached images."""
        for batch in self.batches:
            images = self._caller(*batch)
            if images is None:
                raise HoldoverError(f"The output of {type(self._caller.pipe).__name__} is not an image to compare.")
            self._references.append(images.to("cpu", torch.float32, copy=True))
            progress()

    def run(
        self,
        profile: Profile,
        metric: str,
        computed: tuple[int, ...],
        progress: Callable[[], Any] = lambda: None,
        stop: Callable[[list[float]], bool] = lambda values: False,
    ) -> TrialRun:
        """Run a schedule on the prompts; ends early when `stop` is true of the qualities so far."""
        method = _WatchedPlan(PlanConfig(profile=profile, schedule=computed))
        values, kept, features, plan = list[float](), list[float](), list[Array](), ""
        with installed_engine(self._caller.pipe, method):
            for batch, reference in zip(self.batches, self._references, strict=True):
                images = self._caller(*batch)
                if not method.as_measured:
                    raise ConfigError(
                        "These arguments mix other branches, or mix them with other weights, than the profile was "
                        "measured with (negative_prompt, true_cfg_scale, guidance_scale_2): calibrate with them first."
                    )
                assert images is not None
                images = images.cpu()
                values += each(METRICS[metric], images, reference).tolist()
                kept += each(psnr, images, reference).tolist()
                if method.monitor is not None:
                    features.append(method.monitor.features())
                    plan = method.monitor.plan
                progress()
                if stop(values):
                    break
        estimate = fit_estimate(plan, np.concatenate(features), kept) if features else None
        assert method.planned is not None
        problem, made = method.planned
        return TrialRun(values, min(fmean(kept), PSNR_CAP), made, problem.spec, estimate)


class _WatchedPlan(PlanMethod):
    """Watches held steps too, for an estimate of the quality."""

    looks_back = True


@dataclass(frozen=True)
class TrialRun:
    """A schedule on the prompts: the quality of each image, their mean PSNR, the plan, what ran, and an estimate."""

    values: list[float]
    psnr: float
    plan: Plan
    spec: GenerationSpec
    estimate: QualityEstimate | None


@dataclass(frozen=True)
class CandidateResult:
    """One candidate schedule that was tried: its expected and its measured quality.

    `estimate` says how the PSNR of an image can be estimated afterwards; None for few prompts.
    """

    computed: tuple[int, ...]
    expected: float | None
    values: tuple[float, ...]
    passed: bool
    estimate: QualityEstimate | None = None


@dataclass(frozen=True)
class TuningResult:
    """The profile with its certificate, every candidate that was tried, from slow to fast, and the target."""

    profile: Profile
    certificate: Certificate | None
    tried: tuple[CandidateResult, ...]
    target: str

    def __str__(self) -> str:
        if self.certificate is None:
            return "no plan could be certified: none tried keeps the target often enough on these prompts"
        return f"{len(self.certificate.computed)} of {len(self.certificate.noise)} steps computed: {self.certificate}"


def tune(
    pipe: Any,
    profile: Profile | str | PathLike[str],
    prompts: Prompt | Sequence[Prompt] | None = None,
    target: str | None = None,
    confidence: float = 0.95,
    *,
    quality: str | None = None,
    share: float = 0.95,
    seed: int = 1_000_000,
    batch_size: int = 1,
    progress: bool = True,
    **call: Any,
) -> TuningResult:
    """Find the fastest plan with which `share` of images meet `target`, shown with `confidence` on held-back prompts.

    `target` is by default that of `quality`, else `psnr>=40`. With both, it becomes the profile's target for that
    quality, also if nothing can be certified for it. The prompts must not be those of the calibration; the default is
    the rest of the built-in list. Candidates are tried from slow to fast, each until it has passed or can no longer
    pass; the plan that is certified is stored with its weights. `profile` is a Profile, or the path or address of one.
    """
    profile = load_measured(profile, pipe)
    if quality is not None:
        profile = profile if target is None else profile.with_quality(quality, target)
        target = profile.target_of(quality)
    wanted = Target.parsed(DEFAULT_TARGET if target is None else target)
    chosen = _held_back_prompts(pipe, profile, prompts, share, confidence)
    most = allowed_misses(len(chosen), share, confidence) or 0
    offset = profile.facts.psnr_offset if wanted.metric == "psnr" else None
    facts, scheduler, search = profile.facts, type(pipe.scheduler).__name__, search_profile(profile)
    known = [plan for plan in facts.schedules if (plan.noise, plan.scheduler) == (facts.noise, scheduler)]
    improved = {len(plan.computed): search.evaluate(plan.computed, plan.origin) for plan in known}
    candidates = _candidates(search.frontier | improved, wanted, offset)
    tried, runs = list[CandidateResult](), list[TrialRun]()
    trials = Trials(Caller.like(profile, pipe, call), chosen, seed, batch_size)

    def passes(candidate: CandidateSchedule) -> bool:
        run = trials.run(
            profile, wanted.metric, candidate.computed, bar.update, stop=lambda values: wanted.misses(values) > most
        )
        expected, passed = None if offset is None else candidate.psnr(offset), wanted.misses(run.values) <= most
        tried.append(CandidateResult(candidate.computed, expected, tuple(run.values), passed, run.estimate))
        runs.extend([run] if passed else [])
        return passed

    total = len(trials.batches) * (1 + len(candidates))
    with tqdm(total=total, disable=not progress, desc=f"tuning to {wanted}", unit="run") as bar:
        trials.generate_references(bar.update)
        best = fastest_passing(candidates, passes)
    if best is None:
        return TuningResult(profile, None, tuple(tried), str(wanted))
    run = runs[-1]  # of the best candidate
    certificate = Certificate(
        target=str(wanted),
        computed=best.computed,
        noise=tuple(run.spec.noise.tolist()),
        share=share,
        confidence=confidence,
        prompts=len(run.values),
        below=wanted.misses(run.values),
        prompts_hash=hash_prompts(chosen),
        scheduler=run.spec.scheduler,
        plan=run.plan.digest,
        guidance=run.spec.guidance,
        adapters=run.spec.adapters,
    )
    others = tuple(c for c in facts.certificates if c.target != certificate.target)
    certified = profile.with_facts(certificates=(*others, certificate)).with_estimate(run.estimate)
    if not any(plan.computed == best.computed and applies(plan, run.spec) for plan in known):
        certified = certified.with_plan(_as_measured(run, facts))  # stored weights are the same in later versions too
    return TuningResult(certified, certificate, tuple(tried), str(wanted))


def _as_measured(run: TrialRun, facts: ProfileFacts) -> MeasuredPlan:
    """The plan of a trial as a profile stores it."""
    plan, weights = run.plan, [held for _, held in sorted(run.plan.weights.items())]
    return MeasuredPlan(
        noise=tuple(run.spec.noise.tolist()),
        scheduler=run.spec.scheduler,
        computed=plan.computed,
        weights=tuple(value for held in weights for value in held.values),
        origin="certified",
        psnr=run.psnr,
        branches=facts.branches if any(len(held.values) > len(held.anchors) for held in weights) else (),
        guidance=run.spec.guidance,
        depth=max((len(held.anchors) for held in weights), default=1),
    )


def _held_back_prompts(
    pipe: Any, profile: Profile, prompts: Prompt | Sequence[Prompt] | None, share: float, confidence: float
) -> list[Prompt]:
    """The prompts to certify on; an error if they are too few."""
    for name, value in (("share", share), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} must lie between 0 and 1, not {value}.")
    used, known = max(GENERATIONS, profile.facts.prompts), set(profile.facts.prompt_hashes)
    chosen = as_prompts(built_in_prompts(pipe)[used:] if prompts is None else prompts)
    fitted = [each in known for each in hash_each(chosen)]
    if prompts is None:
        chosen = [prompt for prompt, was_fitted in zip(chosen, fitted, strict=True) if not was_fitted]
    elif any(fitted):
        raise ConfigError(
            f"{sum(fitted)} of these {len(chosen)} prompts were used to measure the profile or to improve its plans; a "
            "certificate needs prompts that were not."
        )
    if len(chosen) < (least := fewest_prompts(share, confidence)):
        raise ConfigError(
            f"{len(chosen)} held-back prompts cannot show that {share:.0%} of images meet a target with "
            f"{confidence:.0%} confidence: at least {least} are needed."
        )
    return chosen


def _candidates(
    frontier: dict[int, CandidateSchedule], target: Target, offset: float | None
) -> list[CandidateSchedule]:
    """Candidates from slow to fast, chosen from the profile alone; with an offset, from 20 dB above the target."""
    budgets = [count for count, candidate in frontier.items() if candidate.cost > 0]
    slowest = max(budgets, default=0)
    if offset is not None:
        safe = [count for count in budgets if frontier[count].psnr(offset) >= target.least + _MARGIN]
        slowest = min(safe, default=slowest)
    chosen, count = list[CandidateSchedule](), float(slowest)
    while count >= min(frontier):
        if not chosen or round(count) != len(chosen[-1].computed):
            chosen.append(frontier[round(count)])
        count = min(count / _FASTER, math.ceil(count) - 1)
    return chosen


def p_value(misses: int, tried: int, share: float) -> float:
    """The probability of at most so many misses among `tried` images if a part `1 - share` of all images missed."""
    miss = 1.0 - share
    return sum(math.comb(tried, k) * miss**k * share ** (tried - k) for k in range(misses + 1))


def allowed_misses(tried: int, share: float, confidence: float) -> int | None:
    """How many images may miss the target for a certificate; None if so few images prove nothing."""
    return max((k for k in range(tried + 1) if p_value(k, tried, share) <= 1.0 - confidence), default=None)


def fewest_prompts(share: float, confidence: float) -> int:
    """The smallest number of prompts that can certify anything."""
    return next(tried for tried in itertools.count(1) if p_value(0, tried, share) <= 1.0 - confidence)


def fastest_passing(candidates: Iterable[T], passes: Callable[[T], bool]) -> T | None:
    """The last candidate, from slow to fast, before the first that does not pass."""
    *_, best = (None, *itertools.takewhile(passes, candidates))
    return best
