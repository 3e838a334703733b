"""What is held: the residuals of one computed forward, and how they are weighed together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

import torch

from ..models.graph import Stack


class Held(ABC):
    """What the blocks added in one computed forward."""

    @property
    @abstractmethod
    def main(self) -> tuple[torch.Tensor, ...]:
        """The residuals of the main stream."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory they take."""

    @abstractmethod
    def mapped(self, change: Callable[[Any], Any]) -> Self:
        """The same with every tensor changed: packed, or unpacked again."""

    @abstractmethod
    def mixed(self, terms: Sequence[tuple[float, Self]]) -> Self:
        """A weighted sum of such residuals."""

    def like(self, other: Held) -> bool:
        """Whether the two can be weighed together."""
        return type(self) is type(other)

    def weighted(self, others: Sequence[Any], weights: Sequence[float]) -> Any:
        """A weighted sum of the others and this one, which comes last; `(0, ..., 1)` is this one itself."""
        if weights[-1] == 1.0 and not any(weights[:-1]):
            return self
        return self.mixed([(w, r) for w, r in zip(weights, (*others, self), strict=True) if w])


class Residuals(Held):
    """What the blocks added in one computed forward: one tensor a segment, or a group of segments lumped together.

    Stored tensors are never handed out: a held step adds them to what the model passes, or gets a copy.
    """

    def __init__(self, cut: Stack, lumped: bool) -> None:
        self.cut = cut
        self._place = [c.group for c in cut.segments] if lumped else list(range(len(cut.segments)))
        self._first: dict[int, int] = {}
        self._values: dict[int, torch.Tensor] = {}
        self.sides: dict[tuple[int, int], torch.Tensor] = {}  # by call and slot

    def add(self, chain: int, residual: torch.Tensor) -> None:
        place = self._place[chain]
        self._first.setdefault(place, chain)
        held = self._values.get(place)
        self._values[place] = residual if held is None else held + residual

    def at(self, chain: int) -> torch.Tensor | None:
        """The residual to add where this chain begins; None where it is part of an earlier one, or none is held."""
        place = self._place[chain]
        return self._values.get(place) if self._first.get(place) == chain else None

    def lumped(self) -> Residuals:
        """The same residuals with the segments of each stream summed."""
        summed = Residuals(self.cut, lumped=True)
        for chain in sorted(self._values):
            summed.add(chain, self._values[chain])
        summed.sides = self.sides
        return summed

    def like(self, other: Held) -> bool:
        """Of the same cut, and of the same streams."""
        if not isinstance(other, Residuals) or self._place != other._place:
            return False
        return self._values.keys() == other._values.keys() and self.cut == other.cut

    def but(self, groups: Collection[int]) -> Residuals:
        """The same without those of some groups of chains."""
        dropped = {self._place[i] for i, chain in enumerate(self.cut.segments) if chain.group in groups}
        return self._with({place: v for place, v in self._values.items() if place not in dropped}, self.sides)

    def mixed(self, terms: Sequence[tuple[float, Residuals]]) -> Residuals:
        sums = {place: weighted_sum((w, r._values[place]) for w, r in terms) for place in self._values}
        return self._with(sums, self.sides)

    def mapped(self, change: Callable[[Any], Any]) -> Residuals:
        values = {place: change(value) for place, value in self._values.items()}
        return self._with(values, {at: change(side) for at, side in self.sides.items()})

    def _with(self, values: dict[int, torch.Tensor], sides: dict[tuple[int, int], torch.Tensor]) -> Residuals:
        other = Residuals.__new__(Residuals)
        other.cut, other._place, other._first = self.cut, self._place, self._first
        other._values, other.sides = values, sides
        return other

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        """The residuals of the main stream: the head block's hidden states, and that stream in later lists."""
        main = self.cut.main_stream
        places = {self._place[i] for i, c in enumerate(self.cut.segments) if c.stream == main}
        return tuple(self._values[place] for place in sorted(places & self._values.keys()))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._values.values(), *self.sides.values()))


def weighted_sum(terms: Iterable[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """Σ w t over tensors."""
    total: torch.Tensor | None = None
    for weight, tensor in terms:
        total = tensor * weight if total is None else total.add(tensor, alpha=weight)
    if total is None:
        raise ValueError("A predictor's weights are all zero.")
    return total
