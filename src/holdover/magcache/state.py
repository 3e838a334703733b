"""What the documented hooks of MagCache remember of one branch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from diffusers.hooks.hooks import BaseState

from ..engine.storage import HeldTensors
from ..policies.magcache import ErrorAccumulator

if TYPE_CHECKING:
    from .forward import HookedForward, HookedStack
    from .strategy import Residual


@dataclass
class MagCacheState(ErrorAccumulator, BaseState):  # type: ignore[misc]
    """One branch: the residual of the last computed step, the accumulated error, and what a calibration has measured.

    `should_compute` is the decision of the forward that runs or ran last, `head_block_input` the hidden states that
    entered its first block. `previous_residual` is that of the hidden states; without it the next step is computed.
    """

    previous_residual: Residual | None = None
    head_block_input: torch.Tensor | None = None
    should_compute: bool = True
    step_index: int = 0
    norm_ratios: list[float] = field(default_factory=list)
    norm_stds: list[float] = field(default_factory=list)
    cos_dises: list[float] = field(default_factory=list)

    # Of the hooks themselves
    num_inference_steps: int | None = None  # where the context says it
    signature: Any = None  # structure, shapes, dtypes and devices of the first block's arguments
    stack: HookedStack | None = None
    held: HeldTensors | None = None  # the residuals of all streams
    forward: HookedForward | None = None  # the forward that runs

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Forget everything."""
        self.__dict__.update(type(self)().__dict__)
