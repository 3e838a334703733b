"""TeaCache put together: the policy of its paper, a model's signal, a profile's polynomial."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, HoldoverWarning, did_you_mean
from ..grid import Grid
from ..models.family import Signal
from ..models.registry import INPUT
from ..policies.teacache import Polynomial, TeaCachePolicy
from ..profiles import TeaCacheFit, TeaCacheProfile, find
from ..runtime.method import Method
from ..runtime.unit import Unit
from .config import TeaCacheConfig


@dataclass(frozen=True)
class _Constants:
    """What TeaCache knows of one transformer."""

    signal: Signal
    profile: TeaCacheProfile | None
    coefficients: tuple[float, ...] | None

    def polynomial(self, branch: str) -> Polynomial:
        if self.coefficients is not None:
            return Polynomial.trusted(self.coefficients)
        assert self.profile is not None
        return polynomial_of(self.profile.fit(branch))

    @property
    def retained(self) -> int:
        return self.profile.retained if self.profile is not None else 1


def polynomial_of(fit: TeaCacheFit) -> Polynomial:
    """A fit's polynomial on its own range, or on the part of it that can be trusted."""
    if fit.low is not None and fit.high is not None:
        return Polynomial(fit.coefficients, fit.low, fit.high)
    return Polynomial.trusted(fit.coefficients)


class TeaCacheMethod(Method):
    """TeaCache with one set of settings."""

    name = "tea_cache"

    def __init__(self, config: TeaCacheConfig) -> None:
        super().__init__(config)
        self._settings = config
        self._constants: dict[Unit, _Constants] = {}

    def prepare(self, unit: Unit, pipeline: Any) -> tuple[str, ...]:
        constants = self._constants[unit] = self._resolve(unit, pipeline)
        least = constants.polynomial("").minimum()
        if 0 < self._settings.rel_l1_thresh <= least:
            warnings.warn(
                f"TeaCache can never hold a step of {unit.class_name} at "
                f"rel_l1_thresh={self._settings.rel_l1_thresh:g}: its polynomial adds at least {least:.3g} at every "
                "step. Use a threshold above that, or measure coefficients of your own with "
                "holdover.teacache.estimate_coefficients.",
                HoldoverWarning,
                stacklevel=2,
            )
        source = "coefficients given" if constants.profile is None else f"profile {constants.profile.name}"
        return (f"{unit.name}: signal {constants.signal.name}, {source}",)

    def _resolve(self, unit: Unit, pipeline: Any) -> _Constants:
        settings = self._settings
        if settings.signal is not None:
            self._signal(unit, settings.signal)  # an unknown name is an error of its own
        if settings.coefficients is not None:
            return _Constants(self._signal(unit, settings.signal), None, settings.coefficients)
        profile = find("tea_cache", unit.core, pipeline, settings.profile, settings.signal)
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
        return _Constants(self._signal(unit, profile.signal), profile, None)

    def _signal(self, unit: Unit, name: str | None) -> Signal:
        signal = unit.family.signal(name)
        if signal is None and name in (None, INPUT.name):
            return INPUT
        if signal is None:
            known = [s.name for s in unit.family.signals] + [INPUT.name]
            hint = did_you_mean(name or "", known) or f" It has {', '.join(known)}."
            raise ConfigError(f"{unit.class_name} has no signal {name!r}.{hint}")
        return signal

    def policy(self, unit: Unit, branch: str, grid: Grid) -> TeaCachePolicy:
        constants = self._constants[unit]
        return TeaCachePolicy(
            self._settings.rel_l1_thresh, constants.polynomial(branch), grid, retained=constants.retained
        )

    def signal(self, unit: Unit) -> Signal:
        return self._constants[unit].signal
