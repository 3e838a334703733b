"""Weights that are somewhere else: bring one block's to the device for as long as its signal is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def onloaded(block: nn.Module) -> Iterator[None]:
    """Run a block's own offload hooks around reading one of its submodules."""
    registry = getattr(block, "_diffusers_hook", None)
    hook = registry.get_hook("group_offloading") if registry is not None else None
    if hook is None:
        yield
        return
    hook.pre_forward(block)
    try:
        yield
    finally:
        hook.post_forward(block, None)
