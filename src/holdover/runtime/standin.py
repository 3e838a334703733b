"""What a model's loop over its blocks gets in place of them while a pass is running."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

untraced: Any = torch.compiler.disable


class DivergedError(Exception):
    """The forward took another way than the cut says: whatever was held does not belong here."""


class BlockByBlock(ABC):
    """A pass that lets the model's own loop run and answers its block calls one by one.

    A `traceable` pass may become part of a graph when the whole transformer is compiled; others are stepped around.
    """

    traceable = False

    def __init__(self) -> None:
        self.class_asked = False  # whether the loop looked at what its blocks are, not only called them
        self._made: dict[str, tuple[Sequence[nn.Module], list[BlockStandIn]]] = {}
        self._graphed: dict[str, tuple[Sequence[nn.Module], list[GraphedBlock]]] = {}

    @abstractmethod
    def covers(self, blocks: str) -> bool:
        """Whether calls of this list come here."""

    @abstractmethod
    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer one block call."""

    def items(self, blocks: str, modules: Sequence[nn.Module]) -> Iterable[Any]:
        """A stand-in for each block; made once for as long as the list holds the same blocks.

        A pass that lives for one forward keeps none of them: the two would hold each other, and what the pass saw,
        until the garbage collector comes.
        """
        if not self.traceable:
            return [OpaqueStandIn(self, blocks, index, module) for index, module in enumerate(modules)]
        made = self._made.get(blocks)
        if made is None or made[0] != modules:
            made = self._made[blocks] = (modules, [BlockStandIn(self, blocks, i, m) for i, m in enumerate(modules)])
        return made[1]

    def forget(self) -> None:
        """Let go of the stand-ins, which hold the pass: it is not needed again soon."""
        self._made.clear()

    def prepare(self, blocks: str, modules: Sequence[nn.Module]) -> None:
        """Make stand-ins for a compiler to look into."""
        made = self._graphed.get(blocks)
        if made is None or made[0] != modules:
            self._graphed[blocks] = (modules, [GraphedBlock(self, blocks, i, m) for i, m in enumerate(modules)])

    def prepared(self, blocks: str) -> Sequence[Any]:
        """Those stand-ins."""
        return self._graphed[blocks][1]

    def own(self) -> None:
        """Copy what was kept of a compiled forward: a CUDA graph writes into the same memory the next time."""


class BlockStandIn:
    """Called, it asks the pass; otherwise it is the block."""

    __slots__ = ("_block", "_blocks", "_index", "_running")

    def __init__(self, running: BlockByBlock, blocks: str, index: int, block: nn.Module) -> None:
        self._running, self._blocks, self._index, self._block = running, blocks, index, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.call(self._blocks, self._index, self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in BlockStandIn.__slots__:
            raise AttributeError(name)
        return getattr(self._block, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self._running.class_asked = True
        return type(self._block)


class OpaqueStandIn(BlockStandIn):
    """One that a compiler of the whole model does not look into, though it does into the block."""

    __slots__ = ()

    @untraced(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.call(self._blocks, self._index, self._block, args, kwargs)


class GraphedBlock:
    """The same for a compiler to look into, which would take one that passes for a module for a module."""

    def __init__(self, running: BlockByBlock, blocks: str, index: int, block: nn.Module) -> None:
        self._running, self._blocks, self._index, self._block = running, blocks, index, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.call(self._blocks, self._index, self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)
