"""First-block cache (ParaAttention, https://github.com/chengzeyi/ParaAttention; also in diffusers): the first block
runs at every step, and the others are held while what it adds has changed little since the last computed step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..config import Config, setting
from ..engine.backend import EngineBackend
from ..engine.install import CachedTransformer
from ..engine.method import Method
from ..engine.storage import STORAGES
from ..errors import UnsupportedModelError
from ..grid import Grid
from ..models.registry import Signal
from ..policies.first_block import FirstBlockPolicy


@dataclass(frozen=True)
class FirstBlockConfig(Config):
    """Hold while the residual of the first block differs by less than `threshold` from the last computed step's."""

    method: ClassVar[str] = "first_block"
    color: ClassVar[str] = "brown"
    vllm_omni: ClassVar[str] = "holdover_first_block"

    threshold: float = setting(0.1, ge=0, doc="hold while the first block's residual differs by less than this")
    warmup_steps: int = setting(0, ge=0, doc="number of first steps that are always computed")
    hold_in: str = setting("device", choices=("device", "fp8", "cpu"), doc="storage of held residuals")


def read_residual(residual: torch.Tensor) -> torch.Tensor:
    """Return what the first block adds, as it is."""
    return residual


RESIDUAL = Signal("first block", of_residual=read_residual)


class FirstBlockMethod(Method[FirstBlockConfig]):
    """First-block cache with one set of settings."""

    name = "first_block"
    compares_computed = True

    def __init__(self, config: FirstBlockConfig) -> None:
        super().__init__(config)
        self.storage = STORAGES[config.hold_in]

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        if transformer.extractor is not None:
            raise UnsupportedModelError(
                f"{transformer.class_name} runs through a registered extractor, which runs all blocks at once: "
                "first_block cannot run the first one alone. Use easy_cache, sea_cache or spectrum."
            )
        return ()

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> FirstBlockPolicy:
        return FirstBlockPolicy(self.config.threshold, self.config.warmup_steps, grid)

    def signal(self, transformer: CachedTransformer) -> Signal:
        return RESIDUAL


class FirstBlockBackend(EngineBackend[FirstBlockConfig]):
    """First-block cache: hold the other blocks while the first one adds nearly the same."""

    config_class = FirstBlockConfig

    def make_method(self, settings: FirstBlockConfig) -> FirstBlockMethod:
        return FirstBlockMethod(settings)
