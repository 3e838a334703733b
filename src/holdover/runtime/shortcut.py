"""What a held step leaves out beside the blocks: loops that only hand streams on, streams that nobody reads after
them, and what feeds blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..models.graph import Stack
from ..models.inputs import iter_tensors
from .feeders import Feeders, Origin, TouchedError, Unrun
from .places import places
from .replay import relative_error
from .standin import DivergedError

Held = Callable[["Shortcut"], Any]


@dataclass(frozen=True, eq=False)
class Shortcut:
    """`lengths` says after how many blocks a loop over a list may end; the feeders need not run, and nothing need be
    held of the `unread` groups of chains.
    """

    lengths: Mapping[str, int]
    feeders: Feeders
    unread: frozenset[int]

    def but(self, origins: Collection[Origin]) -> Shortcut:
        """The same with these left in."""
        return Shortcut(self.lengths, self.feeders.but(origins), self.unread.difference(origins))


WHOLE_WAY = Shortcut({}, Feeders({}), frozenset())
# What a forward raises that finds a name unbound, a list too short or a shape wrong; what hooks raise is theirs.
OWN_ERRORS = (NameError, LookupError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError)


def shortcut(cut: Stack, begin: int, feeders: Feeders, output: Any, held: Held) -> Shortcut:
    """The furthest way that is left out of a held forward and changes no bit of the output it had the whole way.

    `held` runs one. Children of the transformer and streams are left in as someone looks into what they would bring;
    a model that does not expect its loop to end early goes the whole way.
    """
    whole = list(iter_tensors([output]))
    beside = frozenset(chain.group for chain in cut.segments) - cut.main_groups
    way = Shortcut(_lengths(cut, begin), feeders, beside)
    while whole:
        try:
            short = list(iter_tensors([held(way)]))
        except TouchedError as touched:
            way = way.but(touched.origins)
            continue
        except (DivergedError, *OWN_ERRORS):
            return WHOLE_WAY
        looked = next((t for t in short if isinstance(t, Unrun)), None)
        if looked is None:
            return way if same_bits(short, whole) else WHOLE_WAY
        way = way.but(looked.origins)
    return WHOLE_WAY


def same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs are the same, bit for bit."""
    pairs = list(zip(iter_tensors([one]), iter_tensors([other]), strict=True))
    return all(a.dtype == b.dtype and relative_error(a, b) == 0.0 for a, b in pairs)


def _lengths(cut: Stack, begin: int) -> dict[str, int]:
    """How many blocks of each list a held forward must call; a list that is not called in order is left alone."""
    calls: dict[str, list[tuple[int, bool]]] = {}
    for place in places(cut, begin):
        calls.setdefault(place.blocks, []).append((place.index, place.idle))
    in_order = {name: c for name, c in calls.items() if [index for index, _ in c] == list(range(len(c)))}
    return {name: max((index + 1 for index, idle in c if not idle), default=0) for name, c in in_order.items()}
