"""A mapping that forgets its oldest entry when it is full."""

from __future__ import annotations

from typing import TypeVar

KINDS = 64  # of forwards that are remembered: sizes and flags given by the host make kinds; the oldest is met anew
K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """At most `size` entries, in the order they came."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: K, value: V) -> None:
        while key not in self and len(self) >= self._size:
            del self[next(iter(self))]
        super().__setitem__(key, value)
