"""The arguments of a forward, by name, and what they tell: structure, shapes, conditioning, timestep."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

Key = int | str

_TIMESTEPS = ("timestep", "timesteps", "vision_timesteps", "t", "time", "noise_level")
_CONDITIONING = ("encoder", "pooled", "prompt", "text", "txt", "caption", "cap_", "context", "class_label", "llm")
_NOT_CONDITIONING = ("_ids", "mask", "_len", "_seq", "indices", "indexes", "rope")


@lru_cache(maxsize=256)
def parameter_names(cls: Any) -> tuple[str, ...]:
    """The names of a module class's forward arguments, in order, without `self`."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind not in variadic)


def named(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments of one call, all by name."""
    names = parameter_names(cls)
    positional = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(args)}
    return {**positional, **kwargs}


def pick(args: Sequence[Any], kwargs: Mapping[str, Any], key: Key) -> Any:
    """The argument at a position or under a keyword."""
    return args[key] if isinstance(key, int) else kwargs[key]


class ForwardArguments:
    """Reads one transformer's forward arguments; made once, so that the loop binds no signature."""

    def __init__(self, transformer: nn.Module, conditioning: Sequence[str] = ()) -> None:
        cls: Any = type(transformer)
        self.names = parameter_names(cls)
        self._timestep = next((n for n in self.names if n in _TIMESTEPS), None)
        self._conditioning = tuple(conditioning) or tuple(n for n in self.names if _is_conditioning(n))

    def of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one call by name."""
        if not args:
            return dict(kwargs)
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def timestep(self, arguments: Mapping[str, Any]) -> Any:
        """The timestep argument, or None where the forward has none."""
        return None if self._timestep is None else arguments.get(self._timestep)

    def conditioning(self, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The tensors that tell one branch from another."""
        values = [arguments.get(name) for name in self._conditioning]
        return tuple(t for value in values for t in tensors_in(value))


def _is_conditioning(name: str) -> bool:
    return any(w in name for w in _CONDITIONING) and not any(w in name for w in _NOT_CONDITIONING)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value of nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def structure(value: Any) -> Any:
    """What kind of thing an argument is: decides which code the forward runs, whatever the numbers are.

    Host values (flags, layer lists, names) count by value, tensors by being there, floats and foreign objects by type.
    """
    if isinstance(value, torch.Tensor):
        return "tensor"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple([structure(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, structure(item)) for key, item in value.items()])
    return type(value).__name__


def host_values(value: Any) -> Any:
    """The flags, numbers and names in a value: what a forward is told by the host, which may tell branches apart."""
    if isinstance(value, (list, tuple)):
        return tuple([kept for item in value if (kept := host_values(item)) is not None]) or None
    if isinstance(value, dict):
        return tuple([(key, kept) for key, item in value.items() if (kept := host_values(item)) is not None]) or None
    return value if isinstance(value, (bool, int, str)) else None


def shapes(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shape, dtype and device of every tensor argument: held results fit only where these are the same."""
    return tuple([(t.shape, t.dtype, t.device) for value in arguments.values() for t in tensors_in(value)])


def describe(arguments: Mapping[str, Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    """The structure of a call's arguments, and the shape, dtype and device of every tensor, in one walk."""
    shapes: list[tuple[Any, ...]] = []

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shapes.append((value.shape, value.dtype, value.device))
            return "tensor"
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, (list, tuple)):
            return tuple(map(walk, value))
        if isinstance(value, dict):
            return tuple(zip(value, map(walk, value.values()), strict=True))
        return type(value).__name__

    return walk(arguments), shapes
