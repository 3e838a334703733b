"""The cut through a transformer: which block calls there are and what each carries on.

A *chain* is one stream passed unbroken from block to block: its residual is what leaves the last of these
blocks minus what entered the first. Whatever the model does between blocks (ControlNet, hints, concatenation)
ends one chain and begins the next, so it runs live on a held step and is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .arguments import Key


@dataclass(frozen=True, slots=True)
class Link:
    """One stream through one block call: it comes in as argument `key` and leaves as output `slot`."""

    slot: int
    key: Key
    chain: int
    closes: bool


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of one block: `width` is the length of the tuple it returns, 0 for a bare tensor."""

    blocks: str
    index: int
    width: int
    links: tuple[Link, ...]
    sides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """One unbroken stretch of a stream, and the group of stretches it may be lumped with."""

    blocks: str
    stream: str
    group: int


@dataclass(frozen=True)
class Cut:
    """Every block call of one forward, in order."""

    calls: tuple[BlockCall, ...]
    chains: tuple[Chain, ...]
    head: int = 0

    @cached_property
    def lists(self) -> dict[str, int]:
        """How many blocks of each list are called."""
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[call.blocks] = counts.get(call.blocks, 0) + 1
        return counts

    @property
    def groups(self) -> int:
        """How many residuals are held when stretches of one stream are lumped together."""
        return len({chain.group for chain in self.chains})

    @property
    def sides(self) -> int:
        """How many outputs are not carried on and are replayed as they were."""
        return sum(len(call.sides) for call in self.calls)

    @cached_property
    def main_stream(self) -> str:
        """The stream the head block's image tokens travel in."""
        streams = [self.chains[link.chain].stream for link in self.calls[self.head].links]
        return "hidden_states" if "hidden_states" in streams else streams[0]

    @property
    def main_groups(self) -> frozenset[int]:
        """The groups that the main stream's chains are in."""
        return frozenset(chain.group for chain in self.chains if chain.stream == self.main_stream)

    @property
    def group_names(self) -> dict[int, str]:
        """What to call each group: by the list and the stream of its last chain."""
        return {chain.group: f"{chain.blocks}.{chain.stream}" for chain in self.chains}

    def main_link(self, call: BlockCall) -> Link | None:
        """The main stream's link through a call, if it passes there."""
        return next((link for link in call.links if self.chains[link.chain].stream == self.main_stream), None)

    def __str__(self) -> str:
        lists = ", ".join(f"{name} ({count})" for name, count in self.lists.items())
        streams = sorted({chain.stream for chain in self.chains})
        parts = f"{len(self.chains)} segments" if len(self.chains) != 1 else "1 segment"
        side = f", {self.sides} side outputs" if self.sides else ""
        return f"{lists}; streams {', '.join(streams)}; {parts}{side}"
