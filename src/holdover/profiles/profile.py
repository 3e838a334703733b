"""Profiles: measured constants of models. Plain values: equal, hashable, checked on construction, saved and loaded.

`TeaCacheProfile` and `MagCacheProfile` are the constants of one method. `Profile` is everything that
`holdover.calibrate` measures of a model: one safetensors file whose metadata entry `holdover` is a JSON object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from ..errors import ConfigError, ProfileError
from .files import SUFFIX, check_version, compute_digest, decode, encode, parse_json, write_file
from .hub import locate, upload
from .targets import QUALITY_TARGETS, Target, check_quality

if TYPE_CHECKING:
    from pydantic_core.core_schema import CoreSchema

FORMAT = "holdover-measured-profile"
VERSION = 1
EFFORTS = ("quick", "standard", "thorough")  # how much a calibration tried on the model
_ENTRY = "holdover"

Scalar = str | int | float | bool | None
T = TypeVar("T")


def _require(condition: bool, otherwise: str) -> None:
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
        _require(self.name != "", "a profile needs a name")
        _require(self.transformer_class != "", f"profile {self.name!r} names no transformer class")
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
        _require(len(self.coefficients) > 0, "a fit has no coefficients")
        _finite("coefficients", self.coefficients)
        _finite("low, high, r_squared", (x for x in (self.low, self.high, self.r_squared) if x is not None))
        if self.low is not None and self.high is not None:
            _require(self.low <= self.high, f"a fit's range is empty: {self.low} to {self.high}")


@dataclass(frozen=True, kw_only=True)
class TeaCacheProfile(MethodProfile):
    """TeaCache's polynomials by branch for one `signal` of the model's family; branch `""` means any branch."""

    signal: str
    fits: tuple[tuple[str, TeaCacheFit], ...]
    retained: int = 1
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.signal != "", f"profile {self.name!r} names no signal")
        _require(len(self.fits) > 0, f"profile {self.name!r} has no fit")
        _require(self.retained >= 0, f"profile {self.name!r} retains {self.retained} steps")
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
        _require(len(self.ratios) > 0, "a branch has no ratios")
        for name in ("ratios", "stds", "cosine_distances"):
            values = getattr(self, name)
            _finite(name, values)
            _require(len(values) in (0, len(self.ratios)), f"{len(values)} {name} for {len(self.ratios)} ratios")
        _require(min(self.ratios) > 0, "magnitude ratios must be above 0")


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
        _require(len(self.branches) > 0, f"{where} has no branches")
        for branch, values in self.branches:
            count = len(values.ratios)
            _require(count == steps, f"{where}, branch {branch!r}: {count} ratios for {steps} steps")
        _finite("noise", self.noise)
        _require(len(self.noise) in (0, steps), f"{where}: {len(self.noise)} noise levels for {steps} steps")
        _require(set(self.never_hold) <= set(range(steps)), f"{where}: never_hold is outside its {steps} steps")

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
        _require(0 <= self.corrected_share <= 1, f"its corrected_share is {self.corrected_share}, not 0 to 1")
        percentile = self.growth_percentile
        _require(percentile is None or 0 <= percentile <= 100, f"its growth_percentile is {percentile}, not 0 to 100")
        least = min(self.longest_gap, self.first_steps, self.depth)
        _require(least >= 1, f"its longest_gap, first_steps and depth must be at least 1, not {least}")
        _require((self.branch_tie or 0.0) >= 0, f"its branch_tie is {self.branch_tie}")
        _require(self.last_gap_factor >= 0, f"its last_gap_factor is {self.last_gap_factor}")


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
        _require(len(factors) in (0, count), f"a plan has {len(factors)} timestep_factors for {count} computed steps")
        _require(all(0.5 <= f <= 2 for f in factors), "the timestep_factors of a plan must be 0.5 to 2")


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
    the defaults, with their targets.
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

    def __post_init__(self) -> None:
        try:
            for name, target in self.qualities:
                check_quality(name)
                Target.parsed(target)
        except ConfigError as error:
            raise ProfileError(str(error)) from None


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured constants of one model for every method, with their provenance.

    - `grams`: (generations, B N, B N), inner products of the outputs of uncached generations: the outputs that the
      scheduler gets (B = 1), or those of each of the B `branches`, which are combined by `mix` for the scheduler. If
      the mix changes from step to step, `mix` has B N shares, and `branches` is empty: all are held alike.
    - `growth`: (generations, N + 1), how errors grow in generations with held steps.
    - `seams`: the same inner products for the residuals of the blocks, by transformer, if they were measured.
    """

    facts: ProfileFacts
    grams: NDArray[np.float64]
    growth: NDArray[np.float64]
    seams: Mapping[str, NDArray[np.float64]]

    def __post_init__(self) -> None:
        facts, steps = self.facts, len(self.facts.noise)
        _require(steps > 0, "it has no steps")
        is_rising = all(a < b for a, b in pairwise((-1, *facts.starts, steps)))
        _require(is_rising and facts.starts[:1] == (0,), "its starts are not ascending steps from 0")
        _require(len(facts.surprise) in (0, 2), "its surprise is not two numbers")
        by_step = not facts.branches and len(facts.mix) > 1
        parts = len(facts.mix) // steps if by_step else len(facts.mix)
        fits = len(facts.mix) == parts * steps if by_step else parts == max(1, len(facts.branches))
        _require(fits, "its mix does not fit its branches")
        fits = len(facts.scale) == len(facts.carry) in (0, steps) and all(facts.scale)
        _require(fits, "its scale and carry do not fit its steps")
        _require(_is_square(self.grams, steps * parts), "its Gram matrices do not fit its steps and branches")
        for name, seam in self.seams.items():
            _require(_is_square(seam, steps), f"the residuals' Gram matrices of {name!r} do not fit its steps")
        _require(self.growth.shape == (len(self.grams), steps + 1), "its error growth does not fit its Gram matrices")
        for array in (self.grams, self.growth, *self.seams.values()):
            _require(bool(np.isfinite(array).all()), "it has numbers that are not finite")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        facts = self.facts
        models = ", ".join(model.transformer_class for _, model in facts.models)
        made = f"{len(self.grams)} generations of {len(facts.noise)} steps"
        return f"<Profile {facts.name!r}: {models}, {made}{f', {facts.origin}' if facts.origin else ''}>"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """As a setting of a config, a profile is an instance; pydantic does not look into it."""
        from pydantic_core.core_schema import is_instance_schema

        return is_instance_schema(cls)

    @property
    def name(self) -> str:
        """The name it was saved under."""
        return self.facts.name

    @cached_property
    def digest(self) -> str:
        """A hash of everything in the profile but its cost."""
        return compute_digest(_without_cost(encode(self.facts)), self._arrays())

    def with_facts(self, **changes: Any) -> Self:
        """A copy with some facts changed and the same measurements."""
        return replace(self, facts=replace(self.facts, **changes))

    def target_of(self, quality: str) -> str:
        """The target that a quality stands for: the profile's own, else the default."""
        check_quality(quality)
        return dict(self.facts.qualities).get(quality, QUALITY_TARGETS[quality])

    def with_quality(self, quality: str, target: str) -> Self:
        """A copy in which a quality (`lossless`, `high`, `balanced` or `draft`) stands for this target."""
        check_quality(quality)
        changed = dict(self.facts.qualities) | {quality: str(Target.parsed(target))}
        return self.with_facts(qualities=tuple(changed.items()))

    def with_plan(self, plan: MeasuredPlan) -> Self:
        """A copy with one more plan, in place of one with as many computed steps under the same conditions."""
        conditions = (len(plan.computed), plan.noise, plan.scheduler)
        known = self.facts.schedules
        others = [other for other in known if (len(other.computed), other.noise, other.scheduler) != conditions]
        return self.with_facts(schedules=(*others, plan))

    def with_estimate(self, estimate: QualityEstimate | None) -> Self:
        """A copy with one more estimate, in place of an older one of the same plan; unchanged for None."""
        if estimate is None:
            return self
        others = tuple(other for other in self.facts.estimates if other.plan != estimate.plan)
        return self.with_facts(estimates=(*others, estimate))

    def _arrays(self) -> dict[str, NDArray[np.float64]]:
        seams = {f"seam.{name}": array for name, array in self.seams.items()}
        return {"grams": self.grams, "growth": self.growth, **seams}

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the profile to a `.safetensors` file; an existing file is replaced completely or not at all."""
        if Path(path).suffix != SUFFIX:
            raise ProfileError(f"A profile is saved as a {SUFFIX} file, not as {Path(path).name!r}.")
        return write_file(path, self._to_bytes())

    def push_to_hub(
        self,
        repo_id: str,
        path_in_repo: str = f"profile{SUFFIX}",
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the profile to a model repository, which is created if it does not exist.

        Returns the address with the commit, which can be given as `profile=`.
        """
        if Path(path_in_repo).suffix != SUFFIX:
            raise ProfileError(f"A profile is saved as a {SUFFIX} file, not as {path_in_repo!r}.")
        message = commit_message or f"Add the holdover profile {self.name}"
        return upload(self._to_bytes(), repo_id, path_in_repo, message, private, token, create_pr)

    def _to_bytes(self) -> bytes:
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest, "facts": encode(self.facts)}
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        return to_safetensors(arrays, {_ENTRY: json.dumps(head, allow_nan=False)})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a file that `save` wrote, or one on the Hub; a ProfileError says what is wrong with anything else.

        `origin` of a profile from the Hub has the commit, and so does its digest.
        """
        file_path, origin = locate(path)
        where = origin or file_path
        try:
            with safe_open(file_path, framework="numpy") as file:
                head = parse_json((file.metadata() or {}).get(_ENTRY, "null"), f"The metadata of {where}")
                is_ours = isinstance(head, dict) and head.get("format") == FORMAT
                if not is_ours or not isinstance(head.get("facts"), dict):  # do not read its arrays
                    raise ProfileError(f"{where} is a safetensors file, but not a holdover profile.")
                check_version(head, VERSION, where)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ProfileError(f"No profile could be read from {where}: {error.strerror or error}.") from None
        except SafetensorError as error:
            raise ProfileError(f"{where} is not a profile, or it is truncated: {error}.") from None
        facts = decode(ProfileFacts, head["facts"], where)
        if head.get("digest") != compute_digest(_without_cost(head["facts"]), arrays):
            raise ProfileError(f"{where} is damaged: its contents do not match its digest. Calibrate again.")
        seams = {name.removeprefix("seam."): array for name, array in arrays.items() if name.startswith("seam.")}
        try:
            profile = cls(facts, arrays["grams"], arrays["growth"], seams)
        except KeyError as error:
            raise ProfileError(f"{where} lacks the array {error}.") from None
        return profile.with_facts(origin=origin) if origin else profile


def display_name(profile: Profile | MethodProfile) -> str:
    """The name for notes, with the address of a profile from the Hub."""
    origin = profile.facts.origin if isinstance(profile, Profile) else profile.origin
    return f"{profile.name} ({origin})" if origin else profile.name


def _get_branch(branches: tuple[tuple[str, T], ...], name: str) -> T:
    known = dict(branches)
    return next((known[candidate] for candidate in (name, "", "cond") if candidate in known), branches[0][1])


def _is_square(array: NDArray[np.float64], size: int) -> bool:
    """Whether an array is a non-empty stack of square matrices of this size."""
    return array.ndim == 3 and array.shape[1:] == (size, size) and len(array) > 0


def _finite(name: str, values: Iterable[float]) -> None:
    _require(all(math.isfinite(value) for value in values), f"{name} must be finite numbers")


def _without_cost(facts: dict[str, Any]) -> dict[str, Any]:
    """Encoded facts that are the same for every calibration on the same prompts and seed: all but the seconds."""
    return {name: value for name, value in facts.items() if name != "cost"}
