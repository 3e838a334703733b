"""What a transformer returns: tensors in tuples, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


class Slot:
    """Where a tensor was, once it was taken out."""


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with every tensor, or every slot left by one, replaced; None leaves a slot."""
    if isinstance(value, (torch.Tensor, Slot)):
        replaced = function(value)
        return Slot() if replaced is None else replaced
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: mapped(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(item, function) for item in value])
    return value


def copied(output: Any) -> Any:
    """The same in memory of its own."""
    return mapped(output, torch.Tensor.clone)
