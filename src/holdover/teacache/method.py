"""TeaCache put together: the policy of its paper, a model's signal, a profile's polynomial."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import ConfigError, HoldoverWarning, did_you_mean
from ..grid import Grid
from ..models.registry import INPUT_SIGNAL, Signal
from ..policies.teacache import Polynomial, TeaCachePolicy
from ..profiles import TeaCacheFit, TeaCacheProfile, find, shipped
from ..runtime.method import Method
from ..runtime.packing import packing
from ..runtime.unit import Unit
from .config import UNNAMED, TeaCacheConfig


@dataclass(frozen=True)
class _Constants:
    """What TeaCache knows of one transformer."""

    signal: Signal
    profile: TeaCacheProfile | None
    coefficients: tuple[float, ...] | None

    def polynomial(self, branch: str) -> Polynomial:
        if self.coefficients is not None:
            return polynomial_of(TeaCacheFit(self.coefficients))
        assert self.profile is not None
        return polynomial_of(self.profile.fit(branch))

    @property
    def retained(self) -> int:
        return self.profile.retained if self.profile is not None else 1


@cache
def polynomial_of(fit: TeaCacheFit) -> Polynomial:
    """A fit's polynomial on its own range, or on the part of it that can be trusted."""
    if fit.low is not None and fit.high is not None:
        return Polynomial(fit.coefficients, fit.low, fit.high)
    return Polynomial.trusted(fit.coefficients)


def resolve_signal(unit: Unit, name: str | None) -> Signal:
    """A model's signal by name, its default one, or what enters the first block."""
    signal = unit.family.signal(name)
    if signal is not None:
        return signal
    if name in (None, INPUT_SIGNAL.name):
        return INPUT_SIGNAL
    known = [s.name for s in unit.family.signals] + [INPUT_SIGNAL.name]
    hint = did_you_mean(name or "", known) or f" It has {', '.join(known)}."
    raise ConfigError(f"{unit.class_name} has no signal {name!r}.{hint}")


class TeaCacheMethod(Method):
    """TeaCache with one set of settings."""

    name = "tea_cache"

    def __init__(self, config: TeaCacheConfig) -> None:
        super().__init__(config)
        self._settings = config
        self._constants: dict[Unit, _Constants] = {}
        self.packing = packing(config.hold_in)
        self.reads_late = config.read == "late"

    def prepare(self, unit: Unit, pipeline: Any) -> tuple[str, ...]:
        constants = self._constants[unit] = self._resolve(unit, pipeline)
        branches = [""] if constants.profile is None else [branch for branch, _ in constants.profile.fits]
        least = max(constants.polynomial(branch).minimum() for branch in branches)
        if 0 < self._settings.rel_l1_thresh <= least:
            warnings.warn(
                f"TeaCache can never hold a step of {unit.class_name} at "
                f"rel_l1_thresh={self._settings.rel_l1_thresh:g}: its polynomial adds at least {least:.3g} at every "
                "step. Use a threshold above that, or measure coefficients of your own with "
                "holdover.teacache.estimate_coefficients.",
                HoldoverWarning,
                stacklevel=6,  # the caller of holdover.enable
            )
        source = "coefficients given" if constants.profile is None else f"profile {constants.profile.name}"
        return (f"{unit.name}: signal {constants.signal.name}, {source}",)

    def _resolve(self, unit: Unit, pipeline: Any) -> _Constants:
        settings = self._settings
        if settings.signal is not None:
            resolve_signal(unit, settings.signal)  # an unknown name is an error of its own
        if settings.coefficients is not None:
            return _Constants(resolve_signal(unit, settings.signal), None, settings.coefficients)
        profile = self._profile(unit, pipeline)
        if profile is None:
            measured = f" measured with the signal {settings.signal!r}" if settings.signal is not None else ""
            raise ConfigError(
                f"No TeaCache coefficients{measured} ship for {unit.class_name}. Measure them with "
                "holdover.teacache.estimate_coefficients(pipe, prompts), or give coefficients=[...]."
            )
        if settings.signal not in (None, profile.signal):
            raise ConfigError(
                f"Profile {profile.name!r} was measured with the signal {profile.signal!r}, not {settings.signal!r}."
            )
        signal = unit.family.signal(profile.signal) if self._is_foreign(unit) else resolve_signal(unit, profile.signal)
        return _Constants(signal or resolve_signal(unit, None), profile, None)

    def _profile(self, unit: Unit, pipeline: Any) -> TeaCacheProfile | None:
        """The profile asked for, that of the class named in the settings, or the one that fits the model."""
        settings = self._settings
        if settings.profile is None and self._is_foreign(unit):
            of_class = (p for p in shipped("tea_cache") if p.transformer_class == settings.transformer_type)
            return next((p for p in of_class if settings.signal in (None, p.signal)), None)
        return find("tea_cache", unit.core, pipeline, settings.profile, settings.signal)

    def _is_foreign(self, unit: Unit) -> bool:
        """Whether the settings name another class than the transformer's own: its constants are borrowed."""
        own = (cls.__name__ for cls in type(unit.core).__mro__)
        return self._settings.transformer_type not in (UNNAMED, *own)

    def policy(self, unit: Unit, branch: str, grid: Grid) -> TeaCachePolicy:
        constants = self._constants[unit]
        return TeaCachePolicy(
            self._settings.rel_l1_thresh,
            constants.polynomial(branch),
            grid,
            retained=constants.retained,
            late=self.reads_late,
        )

    def signal(self, unit: Unit) -> Signal:
        return self._constants[unit].signal
