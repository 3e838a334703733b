"""SeaCache ("Spectral-Evolution-Aware Cache for Accelerating Diffusion Models", arXiv:2602.18993): TeaCache's rule on
latents from which a Wiener filter has taken the noise of the step. The filter follows from the noise level; there are
no coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, ClassVar

import torch

from ..config import Config, setting
from ..engine.backend import EngineBackend
from ..engine.install import CachedTransformer
from ..engine.method import Method
from ..engine.storage import STORAGES
from ..grid import Grid
from ..models.registry import Arguments, Signal
from ..policies.sea_cache import UNSCALED, SeaCachePolicy
from ..predictors import Predictor, Taylor
from ..stats import GenerationStats

_LEAST = 1e-6  # of signal and of noise


@dataclass(frozen=True)
class SeaCacheConfig(Config):
    """Hold while the accumulated change of the filtered latents stays below `threshold`.

    `order=1` extrapolates the held residual from the last two computed ones instead of repeating the last.
    """

    method: ClassVar[str] = "sea_cache"
    color: ClassVar[str] = "cyan"
    vllm_omni: ClassVar[str] = "holdover_sea_cache"

    threshold: float = setting(0.25, ge=0, doc="hold while the accumulated change is below this")
    warmup_steps: int = setting(1, ge=0, doc="number of first steps that are always computed")
    max_held: int = setting(0, ge=0, doc="hold at most this many steps in a row; 0 for no limit")
    order: int = setting(0, ge=0, le=1, doc="hold the last residual (0), or extrapolate the last two (1)")
    power: float | None = setting(
        None, gt=0, doc="exponent of the signal's spectrum; by default 2 for images, 3 for video"
    )
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="storage of held residuals")


def filter_noise(latents: torch.Tensor, axes: Sequence[int], signal: float, noise: float, power: float) -> torch.Tensor:
    """Latents that are `signal` times an image plus `noise` times white noise, through a Wiener filter.

    The power of an image's spectrum is taken to fall as |f|^-power along each axis. The filter is scaled to a mean of
    1, so that changes at different noise levels can be added.
    """
    values = latents.float()
    if not axes:
        return values
    gain = torch.ones((), device=values.device)
    for axis in axes:
        size = values.shape[axis]
        inverse = torch.fft.fftfreq(size, device=values.device).abs().pow(power)  # of the power at each frequency
        along = signal / (signal**2 + noise**2 * inverse)
        gain = gain * along.reshape([size if i == axis else 1 for i in range(values.ndim)])
    spectrum = torch.fft.fftn(values, dim=tuple(axes))
    filtered: torch.Tensor = torch.fft.ifftn(spectrum * (gain / gain.mean()), dim=tuple(axes)).real
    return filtered


def find_channels(latent: torch.Tensor, count: int | None) -> int:
    """The axis of a latent's channels, of which the model has `count`: usually the second, last in a sequence."""
    usual = (2, 1) if latent.ndim == 3 else (1, 2, 0, latent.ndim - 1) if latent.ndim > 3 else (latent.ndim - 1,)
    return next((axis for axis in usual if latent.shape[axis] == count), usual[0])


def find_token_grid(arguments: Arguments, tokens: int) -> tuple[int, ...]:
    """Frames, rows and columns of a sequence of tokens if the arguments show them, else its length."""
    shape = arguments.get("img_shapes")
    while isinstance(shape, (list, tuple)) and shape and isinstance(shape[0], (list, tuple)):
        shape = shape[0]
    ids = arguments.get("img_ids")
    if isinstance(ids, torch.Tensor):
        ids = (ids.flatten(0, -2).amax(0) + 1).tolist()
    sizes: Any = [arguments.get(name) for name in ("num_frames", "height", "width")]
    for found in (sizes, shape, ids):
        if found and None not in found and prod(found) == tokens:
            return tuple(int(size) for size in found)
    return (tokens,)


class SeaCacheMethod(Method[SeaCacheConfig]):
    """SeaCache with one set of settings."""

    name = "sea_cache"

    def __init__(self, config: SeaCacheConfig) -> None:
        super().__init__(config)
        self.storage = STORAGES[config.hold_in]
        self._pipeline: Any = None
        self._signals: dict[CachedTransformer, Signal] = {}
        self._grids: dict[int, tuple[int, ...]] = {}  # of the sequences of this generation, by length
        self._kept: list[float] = []  # of the signal's power, at each training timestep; empty for flow models

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        self._pipeline = pipeline
        self._signals[transformer] = Signal("filtered latents", of_input=partial(self._filter_latents, transformer))
        return ()

    def on_start(self, stats: GenerationStats) -> None:
        self._grids.clear()
        scheduler = getattr(self._pipeline, "scheduler", None)
        kept = getattr(scheduler, "alphas_cumprod", None)
        flow = getattr(getattr(scheduler, "config", None), "use_flow_sigmas", False)
        self._kept = kept.tolist() if isinstance(kept, torch.Tensor) and not flow else []

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> SeaCachePolicy:
        settings = self.config
        return SeaCachePolicy(settings.threshold, UNSCALED, grid, settings.warmup_steps, max_held=settings.max_held)

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Predictor:
        return Taylor(1) if self.config.order else super().predictor(transformer, branch, grid)

    def signal(self, transformer: CachedTransformer) -> Signal:
        return self._signals[transformer]

    def _filter_latents(self, transformer: CachedTransformer, arguments: Arguments, noise: float) -> torch.Tensor:
        """The latents without the noise of this step, as one vector."""
        amounts, filtered = self._mixture(noise), []
        count = getattr(getattr(transformer.core, "config", None), "in_channels", None)
        for latent in transformer.inputs.get_latents(arguments):
            channels = find_channels(latent, count)
            if latent.ndim < 4 and channels == latent.ndim - 1:  # a sequence of tokens
                tokens = latent.shape[:-1].numel() if latent.ndim < 3 else latent.shape[1]
                grid = self._grids.get(tokens) or self._grids.setdefault(tokens, find_token_grid(arguments, tokens))
                latent, channels = latent.reshape(-1, *grid, latent.shape[-1]), len(grid) + 1
            axes = [axis for axis in range(1, latent.ndim) if axis != channels and latent.shape[axis] > 1]
            power = self.config.power or (3.0 if len(axes) > 2 else 2.0)
            filtered.append(filter_noise(latent, axes, *amounts, power).flatten())
        return torch.cat(filtered)

    def _mixture(self, noise: float) -> tuple[float, float]:
        """The amounts of signal and of noise in the latents at a noise level."""
        if self._kept:
            share = self._kept[min(int(noise * len(self._kept)), len(self._kept) - 1)]
            share = min(max(share, _LEAST), 1.0 - _LEAST)
            return sqrt(share), sqrt(1.0 - share)
        noise = min(max(noise, _LEAST), 1.0 - _LEAST)
        return 1.0 - noise, noise


class SeaCacheBackend(EngineBackend[SeaCacheConfig]):
    """SeaCache: hold while the latents, without their noise, have changed little since the last computed step."""

    config_class = SeaCacheConfig

    def make_method(self, settings: SeaCacheConfig) -> SeaCacheMethod:
        return SeaCacheMethod(settings)
