"""The calls of a cut, prepared: where chains begin and end, and what a block that adds nothing would return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..models.arguments import Key, pick
from ..models.cut import BlockCall, Cut, Link

Carry = Callable[[Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Place:
    """One call of the cut: `quiet` where no chain begins or ends and nothing leaves beside, `through` where a held
    one is passed on as it comes, `live` where it comes before all that may be held.
    """

    blocks: str
    index: int
    width: int
    opens: tuple[Link, ...]
    closes: tuple[Link, ...]
    sides: tuple[int, ...]
    quiet: bool
    through: bool
    live: bool
    carry: Carry


def places(cut: Cut, begin: int) -> tuple[Place, ...]:
    """Every call of a cut; chains begin at `begin` or later."""
    opened: set[int] = set()
    found = [_live(call) for call in cut.calls[:begin]]
    for call in cut.calls[begin:]:
        opens = tuple(link for link in call.links if link.chain not in opened)
        opened.update(link.chain for link in opens)
        found.append(_held(call, opens))
    return tuple(found)


def _live(call: BlockCall) -> Place:
    return Place(call.blocks, call.index, call.width, (), (), (), True, False, True, _carry(call))


def _held(call: BlockCall, opens: tuple[Link, ...]) -> Place:
    closes = tuple(link for link in call.links if link.closes)
    quiet = not (opens or closes or call.sides)
    return Place(call.blocks, call.index, call.width, opens, closes, call.sides, quiet, quiet, False, _carry(call))


def _carry(call: BlockCall) -> Carry:
    """Returns the streams a call is given, in the places of the block's outputs."""
    keys: list[Key | None] = [None] * max(call.width, 1)
    for link in call.links:
        keys[link.slot] = link.key
    if call.width == 0:
        return _one(keys[0])
    names = [key for key in keys if isinstance(key, str)]
    if len(names) == len(keys):
        return lambda args, kwargs: tuple([kwargs[name] for name in names])
    return lambda args, kwargs: tuple([None if key is None else pick(args, kwargs, key) for key in keys])


def _one(key: Key | None) -> Carry:
    if isinstance(key, str):
        return lambda args, kwargs: kwargs[key]
    return lambda args, kwargs: None if key is None else args[key]
