"""Weights that are somewhere else: bring a block's to the device, or together, for as long as its signal is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ..models.inputs import gather_weights


@contextlib.contextmanager
def onloaded(block: nn.Module) -> Iterator[None]:
    """Run a block's own offload hooks around reading one of its submodules, and gather weights spread over ranks."""
    registry = getattr(block, "_diffusers_hook", None)
    hook = registry.get_hook("group_offloading") if registry is not None else None
    if hook is None:
        with gather_weights(block):
            yield
        return
    hook.pre_forward(block)
    try:
        yield
    finally:
        hook.post_forward(block, None)
