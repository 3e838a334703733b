"""The facts of profiles: constants of models and how they were measured. Plain values, checked on construction.

`TeaCacheProfile` and `MagCacheProfile` are the constants of one method. `ProfileFacts` has everything in a measured
profile that is not an array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ..errors import ConfigError, ProfileError
from .targets import Target, check_quality

EFFORTS = ("quick", "standard", "thorough")  # how much a calibration tried on the model

_LARGEST_OFFSET = 200.0  # dB: from the error of a latent to that of an image
COMFYUI = "ComfyUI"  # the pipeline of a profile that was measured there: it has no certificates

Scalar = str | int | float | bool | None
T = TypeVar("T")


def require(condition: bool, otherwise: str) -> None:
    """A ProfileError if the condition does not hold."""
    if not condition:
        raise ProfileError(f"Invalid profile: {otherwise}.")


@dataclass(frozen=True, kw_only=True)
class MethodProfile:
    """The constants of one model for one method, and what identifies that model.

    - `match`: values of `transformer.config` that distinguish variants of one class (`num_layers` 30 or 40). A key that
      starts with `pipeline.` or `scheduler.` is looked up in the config of these, `scheduler.class` is the scheduler's
      class name, and the value `"*"` means anything but None.
    - `pipelines`: the pipeline classes it was measured in, if the transformer alone does not identify the model.
    - `source`: where the numbers come from. `also_in`: who else publishes the same numbers.
    - `origin`: the address with the commit, if it was loaded from the Hub.
    """

    name: str
    model: str
    transformer_class: str
    match: tuple[tuple[str, Scalar], ...] = ()
    pipelines: tuple[str, ...] = ()
    source: tuple[tuple[str, str], ...] = ()
    also_in: tuple[str, ...] = ()
    notes: str = ""
    origin: str = ""

    def __post_init__(self) -> None:
        require(self.name != "", "a profile needs a name")
        require(self.transformer_class != "", f"profile {self.name!r} names no transformer class")
        _finite("match", (value for _, value in self.match if isinstance(value, float)))


@dataclass(frozen=True)
class TeaCacheFit:
    """A rescaling polynomial, highest power first, with its range and the quality of the fit if known."""

    coefficients: tuple[float, ...]
    low: float | None = None
    high: float | None = None
    r_squared: float | None = None
    monotone: bool | None = None
    pairs: int | None = None

    def __post_init__(self) -> None:
        require(len(self.coefficients) > 0, "a fit has no coefficients")
        _finite("coefficients", self.coefficients)
        _finite("low, high, r_squared", (x for x in (self.low, self.high, self.r_squared) if x is not None))
        if self.low is not None and self.high is not None:
            require(self.low <= self.high, f"a fit's range is empty: {self.low} to {self.high}")


@dataclass(frozen=True, kw_only=True)
class TeaCacheProfile(MethodProfile):
    """TeaCache's polynomials by branch for one `signal` of the model's family; branch `""` means any branch."""

    signal: str
    fits: tuple[tuple[str, TeaCacheFit], ...]
    retained: int = 1
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.signal != "", f"profile {self.name!r} names no signal")
        require(len(self.fits) > 0, f"profile {self.name!r} has no fit")
        require(self.retained >= 0, f"profile {self.name!r} retains {self.retained} steps")
        _finite("thresholds", self.thresholds)

    def fit(self, branch: str) -> TeaCacheFit:
        """The fit of this branch, else of any branch, of the conditional branch, or the first one."""
        return _get_branch(self.fits, branch)


@dataclass(frozen=True)
class MagCacheRatios:
    """The magnitude ratios of one branch, one per step, with their spread if it was measured."""

    ratios: tuple[float, ...]
    stds: tuple[float, ...] = ()
    cosine_distances: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.ratios) > 0, "a branch has no ratios")
        for name in ("ratios", "stds", "cosine_distances"):
            values = getattr(self, name)
            _finite(name, values)
            require(len(values) in (0, len(self.ratios)), f"{len(values)} {name} for {len(self.ratios)} ratios")
        require(min(self.ratios) > 0, "magnitude ratios must be above 0")


@dataclass(frozen=True)
class MagCacheDefaults:
    """The settings that the source recommends, if it does."""

    threshold: float | None = None
    max_skip_steps: int | None = None
    retention_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class MagCacheProfile(MethodProfile):
    """MagCache's ratios by branch, for the steps they were measured on; branch `""` means any branch.

    `noise` are the noise levels of these steps, if they are known; `never_hold` are steps that the source always
    computes.
    """

    num_inference_steps: int
    branches: tuple[tuple[str, MagCacheRatios], ...]
    noise: tuple[float, ...] = ()
    never_hold: tuple[int, ...] = ()
    defaults: MagCacheDefaults = MagCacheDefaults()

    def __post_init__(self) -> None:
        super().__post_init__()
        steps, where = self.num_inference_steps, f"profile {self.name!r}"
        require(len(self.branches) > 0, f"{where} has no branches")
        for branch, values in self.branches:
            count = len(values.ratios)
            require(count == steps, f"{where}, branch {branch!r}: {count} ratios for {steps} steps")
        _finite("noise", self.noise)
        require(len(self.noise) in (0, steps), f"{where}: {len(self.noise)} noise levels for {steps} steps")
        require(set(self.never_hold) <= set(range(steps)), f"{where}: never_hold is outside its {steps} steps")

    def branch(self, name: str) -> MagCacheRatios:
        """The ratios of this branch, else of any branch, of the conditional branch, or the first ones."""
        return _get_branch(self.branches, name)

    def ratios(self, branch: str) -> tuple[float, ...]:
        """The ratios of `branch(branch)`, one per step."""
        return self.branch(branch).ratios


@dataclass(frozen=True)
class ModelIdentity:
    """Which transformer was measured: its class, a fingerprint of its weights, its dtype and active adapters."""

    transformer_class: str
    fingerprint: str
    dtype: str
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannerOptions:
    """Constants of the planner that are not measured; trials on a model choose between values of each.

    - `corrected_share`: how much of an error that is already visible to the last computed step is corrected by held
      steps. The model has responded to that error; correcting all of it may overshoot.
    - `growth_percentile`: schedules are searched for the error growth of so many percent of the generations; None
      ignores the growth.
    - `last_gap_factor`: how many times the cost of the last gap counts. No later step corrects its error.
    - `longest_gap`: the largest distance between two computed steps.
    - `first_steps`: how many steps at the start of each expert are computed in any case.
    - `depth`: computed outputs that a held step is predicted from, at most.
    - `branch_tie`: penalty on differences between the weights of branches, relative to the mean diagonal; None gives
      all branches the same weights where weights are fitted on the model.
    - `fitted_below`: held steps up to this noise level get weights fitted on the model, the others simulated ones.
    """

    corrected_share: float = 0.85
    growth_percentile: float | None = 75.0
    last_gap_factor: float = 3.0
    longest_gap: int = 12
    first_steps: int = 1
    depth: int = 4
    branch_tie: float | None = 1e-3
    fitted_below: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.corrected_share <= 1, f"its corrected_share is {self.corrected_share}, not 0 to 1")
        percentile = self.growth_percentile
        require(percentile is None or 0 <= percentile <= 100, f"its growth_percentile is {percentile}, not 0 to 100")
        least = min(self.longest_gap, self.first_steps, self.depth)
        require(least >= 1, f"its longest_gap, first_steps and depth must be at least 1, not {least}")
        require((self.branch_tie or 0.0) >= 0, f"its branch_tie is {self.branch_tie}")
        require(self.last_gap_factor >= 0, f"its last_gap_factor is {self.last_gap_factor}")


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was run on the model itself, for one scheduler and its noise levels.

    `weights` are those of the held steps one after the other, each over the last `depth` computed steps, for all
    branches together or for each of `branches`. `psnr` is its quality on prompts that the weights were not fitted to.
    `timestep_factors` multiply the transformer's timestep argument at each computed step; 1, or none at all, leaves it.
    """

    noise: tuple[float, ...]
    scheduler: str
    computed: tuple[int, ...]
    weights: tuple[float, ...]
    origin: str
    psnr: float
    branches: tuple[str, ...] = ()
    guidance: float | None = None
    depth: int = 4
    timestep_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        factors, count = self.timestep_factors, len(self.computed)
        _check_computed("a plan", self.computed, len(self.noise))
        require(self.depth >= 1, f"a plan has depth {self.depth}")
        _finite("weights and psnr of a plan", (*self.weights, self.psnr))
        require(len(factors) in (0, count), f"a plan has {len(factors)} timestep_factors for {count} computed steps")
        require(all(0.5 <= f <= 2 for f in factors), "the timestep_factors of a plan must be 0.5 to 2")


@dataclass(frozen=True)
class Certificate:
    """The share of images that meets a target, and with what confidence, as tested on held-back prompts."""

    target: str
    computed: tuple[int, ...]
    noise: tuple[float, ...]
    share: float
    confidence: float
    prompts: int
    below: int
    prompts_hash: str
    scheduler: str
    plan: str
    guidance: float | None = None
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_computed("a certificate", self.computed, len(self.noise))
        for name in ("share", "confidence"):
            value = getattr(self, name)
            require(0 < value < 1, f"the {name} of a certificate is {value}, not between 0 and 1")
        try:
            Target.parsed(self.target)
        except ConfigError as error:
            raise ProfileError(str(error)) from None

    def __str__(self) -> str:
        return (
            f"for prompts like these, {self.share:.0%} of images meet {self.target}, with {self.confidence:.0%} "
            f"confidence; {self.prompts} prompts tried, {self.below} below"
        )


@dataclass(frozen=True)
class QualityEstimate:
    """How the PSNR of an image follows from what was seen while its plan ran: intercept + coefficients * features.

    `plan` is the digest of the plan, and plan/estimate.py has the features. `error` (root mean square, in dB) and
    `rank_correlation` are those of estimates for prompts that were left out of the fit, of all `prompts` in turn.
    """

    plan: str
    coefficients: tuple[float, ...]
    intercept: float
    error: float
    rank_correlation: float
    prompts: int

    def __post_init__(self) -> None:
        _finite("coefficients", (*self.coefficients, self.intercept, self.error, self.rank_correlation))

    def __str__(self) -> str:
        return (
            f"the PSNR of an image is estimated afterwards with an error of {self.error:.1f} dB and a rank correlation "
            f"of {self.rank_correlation:.2f} ({self.prompts} prompts)"
        )


@dataclass(frozen=True)
class ProfileFacts:
    """Everything in a profile that is not an array: the model, how it was measured, and constants of the methods.

    `starts` has the first step of each expert; most models have one expert. The scheduler gets `scale[i]` times the
    output plus `carry[i]` times the latent at step i; both are empty if it gets the output itself. `options` are those
    that trials on the model chose, else the defaults. `guider` has the pipeline's guider with its settings, if any.
    `cost` is what the calibration took, in generations and seconds. `origin` is the address with the commit, if the
    profile, or the one it was made from, was loaded from the Hub. `qualities` are the names whose targets differ from
    the defaults, with their targets. `passes` is how many branches ran in the first step, also where they were not
    measured separately, and 0 if that is not known. `first_mix` has the share of each branch, and of each part of a
    doubled batch, in what the scheduler got in the first step; it is empty where branches were measured separately, or
    where it is no mix of them. `prompt_hashes` has a hash of each prompt that was measured or that plans were tried on:
    none of them can certify a plan.
    """

    name: str
    pipeline: str
    scheduler: str
    noise: tuple[float, ...]
    models: tuple[tuple[str, ModelIdentity], ...]
    prompts: int
    prompts_hash: str
    date: str
    versions: tuple[tuple[str, str], ...]
    guidance: float | None = None
    branches: tuple[str, ...] = ()
    mix: tuple[float, ...] = (1.0,)
    scale: tuple[float, ...] = ()
    carry: tuple[float, ...] = ()
    call: tuple[tuple[str, Scalar], ...] = ()
    starts: tuple[int, ...] = (0,)
    psnr_offset: float | None = None
    surprise: tuple[float, ...] = ()
    tea_cache: tuple[tuple[str, TeaCacheProfile], ...] = ()
    mag_cache: tuple[tuple[str, MagCacheProfile], ...] = ()
    schedules: tuple[MeasuredPlan, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    estimates: tuple[QualityEstimate, ...] = ()
    effort: str = "quick"
    options: PlannerOptions = PlannerOptions()
    guider: str = ""
    cost: tuple[tuple[str, float], ...] = ()
    origin: str = ""
    qualities: tuple[tuple[str, str], ...] = ()
    prompt_hashes: tuple[str, ...] = ()
    passes: int = 0
    first_mix: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.effort in EFFORTS, f"its effort is {self.effort!r}")
        require(self.prompts >= 1, f"it was measured on {self.prompts} prompts")
        require(self.passes >= 0, f"{self.passes} branches ran in its first step")
        offset = self.psnr_offset
        require(offset is None or abs(offset) < _LARGEST_OFFSET, f"its psnr_offset is {offset}")
        try:
            for name, target in self.qualities:
                check_quality(name)
                Target.parsed(target)
        except ConfigError as error:
            raise ProfileError(str(error)) from None


def _get_branch(branches: tuple[tuple[str, T], ...], name: str) -> T:
    known = dict(branches)
    return next((known[candidate] for candidate in (name, "", "cond") if candidate in known), branches[0][1])


def _check_computed(what: str, computed: tuple[int, ...], steps: int) -> None:
    ascending = all(a < b for a, b in pairwise((-1, *computed, steps)))
    require(ascending and len(computed) > 0, f"{what} computes {computed} of {steps} steps")


def _finite(name: str, values: Iterable[float]) -> None:
    require(all(math.isfinite(value) for value in values), f"{name} must be finite numbers")
