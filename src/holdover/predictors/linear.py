"""Weights over the last computed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Predictor(Protocol):
    """Says how many computed steps it needs and how to weigh them."""

    @property
    def depth(self) -> int:
        """How many computed steps are remembered."""
        ...

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        """One weight for each anchor (computed steps, newest last), to predict `step`."""
        ...


@dataclass(frozen=True)
class Hold:
    """The last computed value, unchanged."""

    depth: ClassVar[int] = 1

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        return (*(0.0 for _ in anchors[1:]), 1.0)
