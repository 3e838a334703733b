"""MagCache on a bare transformer, under the documented names: the head decides, blocks hold, the tail stores."""

from __future__ import annotations

import logging
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import nn

from ..policies.magcache import MagCacheState
from ..runtime.hooks import BranchStates
from ..runtime.unit import Unit
from .backend import MagCacheBackend
from .calibration import step_figures
from .config import MagCacheConfig
from .strategy import MagCacheStrategy, Residual

logger = logging.getLogger(__name__)


class _BlockRole(ModelHook):  # type: ignore[misc]
    """A block's place at the seam; called, it answers as the running pass does."""

    _is_stateful = True

    def __init__(self, state_manager: BranchStates[MagCacheState], config: MagCacheConfig) -> None:
        super().__init__()
        self.state_manager = state_manager
        self.config = config
        self._unit: Unit | None = None

    def at(self, unit: Unit) -> None:
        """Belong to the cut of one transformer."""
        self._unit = unit

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        return module

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The block's answer in this forward: computed where the pass computes, held where it holds."""
        if self._unit is None or self._unit.running is None:
            return module(*args, **kwargs)
        blocks, index = self._unit.place_of(module)
        return self._unit.running.call(blocks, index, module, args, kwargs)

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Forget everything: the next forward begins a generation."""
        self.state_manager.reset()
        return module


class MagCacheHeadHook(_BlockRole):
    """The first block: decides whether the step is computed or held."""

    def log_cache_hit(self, state: MagCacheState, output: Any, ret: Any) -> None:
        """Say that the step is held."""
        logger.debug("held, accumulated error %.4f over %d steps", state.accumulated_err, state.accumulated_steps)

    def log_cache_miss(self, state: MagCacheState, output: Any) -> None:
        """Say that the step is computed."""
        logger.debug("computed at step %s", state.anchor)


class MagCacheBlockHook(_BlockRole):
    """Every other block: runs or passes through; the tail stores the residual."""

    def __init__(
        self, state_manager: BranchStates[MagCacheState], config: MagCacheConfig, is_tail: bool = False
    ) -> None:
        super().__init__(state_manager, config)
        self.is_tail = is_tail
        self._previous: tuple[torch.Tensor, ...] = ()

    def advance_step(self, state: MagCacheState) -> None:
        """Note that a step is done; which one it was is known from the scheduler, so nothing is counted."""
        state.seen = state.anchor if state.seen is None else state.seen

    def log_residual_computed(self, state: MagCacheState, residual: Residual) -> None:
        """Say how large the stored residual is."""
        shapes = [tuple(t.shape) for t in _tensors(residual)]
        logger.debug("residual of step %s stored: %s", state.anchor, shapes)

    def perform_calibration(self, state: MagCacheState, current_residual: Residual) -> None:
        """Add one step's ratio, deviation and change of direction to the state."""
        tensors = _tensors(current_residual)
        figures = step_figures(tensors, self._previous).tolist() if self._previous else [1.0, 0.0, 0.0]
        state.norm_ratios.append(figures[0])
        state.norm_stds.append(figures[1])
        state.cos_dises.append(figures[2])
        self._previous = tensors


def _tensors(residual: Residual) -> tuple[torch.Tensor, ...]:
    return (residual,) if isinstance(residual, torch.Tensor) else tuple(residual)


def apply_mag_cache_hook(module: nn.Module, config: MagCacheConfig, strategy: MagCacheStrategy | None = None) -> None:
    """Put MagCache on a transformer; `holdover.disable(module)` takes it off."""
    MagCacheBackend(config, strategy).enable(module)
