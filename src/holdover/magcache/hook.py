"""The documented hooks of MagCache: the first block decides, blocks are held, the last block stores the residual."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..engine.backend import BranchStateManager, MethodHook
from ..policies.magcache import MagCacheState
from .backend import MagCacheBackend
from .calibration import NEUTRAL, step_figures
from .config import MagCacheConfig
from .strategy import MagCacheStrategy, Residual

logger = logging.getLogger(__name__)


class MagCacheHeadHook(MethodHook[MagCacheState]):
    """Hook of the first block, at which each step is computed or held."""

    def log_cache_hit(self, state: MagCacheState, output: Any, ret: Any) -> None:
        """Log that the step is held."""
        logger.debug("held, accumulated error %.4f over %d steps", state.accumulated_err, state.accumulated_steps)

    def log_cache_miss(self, state: MagCacheState, output: Any) -> None:
        """Log that the step is computed."""
        logger.debug("computed at step %s", state.anchor)


class MagCacheBlockHook(MethodHook[MagCacheState]):
    """Hook of every other block, which runs or is held; the last one (`is_tail`) stores the residual."""

    def __init__(
        self, state_manager: BranchStateManager[MagCacheState], config: MagCacheConfig, is_tail: bool = False
    ) -> None:
        super().__init__(state_manager, config)
        self.is_tail = is_tail
        self._previous: tuple[torch.Tensor, ...] = ()

    def advance_step(self, state: MagCacheState) -> None:
        """Record the end of a step. Nothing is counted: the scheduler tells which step it was."""
        state.seen = state.anchor if state.seen is None else state.seen

    def log_residual_computed(self, state: MagCacheState, residual: Residual) -> None:
        """Log the shape of the stored residual."""
        shapes = [tuple(t.shape) for t in _tensors(residual)]
        logger.debug("residual of step %s stored: %s", state.anchor, shapes)

    def perform_calibration(self, state: MagCacheState, current_residual: Residual) -> None:
        """Append the step's mean magnitude ratio, its standard deviation and the cosine distance to the state."""
        tensors = _tensors(current_residual)
        figures = step_figures(tensors, self._previous).tolist() if self._previous else NEUTRAL.tolist()
        state.norm_ratios.append(figures[0])
        state.norm_stds.append(figures[1])
        state.cos_dises.append(figures[2])
        self._previous = tensors


def _tensors(residual: Residual) -> tuple[torch.Tensor, ...]:
    return (residual,) if isinstance(residual, torch.Tensor) else tuple(residual)


def apply_mag_cache_hook(module: nn.Module, config: MagCacheConfig, strategy: MagCacheStrategy | None = None) -> None:
    """Enable MagCache on a transformer; `holdover.disable(module)` disables it."""
    MagCacheBackend(config, strategy).enable(module)
