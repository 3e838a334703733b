"""MagCache as a backend: the policy of its paper and the model's magnitude ratios."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ..engine.backend import EngineBackend
from ..engine.blocks import BlockPasses
from ..engine.install import CachedTransformer
from ..engine.method import BLOCK_PASSES, Method
from ..engine.state import ComputedForward
from ..engine.storage import STORAGES
from ..errors import WITHOUT_CONSTANTS, ConfigError, NotEnabledError
from ..grid import Grid
from ..models.inputs import get_module_class
from ..policies.base import AlwaysCompute, Policy
from ..policies.magcache import MagCachePolicy, nearest_ratios, rescaled_ratios
from ..profiles import MagCacheProfile, MagCacheRatios, find, save, shipped
from ..profiles.profile import display_name
from .calibration import Calibration, log_calibration
from .config import MagCacheConfig
from .strategy import MagCacheStrategy, MagCacheStrategyRegistry, StrategyPasses

logger = logging.getLogger(__name__)


def resolve_profile(
    config: MagCacheConfig, strategy: MagCacheStrategy | None, transformer: nn.Module | None, pipeline: Any = None
) -> MagCacheProfile:
    """Ratios given, else those of the profile asked for, of a strategy, or of the profile that fits the transformer."""
    class_name = "this transformer" if transformer is None else get_module_class(transformer).__name__
    if config.ratios_by_branch:
        return _as_profile("given", class_name, config.ratios_by_branch)
    if config.profile is None and strategy is not None and strategy.mag_ratios is not None:
        ratios = tuple(float(r) for r in strategy.mag_ratios)
        return _as_profile(type(strategy).__name__, class_name, {"": ratios})
    named = config.transformer_type
    if config.profile is None and named and named not in (c.__name__ for c in type(transformer).__mro__):
        profile = next((p for p in shipped("mag_cache") if p.transformer_class == named), None)
    else:
        profile = find("mag_cache", nn.Identity() if transformer is None else transformer, pipeline, config.profile)
    if profile is None:
        raise ConfigError(
            f"No magnitude ratios ship for {named or class_name}. Measure them: run a generation under "
            'holdover.enable(pipe, "mag_cache", calibrate=True, calibration_path="ratios.json"), then give '
            'profile="ratios.json". ' + WITHOUT_CONSTANTS
        )
    return profile


def make_policy(config: MagCacheConfig, profile: MagCacheProfile | None, branch: str, grid: Grid) -> Policy:
    """The policy of one branch in one generation; in calibration, which has no profile, every step is computed."""
    if profile is None:
        return AlwaysCompute()
    ratios, last = profile.ratios(branch), grid.count - 1
    if config.interpolation == "nearest":
        ratios = nearest_ratios(ratios, grid.count)
    else:
        ratios = rescaled_ratios(ratios, grid, profile.noise or None)
    return MagCachePolicy(
        config.mag_threshold,
        config.mag_max_skip_steps,
        config.mag_retention_ratio,
        ratios,
        grid,
        frozenset(round(step * last / max(profile.num_inference_steps - 1, 1)) for step in profile.never_hold),
    )


class MagCacheMethod(Method[MagCacheConfig]):
    """MagCache with one set of settings; in calibration it holds nothing and measures."""

    name = "mag_cache"

    def __init__(self, config: MagCacheConfig, strategy: MagCacheStrategy | None = None) -> None:
        super().__init__(config)
        self._strategy = strategy
        self._profiles: dict[CachedTransformer, MagCacheProfile] = {}
        self._passes: dict[CachedTransformer, BlockPasses] = {}
        self._strategies: dict[CachedTransformer, MagCacheStrategy | None] = {}
        self.calibration = Calibration() if config.calibrating else None
        self.observes = config.calibrating
        self.storage = STORAGES[config.hold_in]

    @property
    def declared_steps(self) -> int:
        return self.config.num_inference_steps

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        found, own = MagCacheStrategyRegistry.find(transformer.core, self.config.transformer_type)
        strategy, own = (found, own) if self._strategy is None else (self._strategy, True)
        overrides = strategy is not None and own and strategy.overrides_residual
        self._passes[transformer] = StrategyPasses(strategy) if strategy and overrides else BLOCK_PASSES
        self._strategies[transformer] = strategy if own else None
        if self.calibration is not None:
            return (f"{transformer.name}: calibrating, nothing is held",)
        profile = self._profiles[transformer] = resolve_profile(self.config, strategy, transformer.core, pipeline)
        return (f"{transformer.name}: ratios {display_name(profile)}",)

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Policy:
        return make_policy(
            self.config, self._profiles.get(transformer), branch, grid if grid.bounded else Grid(self.declared_steps)
        )

    def block_passes(self, transformer: CachedTransformer) -> BlockPasses:
        return self._passes[transformer]

    def observe(self, computed: ComputedForward) -> None:
        assert self.calibration is not None
        strategy = self._strategies[computed.transformer]
        self.calibration.add(computed, None if strategy is None else strategy.measure_step)

    def on_end(self) -> None:
        if self.calibration is None:
            return
        self.calibration.finish()
        profile = self.calibration.profile()
        if profile is None:
            return
        log_calibration(logger, profile.branches)
        if self.config.calibration_path is not None:
            save(profile, self.config.calibration_path)


def _as_profile(name: str, class_name: str, branches: dict[str, tuple[float, ...]]) -> MagCacheProfile:
    lists = tuple((branch, MagCacheRatios(ratios)) for branch, ratios in branches.items())
    steps = len(lists[0][1].ratios)
    return MagCacheProfile(
        name=name,
        model=class_name,
        transformer_class=class_name,
        num_inference_steps=steps,
        branches=lists,
        source=(("given by", name),),
    )


class MagCacheBackend(EngineBackend[MagCacheConfig]):
    """MagCache: hold while the residual's magnitude has changed little since the last computed step."""

    config_class = MagCacheConfig

    def __init__(self, config: Any = None, strategy: MagCacheStrategy | None = None) -> None:
        super().__init__(config)
        self._strategy = strategy
        self._calibrations: list[Calibration] = []

    def make_method(self, settings: MagCacheConfig) -> MagCacheMethod:
        method = MagCacheMethod(settings, self._strategy)
        if method.calibration is not None:
            self._calibrations.append(method.calibration)
        return method

    def calibration(self) -> MagCacheProfile:
        """The ratios measured so far, averaged over the generations run under `calibrate=True`."""
        for calibration in reversed(self._calibrations):
            measured = calibration.profile()
            if measured is not None:
                return measured
        raise NotEnabledError("Nothing was measured: run a generation with calibrate=True first.")
