"""What happens at each block of one forward: run and watch, run and store, or hold.

The model's own loop makes the calls; a pass answers them in order along the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from ..models.graph import BlockCall, Stack
from ..models.inputs import bind_arguments, get_argument
from ..models.trace import Trace
from .feeders import Unrun, unrun
from .places import Place, places
from .residuals import Held, Residuals
from .shortcut import WHOLE_WAY, Shortcut
from .standin import BlockByBlock, DivergedError, OpaqueStandIn


class Pass(Protocol):
    """Answers the loops of one forward over its blocks."""

    def covers(self, blocks: str) -> bool:
        """Whether calls of this list come here."""
        ...

    def items(self, blocks: str, modules: Sequence[nn.Module]) -> Iterable[Any]:
        """What the model's loop over this list gets."""
        ...


class TracePass(BlockByBlock):
    """Runs every block and watches how the streams are connected."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()

    def covers(self, blocks: str) -> bool:
        return True

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.trace.run_block(blocks, index, block, args, kwargs)


class _AlongCut(BlockByBlock):
    """Follows the cut call by call; made once for a kind of forward, and started for each."""

    def __init__(self, cut: Stack, begin: int) -> None:
        super().__init__()
        self.witness: dict[int, torch.Tensor] | None = None  # what leaves each segment, when a replay is checked
        self._cut = cut
        self._lists = frozenset(cut.lists)
        self._begin = begin
        self._count = len(cut.calls)
        self._position = 0

    def covers(self, blocks: str) -> bool:
        return blocks in self._lists

    def start(self, position: int = 0) -> None:
        """Forget the last forward: the next call is the one at `position`."""
        self._position, self.witness = position, None

    def leaving_out(self) -> AbstractContextManager[None]:
        """Around the forward: what does not run in it beside the blocks."""
        return nullcontext()

    @contextmanager
    def witnessed(self) -> Iterator[dict[int, torch.Tensor]]:
        """What leaves each segment of the forward that runs meanwhile; afterwards the pass keeps nothing of it."""
        left: dict[int, torch.Tensor] = {}
        self.witness = left
        try:
            yield left
        finally:
            self.start()

    def _advance(self, blocks: str, index: int) -> tuple[int, BlockCall]:
        position, self._position = self._position, self._position + 1
        if position < self._count:
            call = self._cut.calls[position]
            if call.blocks == blocks and call.index == index:
                return position, call
        raise DivergedError

    def _witnessed(self, chain: int, output: torch.Tensor) -> None:
        if self.witness is not None:
            self.witness[self._cut.segments[chain].group] = output  # the group's last segment stays

    def done(self) -> None:
        """The forward has returned: it must have made every call."""
        if self._position != self._count:
            raise DivergedError


class _AlongPlaces(_AlongCut):
    """Follows the cut by a table made beforehand."""

    def __init__(self, cut: Stack, begin: int, unread: Collection[int] = ()) -> None:
        super().__init__(cut, begin)
        self._places = places(cut, begin, unread)

    def _arrive(self, blocks: str, index: int) -> Place:
        position = self._position
        if position < self._count:
            place = self._places[position]
            if place.index == index and place.blocks == blocks:
                self._position = position + 1
                return place
        raise DivergedError


class ComputePass(_AlongPlaces):
    """Runs every block and stores what the blocks from `begin` on add to the streams that someone reads."""

    traceable = True

    def __init__(self, cut: Stack, lumped: bool, begin: int = 0, unread: Collection[int] = ()) -> None:
        super().__init__(cut, begin, unread)
        self._lumped = lumped
        self._open: dict[int, torch.Tensor] = {}
        self._added: list[tuple[int, torch.Tensor]] = []
        self._sides: dict[tuple[int, int], torch.Tensor] = {}

    def start(self, position: int = 0) -> None:
        super().start(position)
        self._open, self._added, self._sides = {}, [], {}

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        place = self._arrive(blocks, index)
        if place.quiet:
            return block(*args, **kwargs)
        for link in place.opens:
            self._open[link.segment] = get_argument(args, kwargs, link.key)
        output = block(*args, **kwargs)
        outputs = output if place.width else (output,)
        for link in place.closes:
            self._added.append((link.segment, outputs[link.slot] - self._open.pop(link.segment)))
            self._witnessed(link.segment, outputs[link.slot])
        for slot in place.sides:
            self._sides[place.number, slot] = outputs[slot].clone()
        return output

    def own(self) -> None:
        self._added = [(chain, added.clone()) for chain, added in self._added]
        self._sides = {at: side.clone() for at, side in self._sides.items()}

    @property
    def held(self) -> Held:
        """What the blocks added, once the forward has returned."""
        residuals = Residuals(self._cut, self._lumped)
        for chain, added in self._added:
            residuals.add(chain, added)
        residuals.sides.update(self._sides)
        return residuals


class HoldPass(_AlongPlaces):
    """Runs no block from `begin` on: adds what is held where each segment opens and passes the rest through."""

    traceable = True

    def __init__(self, residuals: Residuals, begin: int = 0, shortcut: Shortcut = WHOLE_WAY) -> None:
        super().__init__(residuals.cut, begin)
        self._shortcut = shortcut
        self._places = tuple(place for place in self._places if self.calls(place.blocks, place.index))
        self._count = len(self._places)
        self._unread = [unrun([c.group]) if c.group in shortcut.unread else None for c in self._cut.segments]
        self.give(residuals)

    def items(self, blocks: str, modules: Sequence[nn.Module]) -> Iterable[Any]:
        return super().items(blocks, modules[: self._shortcut.lengths.get(blocks)])

    def leaving_out(self) -> AbstractContextManager[None]:
        return self._shortcut.feeders.left_out()

    def calls(self, blocks: str, index: int) -> bool:
        """Whether the loop over a list goes as far as this block."""
        return index < self._shortcut.lengths.get(blocks, index + 1)

    def give(self, held: Held) -> None:
        """What to add from now on."""
        assert isinstance(held, Residuals)
        self._adds = [held.at(chain) for chain in range(len(self._cut.segments))]
        self._sides = held.sides

    def start(self, position: int = 0) -> None:
        super().start(position)
        self._adds, self._sides = [], {}

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        place = self._arrive(blocks, index)
        if place.through:
            return place.carry(args, kwargs)
        if place.live:
            return block(*args, **kwargs)
        return self._at_end(place, place.carry(args, kwargs))

    def _at_end(self, place: Place, carried: Any) -> Any:
        """A call where a chain begins or ends, or something leaves beside."""
        outputs = list(carried) if place.width else [carried]
        for link in place.opens:
            held, unread = self._adds[link.segment], self._unread[link.segment]
            if unread is not None:
                outputs[link.slot] = unread
            elif held is not None and type(outputs[link.slot]) is not Unrun:
                outputs[link.slot] = outputs[link.slot] + held
        for link in place.closes:
            self._witnessed(link.segment, outputs[link.slot])
        for slot in place.sides:
            outputs[slot] = self._sides[place.number, slot].clone()
        return tuple(outputs) if place.width else outputs[0]


class DecidePass(_AlongCut):
    """Runs the blocks before the head, then lets `choose` say how the rest of the forward goes."""

    def __init__(
        self,
        cut: Stack,
        choose: Callable[[nn.Module, dict[str, Any]], ComputePass | HoldPass],
        shortcut: Shortcut = WHOLE_WAY,
    ) -> None:
        super().__init__(cut, 0)
        self._choose = choose
        self._feeders = shortcut.feeders.postponed
        self.chosen: ComputePass | HoldPass | None = None

    def leaving_out(self) -> AbstractContextManager[None]:
        return self._feeders.waiting()

    def items(self, blocks: str, modules: Sequence[nn.Module]) -> Iterable[Any]:
        return self._as_decided(blocks, modules) if self.chosen is None else self.chosen.items(blocks, modules)

    def _as_decided(self, blocks: str, modules: Sequence[nn.Module]) -> Iterator[Any]:
        """A loop that is under way when the decision falls."""
        for index, module in enumerate(modules):
            if isinstance(self.chosen, HoldPass) and not self.chosen.calls(blocks, index):
                return
            yield OpaqueStandIn(self, blocks, index, module)

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        chosen = self.chosen
        if chosen is None:
            if self._position < self._cut.head:
                self._advance(blocks, index)
                return block(*args, **kwargs)
            chosen = self.chosen = self._choose(block, bind_arguments(type(block), args, kwargs))
            chosen._position = self._position
            if isinstance(chosen, ComputePass):
                self._feeders.run()
        return chosen.call(blocks, index, block, args, kwargs)

    def done(self) -> None:
        if self.chosen is None:
            raise DivergedError
        self.chosen.done()


class FinishPass(_AlongCut):
    """Runs no block and lets the main stream leave the seam as `hidden`: what the model does after its blocks."""

    def __init__(self, cut: Stack, hidden: torch.Tensor) -> None:
        super().__init__(cut, 0)
        self._hidden = hidden
        self._end = max(i for i, call in enumerate(cut.calls) if cut.find_main_link(call) is not None)

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        position, call = self._advance(blocks, index)
        outputs: list[torch.Tensor | None] = [None] * max(call.width, 1)
        for link in call.links:
            outputs[link.slot] = get_argument(args, kwargs, link.key)
        main = self._cut.find_main_link(call)
        if position == self._end and main is not None:
            outputs[main.slot] = self._hidden
        return tuple(outputs) if call.width else outputs[0]


class Passes:
    """How a method runs and holds the blocks; a method with its own idea of a residual overrides both."""

    leaves_out = True  # whether what it holds is added where chains open, and nowhere else

    def compute(self, cut: Stack, lumped: bool, begin: int, shortcut: Shortcut) -> ComputePass:
        return ComputePass(cut, lumped, begin, shortcut.unread)

    def hold(self, cut: Stack, held: Held, begin: int, shortcut: Shortcut) -> HoldPass:
        assert isinstance(held, Residuals)
        return HoldPass(held, begin, shortcut)
