"""Several processes on one request: which groups of ranks there are, what they exchange, how tokens are split.

Ranks that meet inside the blocks must decide alike. Every rank of a group enters each exchange at the same forward,
whatever it would decide by itself; the exchanged numbers are the same on all ranks, and they decide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import ContextParallelSplitHook
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..models.inputs import unwrap_module

Group = dist.ProcessGroup | DeviceMesh


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The groups of processes that one request runs over, as a user states them.

    - `cfg`: each rank runs one branch of guidance, in the order in which one process would run them.
    - `sequence`: each rank has a part of the tokens (context parallel).
    - `tensor`: each rank has a part of every weight and all the tokens.
    - `shards`: each rank keeps a part of the weights and gathers the rest to run a block (FSDP).

    A group is a process group or a one-dimensional device mesh. Groups that are not stated are read from the
    transformer. Ranks that work on other requests belong to none of the groups; nothing is exchanged with them.
    """

    cfg: Group | None = None
    sequence: Group | None = None
    tensor: Group | None = None
    shards: Group | None = None

    def __post_init__(self) -> None:
        self.groups()

    def groups(self) -> Groups:
        """The same as process groups; raises for a group this rank is not in."""
        return Groups(**{f.name: _process_group(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True)
class Groups:
    """The process groups a transformer runs over; None for a group of one process."""

    cfg: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None

    @property
    def cfg_rank(self) -> tuple[int, int]:
        """This rank's number among the ranks that run the branches of guidance, and how many there are."""
        return (0, 1) if self.cfg is None else (dist.get_rank(self.cfg), dist.get_world_size(self.cfg))

    @property
    def synchronized(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups whose ranks must run the same blocks at the same step because they communicate inside them."""
        return tuple(group for group in (self.sequence, self.tensor, self.shards) if group is not None)

    @property
    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """Every group this process is in."""
        return self.synchronized if self.cfg is None else (self.cfg, *self.synchronized)


SINGLE_PROCESS = Groups()


def _process_group(name: str, group: Any) -> dist.ProcessGroup | None:
    if group is None:
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"Ranks.{name} must be one dimension of a mesh, such as mesh[{name!r}], not all of {group}."
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"Ranks.{name} must be a process group this rank is in, or a device mesh, not {group!r}.")
    return group if dist.get_world_size(group) > 1 else None


def find_groups(transformer: nn.Module, stated: Ranks | None) -> Groups:
    """The stated groups, and those the transformer itself is split over; raises where the two contradict."""
    if not dist.is_available() or not dist.is_initialized():
        return SINGLE_PROCESS
    found = Ranks(**_parallel_config(unwrap_module(transformer)), **_shard_groups(transformer)).groups()
    if stated is None:
        return found
    groups, merged = stated.groups(), {}
    for field in dataclasses.fields(Groups):
        ours, its = getattr(groups, field.name), getattr(found, field.name)
        if ours is not None and its is not None:
            our_ranks, its_ranks = dist.get_process_group_ranks(ours), dist.get_process_group_ranks(its)
            if our_ranks != its_ranks:
                raise ConfigError(
                    f"Ranks.{field.name} is {our_ranks}, but the transformer is split over ranks {its_ranks}: "
                    "leave it out."
                )
        merged[field.name] = ours or its
    return Groups(**merged)


def _parallel_config(core: Any) -> dict[str, Group]:
    """The mesh that diffusers' `enable_parallelism` stored on the transformer."""
    config = getattr(core, "_parallel_config", None)
    if config is None:
        return {}
    if config.context_parallel_config is not None:
        return {"sequence": config.context_parallel_config._flattened_mesh}
    return {"tensor": config.tensor_parallel_config._mesh}


def _shard_groups(transformer: nn.Module) -> dict[str, Group | None]:
    """The group FSDP shards the weights over: the wrapper's, or that of the parameters `fully_shard` made."""
    for module in transformer.modules():
        if isinstance(module, FullyShardedDataParallel):
            return {"shards": module.process_group}
        if isinstance(module, FSDPModule):
            group = _outermost_shard_group(module)
            if group is None:  # the weights are still gathered from a forward that has just ended
                module.reshard()
                group = _outermost_shard_group(module)
            return {} if group is None else {"shards": group}
    return {}


def _outermost_shard_group(module: nn.Module) -> dist.ProcessGroup | None:
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            sharded = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
            if sharded:
                return parameter.device_mesh.get_group(sharded[0])
    return None


# What ranks exchange


def largest_on_device(groups: Groups, value: torch.Tensor) -> torch.Tensor:
    """The largest of one number over all ranks of the request, left on the device; NaN counts as infinite."""
    if groups.all:
        value = value.float().nan_to_num(nan=math.inf, posinf=math.inf)
    for group in groups.all:
        dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return value


def largest(groups: Groups, value: float) -> float:
    """The largest of one number over the ranks that run the same blocks."""
    for group in groups.synchronized:
        value = max(_gather(value, group))
    return value


def known_to_shards(groups: Groups, known: bool) -> bool:
    """Whether every rank that shares the weights has traced and checked its forward.

    Ranks of one request get the same arguments and know the same; ranks that only share weights may have others.
    """
    return known if groups.shards is None else all(_gather(known, groups.shards))


def _gather(value: float, group: dist.ProcessGroup) -> list[float]:
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


# Context parallel


class SequenceSplits:
    """diffusers' context-parallel splits at the blocks, applied before a block call reaches the engine.

    For Wan and Qwen-Image a hook on the first block gives each rank its part of the tokens. A held block is not
    called, so its hook would not run, and a computed one would seem to return a part of what it was given. For the
    duration of a forward the hooks are therefore emptied, and the arguments are split on their way to the pass.
    """

    def __init__(self) -> None:
        self._hooks: dict[int, list[ContextParallelSplitHook]] = {}  # by id of the block
        self._parts: dict[tuple[int, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def take_over(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Empty the input splits of these blocks' hooks for the duration; a nested forward changes nothing."""
        if self._hooks:
            yield
            return
        found = []
        for block in blocks:
            hooks = getattr(getattr(block, "_diffusers_hook", None), "hooks", {}).values()
            found += [(block, h, h.metadata) for h in hooks if isinstance(h, ContextParallelSplitHook)]
        for block, hook, metadata in found:
            hook.metadata = {key: split for key, split in metadata.items() if _splits_output(split)}
            own = ContextParallelSplitHook(
                {key: split for key, split in metadata.items() if not _splits_output(split)}, hook.parallel_config
            )
            own.initialize_hook(block)
            self._hooks.setdefault(id(block), []).append(own)
        try:
            yield
        finally:
            for _, hook, metadata in found:
                hook.metadata = metadata
            self._hooks.clear()
            self._parts.clear()

    def wrap(self, proxies: Iterable[Any], blocks: Sequence[nn.Module]) -> list[Any]:
        """The proxies of a list's blocks, each with its block's split in front."""
        hooks = [self._hooks.get(id(block)) for block in blocks]
        return [p if own is None else _SplitProxy(self, own, p) for p, own in zip(proxies, hooks, strict=False)]

    def split(self, hook: ContextParallelSplitHook, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with this rank's parts; the same tensor always becomes the same part."""
        split_args, split_kwargs = hook.pre_forward(None, *args, **dict(kwargs))
        parts = tuple(self._reuse_part(*pair) for pair in zip(args, split_args, strict=True))
        return parts, {name: self._reuse_part(kwargs[name], value) for name, value in split_kwargs.items()}

    def _reuse_part(self, whole: Any, part: Any) -> Any:
        if part is whole or not isinstance(whole, torch.Tensor):
            return part
        return self._parts.setdefault((id(whole), part.shape), (whole, part))[1]


class _SplitProxy:
    """Splits the arguments of a call, then calls the proxy it stands for."""

    __slots__ = ("_hooks", "_proxy", "_splits")

    def __init__(self, splits: SequenceSplits, hooks: Sequence[ContextParallelSplitHook], proxy: Any) -> None:
        self._splits, self._hooks, self._proxy = splits, hooks, proxy

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self._hooks:
            args, kwargs = self._splits.split(hook, args, kwargs)
        return self._proxy(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _SplitProxy.__slots__:
            raise AttributeError(name)
        return getattr(self._proxy, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        found: type = self._proxy.__class__
        return found


def _splits_output(split: Any) -> bool:
    splits = split if isinstance(split, (list, tuple)) else (split,)
    return all(each.split_output for each in splits)
