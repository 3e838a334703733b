"""What a model's loop over its blocks gets in place of them while a pass is running."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

untraced: Any = torch.compiler.disable


class BlockByBlock(ABC):
    """A pass that lets the model's own loop run and answers its block calls one by one."""

    @abstractmethod
    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer one block call."""

    def items(self, blocks: str, modules: Sequence[nn.Module]) -> Sequence[Any]:
        """A stand-in for each block."""
        return [BlockStandIn(self, blocks, i, module) for i, module in enumerate(modules)]


class BlockStandIn:
    """Called, it asks the pass; otherwise it is the block."""

    __slots__ = ("_block", "_blocks", "_index", "_running")

    def __init__(self, running: BlockByBlock, blocks: str, index: int, block: nn.Module) -> None:
        self._running, self._blocks, self._index, self._block = running, blocks, index, block

    @untraced(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.call(self._blocks, self._index, self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in BlockStandIn.__slots__:
            raise AttributeError(name)
        return getattr(self._block, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._block)
