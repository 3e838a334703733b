"""What a profile holds. Plain values: equal, hashable, checked when made, JSON and back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ProfileError

Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class MethodProfile:
    """The constants of one model for one method, and how to know that model again.

    - `match`: values of `transformer.config` that tell variants of one class apart (`num_layers` 30 or 40). A
      key that begins with `pipeline.` or `scheduler.` is looked up in the config of these, `scheduler.class`
      is the scheduler's class name, and the value `"*"` means anything but None.
    - `pipelines`: classes of the pipelines it was measured in, where the transformer alone does not tell.
    - `source`: where the numbers come from. `also_in`: who else publishes the very same ones.
    """

    name: str
    model: str
    transformer_class: str
    match: tuple[tuple[str, Scalar], ...] = ()
    pipelines: tuple[str, ...] = ()
    source: tuple[tuple[str, str], ...] = ()
    also_in: tuple[str, ...] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        _require(self.name != "", "a profile needs a name")
        _require(self.transformer_class != "", f"profile {self.name!r} names no transformer class")
        _finite("match", (value for _, value in self.match if isinstance(value, float)))


@dataclass(frozen=True)
class TeaCacheFit:
    """A rescaling polynomial, highest power first, with its range and the quality of the fit where known."""

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
    """TeaCache's polynomials for the signal of that name of the model's family; branch `""` is any branch."""

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
        """The branch's own fit, else that of any branch, of the conditional one, or the first."""
        fits = dict(self.fits)
        return fits[_nearest_branch(branch, fits)]


@dataclass(frozen=True)
class MagCacheRatios:
    """One branch's magnitude ratios, a value a step, with their spread where it was measured."""

    ratios: tuple[float, ...]
    stds: tuple[float, ...] = ()
    cosine_distances: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.ratios) > 0, "a branch has no ratios")
        for name in ("ratios", "stds", "cosine_distances"):
            values = getattr(self, name)
            _finite(name, values)
            fitting = len(values) in (0, len(self.ratios))
            _require(fitting, f"{len(values)} {name} for {len(self.ratios)} ratios")
        _require(min(self.ratios) > 0, "ratios of magnitudes must be above 0")


@dataclass(frozen=True)
class MagCacheDefaults:
    """The settings the source advises, where it does."""

    threshold: float | None = None
    max_skip_steps: int | None = None
    retention_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class MagCacheProfile(MethodProfile):
    """MagCache's ratios on the grid they were measured on; branch `""` stands for any branch.

    `noise` are the noise levels of that grid, where they are known; `never_hold` are steps of it that the
    source always computes.
    """

    num_inference_steps: int
    branches: tuple[tuple[str, MagCacheRatios], ...]
    noise: tuple[float, ...] = ()
    never_hold: tuple[int, ...] = ()
    defaults: MagCacheDefaults = MagCacheDefaults()

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.num_inference_steps
        _require(len(self.branches) > 0, f"profile {self.name!r} has no branches")
        for branch, values in self.branches:
            count = len(values.ratios)
            what = f"profile {self.name!r}, branch {branch!r}: {count} ratios for {steps} steps"
            _require(count == steps, what)
        _finite("noise", self.noise)
        count = len(self.noise)
        _require(count in (0, steps), f"profile {self.name!r}: {count} noise levels for {steps} steps")
        inside = all(0 <= step < steps for step in self.never_hold)
        _require(inside, f"profile {self.name!r}: never_hold is outside its {steps} steps")

    def branch(self, name: str) -> MagCacheRatios:
        """The branch's own ratios, else those of any branch, of the conditional one, or the first."""
        branches = dict(self.branches)
        return branches[_nearest_branch(name, branches)]

    def ratios(self, branch: str) -> tuple[float, ...]:
        """The ratios alone, one a step."""
        return self.branch(branch).ratios


def _nearest_branch(name: str, known: Iterable[str]) -> str:
    known = list(known)
    return next((candidate for candidate in (name, "", "cond") if candidate in known), known[0])


def _finite(name: str, values: Iterable[float]) -> None:
    _require(all(math.isfinite(value) for value in values), f"{name} must be finite numbers")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ProfileError(f"This profile cannot be right: {otherwise}.")
