"""The steps of one generation: how many, their noise levels, and which of them run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Grid:
    """The steps one transformer handles in one generation.

    `noise[i]` is the noise level of step `i` on a scale where 1 is pure noise: the scheduler's timestep divided by the
    number of training timesteps. It is empty if only the number of steps is known. `first` and `last` are the first and
    the last step that run (image-to-image starts late; each of two experts has its own range).
    """

    count: int
    noise: tuple[float, ...] = ()
    first: int = 0
    last: int = -1

    def __post_init__(self) -> None:
        if self.last < 0:
            object.__setattr__(self, "last", self.count - 1)

    @classmethod
    def unbounded(cls) -> Grid:
        """A generation with an unknown number of steps."""
        return cls(count=sys.maxsize)

    @property
    def bounded(self) -> bool:
        """Whether the number of steps is known."""
        return self.count < sys.maxsize

    @property
    def length(self) -> int:
        """How many steps run."""
        return self.last - self.first + 1

    def between(self, first: int, last: int) -> Grid:
        """The same grid where only the steps `first` to `last` run."""
        return replace(self, first=first, last=last)
