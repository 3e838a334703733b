"""MagCache put together: the policy of its paper and a model's magnitude ratios."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..grid import Grid
from ..policies.base import Policy
from ..policies.magcache import MagCachePolicy, nearest_ratios, rescaled_ratios
from ..policies.static import AlwaysCompute
from ..profiles import MagCacheProfile, MagCacheRatios, find, save
from ..runtime.method import STANDARD, Computed, Method
from ..runtime.packing import packing
from ..runtime.passes import Passes
from ..runtime.unit import Unit
from .calibration import Calibration
from .config import MagCacheConfig
from .strategy import MagCacheStrategy, StrategyPasses, strategy_of

logger = logging.getLogger(__name__)


class MagCacheMethod(Method):
    """MagCache with one set of settings; in calibration it holds nothing and measures."""

    name = "mag_cache"

    def __init__(self, config: MagCacheConfig, strategy: MagCacheStrategy | None = None) -> None:
        super().__init__(config)
        self._settings = config
        self._strategy = strategy
        self._profiles: dict[Unit, MagCacheProfile] = {}
        self._passes: dict[Unit, Passes] = {}
        self.calibration = Calibration() if config.calibrating else None
        self.observes = config.calibrating
        self.packing = packing(config.hold_in)

    @property
    def declared_steps(self) -> int:
        return self._settings.num_inference_steps

    def prepare(self, unit: Unit, pipeline: Any) -> tuple[str, ...]:
        strategy = self._strategy or strategy_of(unit.core)
        overridden = strategy is not None and strategy.overrides_residual
        self._passes[unit] = StrategyPasses(strategy) if strategy and overridden else STANDARD
        if self.calibration is not None:
            return (f"{unit.name}: calibrating, nothing is held",)
        profile = self._profiles[unit] = self._resolve(unit, pipeline, strategy)
        return (f"{unit.name}: ratios {profile.name}",)

    def _resolve(self, unit: Unit, pipeline: Any, strategy: MagCacheStrategy | None) -> MagCacheProfile:
        """Ratios given, else those of the profile asked for, of a strategy, or of the profile that fits."""
        if self._settings.ratios_by_branch:
            return _as_profile("given", unit, self._settings.ratios_by_branch)
        if self._settings.profile is None and strategy is not None and strategy.mag_ratios is not None:
            ratios = tuple(float(r) for r in strategy.mag_ratios)
            return _as_profile(type(strategy).__name__, unit, {"": ratios})
        profile = find("mag_cache", unit.core, pipeline, self._settings.profile)
        if profile is None:
            raise ConfigError(
                f"No magnitude ratios ship for {unit.class_name}. Measure them: run a generation under "
                'holdover.enable(pipe, "mag_cache", calibrate=True, calibration_path="ratios.json"), then give '
                'profile="ratios.json".'
            )
        return profile

    def policy(self, unit: Unit, branch: str, grid: Grid) -> Policy:
        if self.calibration is not None:
            return AlwaysCompute()
        if not grid.bounded:
            grid = Grid(self.declared_steps)
        profile, settings = self._profiles[unit], self._settings
        return MagCachePolicy(
            settings.mag_threshold,
            settings.mag_max_skip_steps,
            settings.mag_retention_ratio,
            self._ratios(profile, branch, grid),
            grid,
            frozenset(_moved(profile.never_hold, profile.num_inference_steps, grid.count)),
        )

    def _ratios(self, profile: MagCacheProfile, branch: str, grid: Grid) -> tuple[float, ...]:
        ratios = profile.ratios(branch)
        if self._settings.interpolation == "nearest":
            return nearest_ratios(ratios, grid.count)
        return rescaled_ratios(ratios, grid, profile.noise or None)

    def passes(self, unit: Unit) -> Passes:
        return self._passes[unit]

    def observe(self, computed: Computed) -> None:
        assert self.calibration is not None
        self.calibration.add(computed)

    def finished(self) -> None:
        if self.calibration is None:
            return
        self.calibration.finish()
        profile = self.calibration.profile()
        if profile is None:
            return
        for name, ratios in profile.branches:
            logger.info("%s norm_ratios: %s", name, [round(r, 5) for r in ratios.ratios])
            logger.info("%s norm_stds: %s", name, [round(r, 5) for r in ratios.stds])
            logger.info("%s cos_dises: %s", name, [round(r, 5) for r in ratios.cosine_distances])
        logger.info("Copy these values to DiffusionCacheConfig(mag_ratios=...), or save them with calibration_path=.")
        if self._settings.calibration_path is not None:
            save(profile, self._settings.calibration_path)


def _as_profile(name: str, unit: Unit, branches: dict[str, tuple[float, ...]]) -> MagCacheProfile:
    lists = tuple((branch, MagCacheRatios(ratios)) for branch, ratios in branches.items())
    steps = len(lists[0][1].ratios)
    return MagCacheProfile(
        name=name,
        model=unit.class_name,
        transformer_class=unit.class_name,
        num_inference_steps=steps,
        branches=lists,
        source=(("given by", name),),
    )


def _moved(steps: Sequence[int], of: int, to: int) -> list[int]:
    """Step indices of one grid on another, by their place."""
    return [round(step * (to - 1) / max(of - 1, 1)) for step in steps]
