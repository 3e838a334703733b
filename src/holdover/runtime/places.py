"""The calls of a cut, prepared: where chains begin and end, and what a block that adds nothing would return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..models.graph import BlockCall, Stack, StreamLink
from ..models.inputs import ArgumentKey, get_argument

Carry = Callable[[Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Place:
    """One call of the cut: `quiet` where no chain begins or ends and nothing leaves beside, `through` where a held
    one is passed on as it comes, `idle` where it might as well not be made, `live` where it comes before all that
    may be held.
    """

    number: int
    blocks: str
    index: int
    width: int
    opens: tuple[StreamLink, ...]
    closes: tuple[StreamLink, ...]
    sides: tuple[int, ...]
    quiet: bool
    through: bool
    idle: bool
    live: bool
    carry: Carry


def places(cut: Stack, begin: int, unread: Collection[int] = ()) -> tuple[Place, ...]:
    """Every call of a cut; chains begin at `begin` or later, and those of groups that nobody reads not at all."""
    opened: set[int] = set()
    found = [_live(number, call) for number, call in enumerate(cut.calls[:begin])]
    for number, call in enumerate(cut.calls[begin:], start=begin):
        links = [link for link in call.links if cut.segments[link.segment].group not in unread]
        opens = tuple(link for link in links if link.segment not in opened)
        opened.update(link.segment for link in opens)
        found.append(_held(number, call, opens, tuple(link for link in links if link.closes)))
    return tuple(found)


def _live(number: int, call: BlockCall) -> Place:
    kind = {"quiet": True, "through": False, "idle": False, "live": True}
    return Place(number, call.blocks, call.index, call.width, (), (), (), **kind, carry=_carry(call))


def _held(number: int, call: BlockCall, opens: tuple[StreamLink, ...], closes: tuple[StreamLink, ...]) -> Place:
    idle = not (opens or call.side_outputs)
    quiet = idle and not closes
    kind = {"quiet": quiet, "through": quiet, "idle": idle, "live": False}
    return Place(
        number, call.blocks, call.index, call.width, opens, closes, call.side_outputs, **kind, carry=_carry(call)
    )


def _carry(call: BlockCall) -> Carry:
    """Returns the streams a call is given, in the places of the block's outputs."""
    keys: list[ArgumentKey | None] = [None] * max(call.width, 1)
    for link in call.links:
        keys[link.slot] = link.key
    if call.width == 0:
        return _one(keys[0])
    names = [key for key in keys if isinstance(key, str)]
    if len(names) == len(keys):
        return lambda args, kwargs: tuple([kwargs[name] for name in names])
    return lambda args, kwargs: tuple([None if key is None else get_argument(args, kwargs, key) for key in keys])


def _one(key: ArgumentKey | None) -> Carry:
    if isinstance(key, str):
        return lambda args, kwargs: kwargs[key]
    return lambda args, kwargs: None if key is None else args[key]
