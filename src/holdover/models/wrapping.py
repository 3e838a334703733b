"""What a wrapper wraps: the module inside torch.compile, FSDP or DDP, and the class that `fully_shard` built upon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

# Where torch's wrappers keep what they wrap: torch.compile, FullyShardedDataParallel, activation checkpointing.
_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped(module: Any) -> Any:
    """The module inside every wrapper around it; anything else is returned as it is."""
    while isinstance(module, nn.Module):
        inner = next((module._modules[name] for name in _INSIDE if name in module._modules), None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            break
        module = inner
    return module


def class_of(module: object) -> type:
    """The module's own class: not the one `fully_shard` derived from it."""
    bases = type(module).__mro__
    return bases[bases.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else bases[0]


def in_shard_wrappers(module: nn.Module) -> bool:
    """Whether FSDP's older wrappers are around any part of a module."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which each rank has a part; every rank of its group must ask."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """The weights of a module that `fully_shard` has spread over ranks, here for a while; every rank must ask."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
