"""Weights spread over ranks: FSDP in its two forms, and tensor parallel."""

from __future__ import annotations

from typing import Any

import diffusers.hooks.tensor_parallel
import torch
from diffusers import TensorParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)  # it works there; it is only not offered


def _lists(transformer: nn.Module) -> list[nn.ModuleList]:
    return [child for child in transformer.children() if isinstance(child, nn.ModuleList)]


def fully_sharded(pipe: Any) -> None:
    """Blocks and the rest, each by `fully_shard`."""
    mesh = init_device_mesh("cpu", (2,))
    for blocks in _lists(pipe.transformer):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(pipe.transformer, mesh=mesh)


def wrapped(pipe: Any) -> None:
    """Blocks and the rest, each in FSDP's older wrapper."""
    cpu = torch.device("cpu")
    for blocks in _lists(pipe.transformer):
        for i, block in enumerate(blocks):
            blocks[i] = FullyShardedDataParallel(block, device_id=cpu, use_orig_params=True)
    pipe.transformer = FullyShardedDataParallel(pipe.transformer, device_id=cpu, use_orig_params=True)


def tensor_split(pipe: Any) -> None:
    """Every weight of the blocks, by diffusers."""
    pipe.transformer.enable_parallelism(config=TensorParallelConfig(tp_degree=2))


HOW = {"fully_shard": fully_sharded, "wrapper": wrapped, "tensor": tensor_split}
