"""Reading the arguments of a forward, and unwrapping compiled or sharded modules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

ArgumentKey = int | str  # the position or the keyword an argument is passed under

_TIMESTEP_NAMES = ("timestep", "timesteps", "vision_timesteps", "t", "time", "noise_level")
_LATENT_NAMES = ("hidden_states", "x", "vision_tokens", "decoder_input_tokens", "sample", "latents")
_CONDITIONING_WORDS = ("encoder", "pooled", "prompt", "text", "txt", "caption", "cap_", "context", "class_label", "llm")
_NOT_CONDITIONING_WORDS = ("_ids", "mask", "_len", "_seq", "indices", "indexes", "rope")

# The submodule in which torch.compile, FullyShardedDataParallel and activation checkpointing keep the original module.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@lru_cache(maxsize=256)
def get_parameter_names(cls: Any) -> tuple[str, ...]:
    """Return the parameter names of a module class's forward, in order, without `self`, `*args` and `**kwargs`."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind not in variadic)


def bind_arguments(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one call of a `cls` module by name; surplus positional ones are called `arg<i>`."""
    names = get_parameter_names(cls)
    positional = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(args)}
    return {**positional, **kwargs}


def get_argument(args: Sequence[Any], kwargs: Mapping[str, Any], key: ArgumentKey) -> Any:
    """Return the argument at a position or under a keyword."""
    return args[key] if isinstance(key, int) else kwargs[key]


def scale_argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], key: ArgumentKey, factor: float | torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with one tensor multiplied by a factor, in its own dtype."""
    value = get_argument(args, kwargs, key)
    scaled = (value * factor).to(value.dtype)
    if isinstance(key, int):
        return (*args[:key], scaled, *args[key + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, key: scaled}


class ForwardSignature:
    """The parameters of one transformer's forward; inspected once, so that no step of the loop has to."""

    def __init__(self, transformer: nn.Module, conditioning: Sequence[str] = ()) -> None:
        cls: Any = type(transformer)  # mypy does not take a module class for hashable
        self.names = get_parameter_names(cls)
        self.latents_name = next(iter(self.names), "")
        self.timestep_name = next((name for name in self.names if name in _TIMESTEP_NAMES), None)
        others = {name for name in self.names if any(word in name for word in _NOT_CONDITIONING_WORDS)}
        self._conditioning = tuple(conditioning) or tuple(
            name for name in self.names if name not in others and any(word in name for word in _CONDITIONING_WORDS)
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of one call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def get_conditioning(self, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the conditioning tensors, which distinguish one branch from another."""
        return tuple(iter_tensors([arguments.get(name) for name in self._conditioning]))

    def find_timestep(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentKey | None:
        """Return where a call has its timestep; None if it is not a floating-point tensor."""
        name = self.timestep_name
        if name is None:
            return None
        key: ArgumentKey = name if name in kwargs else self.names.index(name)
        if isinstance(key, int) and key >= len(args):
            return None
        value = get_argument(args, kwargs, key)
        return key if isinstance(value, torch.Tensor) and value.is_floating_point() else None

    def get_latents(self, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the noisy latents: one tensor, or one per image; without a known name, the first argument with any."""
        for name in (*_LATENT_NAMES, *self.names):
            tensors = tuple(t for t in iter_tensors(arguments.get(name)) if t.is_floating_point())
            if tensors:
                return tensors
        raise ValueError("This forward was called without a tensor.")


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iter_tensors(item)


def describe_structure(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a hashable description of what decides which code path a forward takes, and add its tensors to `tensors`.

    Host values (flags, layer lists, names) count by value, tensors by their presence, floats and other objects by type.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(describe_structure, value, repeat(tensors)))
    if isinstance(value, dict):
        return tuple(zip(value, map(describe_structure, value.values(), repeat(tensors)), strict=True))
    return type(value).__name__


def copy_containers(value: Any) -> Any:
    """Return nested lists, tuples and dicts as copies with the same contents, which a model may change."""
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    return type(value)(map(copy_containers, value)) if type(value) in (list, tuple) else value


def collect_host_values(value: Any) -> Any:
    """Return the flags, integers and strings in a value, which may distinguish branches; None if there are none."""
    if not isinstance(value, (list, tuple, dict)):
        return value if isinstance(value, (bool, int, str)) else None
    found: list[Any] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        kept = collect_host_values(item)
        if kept is not None:
            found.append((key, kept) if isinstance(value, dict) else kept)
    return tuple(found) or None


def unwrap_module(module: Any) -> Any:
    """Return the module inside torch.compile, FSDP, DDP and checkpoint wrappers; other objects are returned as is."""
    while isinstance(module, nn.Module):
        inner = next((module._modules[name] for name in _WRAPPED_NAMES if name in module._modules), None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            break
        module = inner
    return module


def get_module_class(module: object) -> type:
    """Return a module's class; for one sharded by `fully_shard`, the original class rather than the derived one."""
    bases = type(module).__mro__
    return bases[bases.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else bases[0]


def has_fsdp_wrappers(module: nn.Module) -> bool:
    """Return whether any part of a module is wrapped in FSDP1's FullyShardedDataParallel."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor; a collective, so every rank of the group must call it."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


@contextlib.contextmanager
def gather_weights(module: nn.Module) -> Iterator[None]:
    """Unshard the weights of a `fully_shard` module inside the context; a collective, so every rank must enter it."""
    if isinstance(module, FSDPModule):
        module.unshard()
    try:
        yield
    finally:
        if isinstance(module, FSDPModule):
            module.reshard()
