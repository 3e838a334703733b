"""Spectrum (Han et al., "Adaptive Spectral Feature Forecasting for Diffusion Sampling Acceleration", arXiv:2603.01623):
compute steps at growing intervals, and forecast the others by Chebyshev polynomials fitted to all computed steps.
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
from ..predictors import Chebyshev


@dataclass(frozen=True)
class SpectrumConfig(Config):
    """Compute the first `warmup_steps`, then one step per `interval`, which grows by `growth` each time.

    The others are forecast by Chebyshev polynomials up to `degree`, fitted to all computed steps with a ridge, mixed
    with the straight line through the last two. `quantity` is what is forecast: the transformer's output, so that
    nothing inside it runs at a held step, or the residuals of the blocks.
    """

    method: ClassVar[str] = "spectrum"
    color: ClassVar[str] = "pink"
    vllm_omni: ClassVar[str] = "holdover_spectrum"

    interval: float = setting(2.0, ge=1, doc="compute one of this many steps at first; 1 without growth computes all")
    growth: float = setting(0.75, ge=0, doc="how much longer the interval is after each computed step")
    warmup_steps: int = setting(5, ge=0, doc="number of first steps that are always computed")
    degree: int = setting(4, ge=0, le=16, doc="highest degree of the Chebyshev polynomials")
    ridge: float = setting(0.1, gt=0, doc="strength of the regularization")
    share: float = setting(0.5, ge=0, le=1, doc="share of the polynomials in the forecast; the rest is a straight line")
    quantity: str = setting("output", choices=("output", "residuals"), doc="what is forecast")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="storage of what is held")

    @property
    def batchable(self) -> bool:
        return True


class SpectrumMethod(Method[SpectrumConfig]):
    """Spectrum on the residuals of the blocks."""

    name = "spectrum"
    needs_steps = True

    def __init__(self, config: SpectrumConfig) -> None:
        super().__init__(config)
        self.storage = STORAGES[config.hold_in]

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> IntervalPolicy:
        return IntervalPolicy(self.config.warmup_steps, self.config.interval, self.config.growth, grid)

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Chebyshev:
        settings, end = self.config, grid.first + grid.length
        return Chebyshev(settings.degree, settings.ridge, settings.share, grid.first, end, depth=grid.length)


class SpectrumOutputMethod(SpectrumMethod):
    """Spectrum on the transformer's output."""

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return OutputRunner(transformer)


class SpectrumBackend(EngineBackend[SpectrumConfig]):
    """Spectrum: compute steps at growing intervals and forecast the others from all of them."""

    config_class = SpectrumConfig

    def make_method(self, settings: SpectrumConfig) -> SpectrumMethod:
        return (SpectrumOutputMethod if settings.quantity == "output" else SpectrumMethod)(settings)
