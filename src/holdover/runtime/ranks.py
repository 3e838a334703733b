"""Who is this process? The groups of processes that one request runs over."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..models.inputs import unwrap_module

Group = dist.ProcessGroup | DeviceMesh


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The groups of processes this one works with, as a user states them.

    - `cfg`: each rank runs one branch of guidance, in the order in which one process would run them.
    - `sequence`: each rank has a part of the tokens (context parallel).
    - `tensor`: each rank has a part of every weight and all the tokens.
    - `shards`: each rank keeps a part of the weights and gathers the whole to run a block (FSDP).

    A group is a process group or a device mesh of one dimension. What is not stated is read off the transformer. Ranks
    that work on other requests are in none of them: nothing is exchanged with those.
    """

    cfg: Group | None = None
    sequence: Group | None = None
    tensor: Group | None = None
    shards: Group | None = None

    def __post_init__(self) -> None:
        self.groups()

    def groups(self) -> Groups:
        """The same as process groups; an error for one that this rank is not in."""
        return Groups(**{f.name: _process_group(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups a transformer runs over; None for one that is this process alone."""

    cfg: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None

    @property
    def branch(self) -> tuple[int, int]:
        """Which of how many branches of guidance is this rank's."""
        return (0, 1) if self.cfg is None else (dist.get_rank(self.cfg), dist.get_world_size(self.cfg))

    @property
    def in_step(self) -> tuple[dist.ProcessGroup, ...]:
        """Those whose ranks must run the same blocks at the same step, because they meet inside them."""
        return tuple(group for group in (self.sequence, self.tensor, self.shards) if group is not None)

    @property
    def every(self) -> tuple[dist.ProcessGroup, ...]:
        """All that this process is in."""
        return self.in_step if self.cfg is None else (self.cfg, *self.in_step)


ALONE = Groups()


def _process_group(name: str, group: Any) -> dist.ProcessGroup | None:
    """A group as a process group; None for one that is this process alone."""
    if group is None:
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(f"Ranks.{name} must be one dimension of a mesh, mesh[{name!r}] say, not all of {group}.")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"Ranks.{name} must be a process group this rank is in, or a device mesh, not {group!r}.")
    return group if dist.get_world_size(group) > 1 else None


def groups_of(transformer: nn.Module, stated: Ranks | None) -> Groups:
    """The groups that were stated, and those the transformer itself was split over."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    found = Ranks(**_configured(unwrap_module(transformer)), **_sharded(transformer)).groups()
    if stated is None:
        return found
    said = stated.groups()
    pairs = {f.name: (getattr(said, f.name), getattr(found, f.name)) for f in dataclasses.fields(Groups)}
    return Groups(**{name: _one_of(name, *pair) for name, pair in pairs.items()})


def _one_of(name: str, said: dist.ProcessGroup | None, found: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """What was stated, or what was found; they must not contradict each other."""
    if said is None or found is None:
        return said or found
    ours, its = dist.get_process_group_ranks(said), dist.get_process_group_ranks(found)
    if ours != its:
        raise ConfigError(f"Ranks.{name} is {ours}, but the transformer is split over ranks {its}: leave it out.")
    return said


def _configured(core: Any) -> dict[str, Group]:
    """What diffusers' `enable_parallelism` wrote down on the transformer."""
    config = getattr(core, "_parallel_config", None)
    if config is None:
        return {}
    if config.context_parallel_config is not None:
        return {"sequence": config.context_parallel_config._flattened_mesh}
    return {"tensor": config.tensor_parallel_config._mesh}


def _sharded(transformer: nn.Module) -> dict[str, Group | None]:
    """The group FSDP spreads the weights over: of the wrapper, or of the parameters that `fully_shard` made."""
    for module in transformer.modules():
        if isinstance(module, FullyShardedDataParallel):
            return {"shards": module.process_group}
        if isinstance(module, FSDPModule):
            group = _shard_group(module)
            if group is None:  # gathered by a forward that has just ended
                module.reshard()
                group = _shard_group(module)
            return {} if group is None else {"shards": group}
    return {}


def _shard_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The group of the outermost dimension that weights are sharded in; None while all are gathered."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            sharded = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
            if sharded:
                return parameter.device_mesh.get_group(sharded[0])
    return None
