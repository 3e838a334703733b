"""TaylorSeer (Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers",
arXiv:2503.06923): compute one step per interval, and forecast the others by a Taylor series of finite differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import Config, setting
from ..engine.backend import EngineBackend
from ..engine.install import CachedTransformer
from ..engine.method import Method, Runner
from ..engine.output import OutputRunner
from ..engine.storage import STORAGES
from ..grid import Grid
from ..policies.interval import IntervalPolicy
from ..predictors import Taylor


@dataclass(frozen=True)
class TaylorSeerConfig(Config):
    """Compute the first `warmup_steps`, then one step per `interval`; forecast the others.

    `quantity` is what is forecast: the transformer's output, so that nothing inside it runs at a held step, or the
    residuals of the blocks.
    """

    method: ClassVar[str] = "taylor_seer"
    color: ClassVar[str] = "olive"
    vllm_omni: ClassVar[str] = "holdover_taylor_seer"

    interval: int = setting(5, ge=1, doc="compute one of this many steps; 1 computes all")
    growth: float = setting(0.0, ge=0, doc="how much longer the interval is after each computed step")
    warmup_steps: int = setting(3, ge=0, doc="number of first steps that are always computed")
    order: int = setting(1, ge=0, le=8, doc="order of the series; 0 holds the last value")
    exact: bool = setting(False, doc="use the polynomial through the computed steps instead of the published series")
    quantity: str = setting("output", choices=("output", "residuals"), doc="what is forecast")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="storage of what is held")

    @property
    def batchable(self) -> bool:
        return True


class TaylorSeerMethod(Method[TaylorSeerConfig]):
    """TaylorSeer on the residuals of the blocks."""

    name = "taylor_seer"

    def __init__(self, config: TaylorSeerConfig) -> None:
        super().__init__(config)
        self.storage = STORAGES[config.hold_in]

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> IntervalPolicy:
        return IntervalPolicy(self.config.warmup_steps, self.config.interval, self.config.growth, grid)

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Taylor:
        return Taylor(self.config.order, self.config.exact)


class TaylorSeerOutputMethod(TaylorSeerMethod):
    """TaylorSeer on the transformer's output."""

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return OutputRunner(transformer)


class TaylorSeerBackend(EngineBackend[TaylorSeerConfig]):
    """TaylorSeer: compute one step per interval and forecast the others."""

    config_class = TaylorSeerConfig

    def make_method(self, settings: TaylorSeerConfig) -> TaylorSeerMethod:
        return (TaylorSeerOutputMethod if settings.quantity == "output" else TaylorSeerMethod)(settings)
