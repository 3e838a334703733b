"""The stack of a transformer as a graph: its block calls in order, and the streams that connect them.

A *segment* is a stretch of the stack in which a stream is passed unbroken from block to block. Its residual is the
output of its last block minus the input of its first. Whatever the model does between two blocks (ControlNet
residuals, hints, concatenation) ends one segment and starts the next, so it runs live on a held step and is counted
once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from .inputs import ArgumentKey


@dataclass(frozen=True, slots=True)
class StreamLink:
    """A stream's way through one block call: in as argument `key`, out as output `slot`.

    `segment` is an index into `Stack.segments`; `closes` is True at the segment's last block.
    """

    slot: int
    key: ArgumentKey
    segment: int
    closes: bool


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of block `index` of the list `blocks`.

    `width` is the length of the returned tuple, or 0 for a bare tensor. `side_outputs` are the slots of outputs that
    no later block continues; a held step returns a copy of their last values.
    """

    blocks: str
    index: int
    width: int
    links: tuple[StreamLink, ...]
    side_outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One unbroken stretch of the stream `stream` in the list `blocks`.

    The residuals of segments with the same `group` have the same shape and may be held as one sum.
    """

    blocks: str
    stream: str
    group: int


@dataclass(frozen=True)
class Stack:
    """Every block call of one forward, in order; a method's signal is read at call number `head`."""

    calls: tuple[BlockCall, ...]
    segments: tuple[Segment, ...]
    head: int = 0

    @cached_property
    def lists(self) -> dict[str, int]:
        """The number of block calls per list."""
        return dict(Counter(call.blocks for call in self.calls))

    @property
    def group_count(self) -> int:
        """The number of residuals held if those of each group are summed."""
        return len({segment.group for segment in self.segments})

    @property
    def side_output_count(self) -> int:
        """The number of outputs that no later block continues."""
        return sum(len(call.side_outputs) for call in self.calls)

    @cached_property
    def main_stream(self) -> str:
        """The name of the stream that carries the image tokens through the head block."""
        streams = [self.segments[link.segment].stream for link in self.calls[self.head].links]
        return "hidden_states" if "hidden_states" in streams else streams[0]

    @property
    def main_groups(self) -> frozenset[int]:
        """The groups of the main stream's segments."""
        return frozenset(segment.group for segment in self.segments if segment.stream == self.main_stream)

    @property
    def group_names(self) -> dict[int, str]:
        """A readable name per group: list and stream of its last segment."""
        return {segment.group: f"{segment.blocks}.{segment.stream}" for segment in self.segments}

    def find_main_link(self, call: BlockCall) -> StreamLink | None:
        """Return the main stream's link through a call, or None if it does not pass through."""
        return next((link for link in call.links if self.segments[link.segment].stream == self.main_stream), None)

    def __str__(self) -> str:
        lists = ", ".join(f"{name} ({count})" for name, count in self.lists.items())
        streams = ", ".join(sorted({segment.stream for segment in self.segments}))
        segments = f"{len(self.segments)} segments" if len(self.segments) != 1 else "1 segment"
        sides = f", {self.side_output_count} side outputs" if self.side_output_count else ""
        return f"{lists}; streams {streams}; {segments}{sides}"
