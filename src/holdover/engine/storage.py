"""What is held between steps: residuals or outputs, how they are stored, and how they are summed with weights."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch

from ..models.inputs import iter_tensors
from ..models.trace import Stack

K = TypeVar("K")
V = TypeVar("V")
MAX_STRUCTURES = 64  # call structures remembered per transformer; flags and sizes given by the host make new ones


class RecentDict(dict[K, V]):
    """A dict of at most `size` entries; a new entry replaces the oldest."""

    def __init__(self, size: int = MAX_STRUCTURES) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: K, value: V) -> None:
        while key not in self and len(self) >= self._size:
            del self[next(iter(self))]
        super().__setitem__(key, value)


class HeldTensors(ABC):
    """The tensors of one computed forward that a held step is predicted from.

    Stored tensors are never handed out for writing: a held step adds them to what the model passes, or gets a copy.
    """

    @property
    @abstractmethod
    def main(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the main stream."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Device memory in bytes."""

    @abstractmethod
    def map(self, function: Callable[[Any], Any]) -> Self:
        """The same with a function applied to every tensor: to store it, or to load it again."""

    @abstractmethod
    def weighted_sum(self, terms: Sequence[tuple[float, Self]]) -> Self:
        """Σ weight * tensors over several forwards of this kind."""

    def is_compatible(self, other: HeldTensors) -> bool:
        """Whether the two can be summed."""
        return type(self) is type(other)


def sum_weighted(terms: Iterable[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """Σ weight * tensor."""
    total: torch.Tensor | None = None
    for weight, tensor in terms:
        total = tensor * weight if total is None else total.add(tensor, alpha=weight)
    if total is None:
        raise ValueError("A predictor's weights are all zero.")
    return total


class Residuals(HeldTensors):
    """What the blocks added in one computed forward: one residual per segment.

    `values` maps the segment at whose start a residual is added to the residual. Merged, the segments of a stream share
    one residual, which is added at the start of the first. `sides` are outputs that no later block takes up, by call
    and slot; a held step returns copies of them.
    """

    def __init__(self, stack: Stack, merged: bool) -> None:
        self.stack = stack
        self.merged = merged
        self.values: dict[int, torch.Tensor] = {}
        self.sides: dict[tuple[int, int], torch.Tensor] = {}
        self._first: dict[int, int] = {}  # group -> the segment its merged residual is added at

    def add(self, segment: int, residual: torch.Tensor) -> None:
        """Store the residual of one segment."""
        if self.merged:
            segment = self._first.setdefault(self.stack.segments[segment].group, segment)
        held = self.values.get(segment)
        self.values[segment] = residual if held is None else held + residual

    def merge(self) -> Residuals:
        """The same with one residual per stream."""
        merged = Residuals(self.stack, merged=True)
        for segment in sorted(self.values):
            merged.add(segment, self.values[segment])
        merged.sides = self.sides
        return merged

    def without(self, groups: Collection[int]) -> Residuals:
        """The same without the residuals of some groups of segments."""
        kept = {c: value for c, value in self.values.items() if self.stack.segments[c].group not in groups}
        return self._copy_with(kept, self.sides)

    def is_compatible(self, other: HeldTensors) -> bool:
        return (
            isinstance(other, Residuals)
            and self.merged == other.merged
            and self.values.keys() == other.values.keys()
            and self.stack == other.stack
        )

    def weighted_sum(self, terms: Sequence[tuple[float, Residuals]]) -> Residuals:
        sums = {segment: sum_weighted((w, r.values[segment]) for w, r in terms) for segment in self.values}
        return self._copy_with(sums, self.sides)

    def map(self, function: Callable[[Any], Any]) -> Residuals:
        values = {segment: function(value) for segment, value in self.values.items()}
        return self._copy_with(values, {at: function(side) for at, side in self.sides.items()})

    def _copy_with(self, values: dict[int, torch.Tensor], sides: dict[tuple[int, int], torch.Tensor]) -> Residuals:
        other = Residuals(self.stack, self.merged)
        other.values, other.sides, other._first = values, sides, self._first
        return other

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        main_groups, main_stream = self.stack.main_groups, self.stack.main_stream
        segments = [(c, self.stack.segments[c]) for c in sorted(self.values)]
        return tuple(
            self.values[c]
            for c, segment in segments
            if (segment.group in main_groups if self.merged else segment.stream == main_stream)
        )

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.values.values(), *self.sides.values()))


class HeldTuple(HeldTensors):
    """A fixed number of tensors whose meaning the runner knows; None where a stream is absent."""

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        self.tensors = tuple(tensors)

    def copy_with(self, tensors: Iterable[torch.Tensor | None]) -> Self:
        """The same with other tensors."""
        return type(self)(tensors)

    def weighted_sum(self, terms: Sequence[tuple[float, Self]]) -> Self:
        columns = zip(*([(w, t) for t in held.tensors] for w, held in terms), strict=True)
        return self.copy_with(None if column[0][1] is None else sum_weighted(column) for column in columns)

    def map(self, function: Callable[[Any], Any]) -> Self:
        return self.copy_with(None if t is None else function(t) for t in self.tensors)

    def is_compatible(self, other: HeldTensors) -> bool:
        return isinstance(other, HeldTuple) and [t is None for t in self.tensors] == [t is None for t in other.tensors]

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in self.tensors if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors if t is not None)


class HeldOutput(HeldTuple):
    """A transformer's output, copied so that nothing written to the returned tensors reaches it."""

    def __init__(self, tensors: Iterable[torch.Tensor | None], template: Any) -> None:
        super().__init__(tensors)
        self._template = template

    @classmethod
    def copy_of(cls, output: Any) -> Self:
        """Hold a copy of this output."""
        tensors: list[torch.Tensor | None] = []
        template = map_output(output, lambda tensor: tensors.append(tensor.clone()))
        return cls(tensors, template)

    def copy_with(self, tensors: Iterable[torch.Tensor | None]) -> Self:
        return type(self)(tensors, self._template)

    def build_output(self) -> Any:
        """A new output with copies of the held tensors."""
        copies = iter([None if tensor is None else tensor.clone() for tensor in self.tensors])
        return map_output(self._template, lambda _: next(copies))

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return super().main[:1]


class DivergedError(Exception):
    """The forward does not follow the traced stack, so what is held does not belong to it."""


class UnreadStreamError(DivergedError):
    """Something reads a stream that was expected to be unread."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group


class UnreadStream(torch.Tensor):
    """Stands for a stream that nothing is expected to read after the blocks; an operation on it is an error."""

    group: int

    @staticmethod
    def of_group(group: int) -> UnreadStream:
        """A placeholder for the streams of one group of segments."""
        made: UnreadStream = torch.Tensor._make_subclass(UnreadStream, torch.empty(0))
        made.group = group
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = next(t for t in iter_tensors([args, kwargs]) if isinstance(t, UnreadStream))
        raise UnreadStreamError(read.group)


_SLOT = object()  # marks the position of a tensor that was taken out of an output


def map_output(value: Any, function: Callable[[Any], Any]) -> Any:
    """A transformer's output with every tensor, or every slot left by one, replaced; None leaves a slot."""
    if isinstance(value, torch.Tensor) or value is _SLOT:
        replaced = function(value)
        return _SLOT if replaced is None else replaced
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_output(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, dict):
        return {key: map_output(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([map_output(item, function) for item in value])
    return value


# Storage formats


class Storage(NamedTuple):
    """How held tensors are kept between steps: `store` after a computed step, `load` for a held one."""

    store: Callable[[torch.Tensor], Any]  # what it returns has `nbytes`
    load: Callable[[Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Float8Tensor:
    """A float8 tensor with one scale per token: half the memory of bfloat16, about 3 % of noise on each value."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def store(cls, tensor: torch.Tensor) -> Self:
        largest = tensor.abs().amax(dim=-1, keepdim=True).float().clamp_min(1e-12)
        scales = largest / torch.finfo(torch.float8_e4m3fn).max
        return cls((tensor.float() / scales).to(torch.float8_e4m3fn), scales, tensor.dtype)

    def load(self) -> torch.Tensor:
        return (self.values.float() * self.scales).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@dataclasses.dataclass(frozen=True)
class HostTensor:
    """A copy in host memory: no device memory, at the cost of a copy in each direction."""

    values: torch.Tensor
    device: torch.device
    nbytes: int = 0

    @classmethod
    def store(cls, tensor: torch.Tensor) -> Self:
        pinned = tensor.device.type == "cuda"
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        values.copy_(tensor, non_blocking=pinned)
        return cls(values, tensor.device)

    def load(self) -> torch.Tensor:
        return self.values.to(self.device, non_blocking=True)


ON_DEVICE = Storage(lambda tensor: tensor, lambda stored: stored)
STORAGES = {
    "device": ON_DEVICE,
    "fp8": Storage(Float8Tensor.store, Float8Tensor.load),
    "cpu": Storage(HostTensor.store, HostTensor.load),
}
