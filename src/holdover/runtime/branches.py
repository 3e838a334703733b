"""Which branch is this forward? The name in diffusers' `cache_context`, else the conditioning, else the CFG rank's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class _Known:
    """The conditioning of one branch; holding the tensors keeps their memory from being given to another."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    host: Any
    label: str


class Branches:
    """Tells the branches of one transformer in one generation apart.

    `rank` is which of how many CFG ranks this process is: its branches are numbered as one process would number them.
    """

    def __init__(self, rank: tuple[int, int] = (0, 1)) -> None:
        self._rank, self._of = rank
        self._known: list[_Known] = []
        self._at: dict[str, int] = {}

    def label(self, name: str | None, step: int, conditioning: Sequence[torch.Tensor], host: Any) -> str:
        """The branch's name: the pipeline's own, or a number for each distinct conditioning."""
        if name is not None:
            return name
        tensors = tuple(conditioning)
        versions = tuple(_version(t) for t in tensors)
        for same in (_is_same, _is_equal):
            for known in self._known:
                if known.host == host and same(known, tensors, versions):
                    return known.label
        return self._only(step) or self._new(tensors, versions, host)

    def _only(self, step: int) -> str | None:
        """Across CFG ranks, the one branch of this rank, where its conditioning is made anew at each step."""
        if self._of == 1 or len(self._known) != 1 or self.visited(self._known[0].label, step):
            return None
        return self._known[0].label if self._known[0].label in self._at else None

    def _new(self, tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...], host: Any) -> str:
        # Inference tensors have no version that would show a later write: remember their numbers instead.
        kept = tuple(t.clone() if t.is_inference() else t for t in tensors)
        number = 1 + self._rank + self._of * len(self._known)
        self._known.append(_Known(kept, versions, host, str(number)))
        return self._known[-1].label

    def visited(self, label: str, step: int) -> bool:
        """Whether the branch has already run at this step."""
        return self._at.get(label) == step

    def arrive(self, label: str, step: int) -> str:
        """Note that a branch runs at a step; a second pass of the same branch at one step is a branch of its own."""
        own, pass_ = label, 1
        while self.visited(own, step):
            pass_ += 1
            own = f"{label}#{pass_}"
        self._at[own] = step
        return own


def _is_same(known: _Known, tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> bool:
    """The very same memory, not written to since."""
    return (
        len(known.tensors) == len(tensors)
        and known.versions == versions
        and all(_same_memory(a, b) for a, b in zip(known.tensors, tensors, strict=True))
    )


def _is_equal(known: _Known, tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> bool:
    """Equal numbers in other memory: some pipelines build their conditioning anew at each step."""
    if len(known.tensors) != len(tensors) or not tensors:
        return False
    unwritten = tuple(_version(t) for t in known.tensors) == known.versions
    return unwritten and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(known.tensors, tensors, strict=True)
    )


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
