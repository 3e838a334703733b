"""What happens at each block of one forward: run and watch, run and store, or hold.

The model's own loop makes the calls; a pass answers them in order along the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..models.arguments import named, pick
from ..models.cut import BlockCall, Cut
from ..models.trace import Trace
from .residuals import Held, Residuals
from .standin import BlockByBlock


class DivergedError(Exception):
    """The forward called other blocks than the cut says: whatever was held does not belong here."""


class Pass(Protocol):
    """Answers the loops of one forward over its blocks."""

    def covers(self, blocks: str) -> bool:
        """Whether calls of this list come here."""
        ...

    def items(self, blocks: str, modules: Sequence[nn.Module]) -> Sequence[Any]:
        """What the model's loop over this list gets."""
        ...


class TracePass(BlockByBlock):
    """Runs every block and watches how the streams are connected."""

    def __init__(self) -> None:
        self.trace = Trace()

    def covers(self, blocks: str) -> bool:
        return True

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.trace.run(blocks, index, block, args, kwargs)


class _AlongCut(BlockByBlock):
    """Follows the cut call by call."""

    def __init__(self, cut: Cut, begin: int) -> None:
        self.witness: dict[int, torch.Tensor] | None = None  # what leaves each segment, when a replay is checked
        self._cut = cut
        self._lists = frozenset(cut.lists)
        self._begin = begin
        self._position = 0

    def covers(self, blocks: str) -> bool:
        return blocks in self._lists

    def _advance(self, blocks: str, index: int) -> tuple[int, BlockCall]:
        position, self._position = self._position, self._position + 1
        if position < len(self._cut.calls):
            call = self._cut.calls[position]
            if call.blocks == blocks and call.index == index:
                return position, call
        raise DivergedError

    def _witnessed(self, chain: int, output: torch.Tensor) -> None:
        if self.witness is not None:
            self.witness[self._cut.chains[chain].group] = output  # the group's last segment stays

    def done(self) -> None:
        """The forward has returned: it must have made every call."""
        if self._position != len(self._cut.calls):
            raise DivergedError


class ComputePass(_AlongCut):
    """Runs every block and stores what the blocks from `begin` on add."""

    def __init__(self, cut: Cut, lumped: bool, begin: int = 0) -> None:
        super().__init__(cut, begin)
        self._residuals = Residuals(cut, lumped)
        self._open: dict[int, torch.Tensor] = {}

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        position, call = self._advance(blocks, index)
        if position < self._begin:
            return block(*args, **kwargs)
        for link in call.links:
            if link.chain not in self._open:
                self._open[link.chain] = pick(args, kwargs, link.key)
        output = block(*args, **kwargs)
        outputs = output if call.width else (output,)
        for link in call.links:
            if link.closes:
                self._residuals.add(link.chain, outputs[link.slot] - self._open.pop(link.chain))
                self._witnessed(link.chain, outputs[link.slot])
        for slot in call.sides:
            self._residuals.put_side(position, slot, outputs[slot])
        return output

    @property
    def held(self) -> Held:
        """What the blocks added, once the forward has returned."""
        return self._residuals


class HoldPass(_AlongCut):
    """Runs no block from `begin` on: adds what is held where each segment opens and passes the rest through."""

    def __init__(self, residuals: Residuals, begin: int = 0) -> None:
        super().__init__(residuals.cut, begin)
        self._residuals = residuals
        self._added: set[int] = set()

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        position, call = self._advance(blocks, index)
        if position < self._begin:
            return block(*args, **kwargs)
        outputs: list[torch.Tensor | None] = [None] * max(call.width, 1)
        for link in call.links:
            given = pick(args, kwargs, link.key)
            held = None if link.chain in self._added else self._residuals.at(link.chain)
            self._added.add(link.chain)
            outputs[link.slot] = output = given if held is None else given + held
            if link.closes:
                self._witnessed(link.chain, output)
        for slot in call.sides:
            outputs[slot] = self._residuals.side(position, slot)
        return tuple(outputs) if call.width else outputs[0]


class DecidePass(_AlongCut):
    """Runs the blocks before the head, then lets `choose` say how the rest of the forward goes."""

    def __init__(self, cut: Cut, choose: Callable[[nn.Module, dict[str, Any]], ComputePass | HoldPass]) -> None:
        super().__init__(cut, 0)
        self._choose = choose
        self.chosen: ComputePass | HoldPass | None = None

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.chosen is None:
            if self._position < self._cut.head:
                self._advance(blocks, index)
                return block(*args, **kwargs)
            self.chosen = self._choose(block, named(type(block), args, kwargs))
            self.chosen._position = self._position
        return self.chosen.call(blocks, index, block, args, kwargs)

    def done(self) -> None:
        if self.chosen is None:
            raise DivergedError
        self.chosen.done()


class FinishPass(_AlongCut):
    """Runs no block and lets the main stream leave the seam as `hidden`: what the model does after its blocks."""

    def __init__(self, cut: Cut, hidden: torch.Tensor) -> None:
        super().__init__(cut, 0)
        self._hidden = hidden
        self._end = max(i for i, call in enumerate(cut.calls) if cut.main_link(call) is not None)

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        position, call = self._advance(blocks, index)
        outputs: list[torch.Tensor | None] = [None] * max(call.width, 1)
        for link in call.links:
            outputs[link.slot] = pick(args, kwargs, link.key)
        main = self._cut.main_link(call)
        if position == self._end and main is not None:
            outputs[main.slot] = self._hidden
        return tuple(outputs) if call.width else outputs[0]


class Passes:
    """How a method runs and holds the blocks; a method with its own idea of a residual overrides both."""

    def compute(self, cut: Cut, lumped: bool, begin: int) -> ComputePass:
        return ComputePass(cut, lumped, begin)

    def hold(self, cut: Cut, held: Held, begin: int) -> HoldPass:
        assert isinstance(held, Residuals)
        return HoldPass(held, begin)
