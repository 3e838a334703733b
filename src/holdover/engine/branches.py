"""Which branch is this forward? The name in diffusers' `cache_context`, else the conditioning, else the CFG rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class _Conditioning:
    """The conditioning of one branch. Keeping the tensors prevents their memory from being reused for another."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    host_values: Any
    label: str


class Branches:
    """The branches of one transformer in one generation.

    `cfg_rank` is this process's number among the CFG ranks, and how many there are: branches get the numbers they would
    have in one process.
    """

    def __init__(self, cfg_rank: tuple[int, int] = (0, 1)) -> None:
        self._rank, self._ranks = cfg_rank
        self._known: list[_Conditioning] = []
        self.last_step: dict[str, int] = {}  # by label

    def find(self, step: int, conditioning: Sequence[torch.Tensor], host_values: Any) -> str:
        """The label of a branch without a name: a number for each distinct conditioning."""
        tensors = tuple(conditioning)
        for known in self._known:
            if known.host_values == host_values and len(known.tensors) == len(tensors):
                for mine, theirs, version in zip(known.tensors, tensors, known.versions, strict=True):
                    if version != (-1 if theirs.is_inference() else theirs._version):
                        break  # written to since
                    if mine is not theirs and not (
                        mine.data_ptr() == theirs.data_ptr()
                        and mine.shape == theirs.shape
                        and mine.stride() == theirs.stride()
                        and mine.dtype == theirs.dtype
                    ):
                        break
                else:
                    return known.label
        return self._find_equal(tensors, host_values) or self._only_branch(step) or self._add(tensors, host_values)

    def _find_equal(self, tensors: tuple[torch.Tensor, ...], host_values: Any) -> str | None:
        """The branch with equal values in other memory: some pipelines rebuild their conditioning at each step."""
        for known in self._known:
            if (
                tensors
                and known.host_values == host_values
                and len(known.tensors) == len(tensors)
                and tuple(map(_version, known.tensors)) == known.versions
                and all(
                    a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
                    for a, b in zip(known.tensors, tensors, strict=True)
                )
            ):
                return known.label
        return None

    def _only_branch(self, step: int) -> str | None:
        """Across CFG ranks, the one branch of this rank where its conditioning is rebuilt at each step."""
        if self._ranks == 1 or len(self._known) != 1:
            return None
        label = self._known[0].label
        return label if label in self.last_step and self.last_step[label] != step else None

    def _add(self, tensors: tuple[torch.Tensor, ...], host_values: Any) -> str:
        versions = tuple(map(_version, tensors))
        # Inference tensors have no version that would show a later write: keep their values instead.
        kept = tuple(t.clone() if t.is_inference() else t for t in tensors)
        label = str(1 + self._rank + self._ranks * len(self._known))
        self._known.append(_Conditioning(kept, versions, host_values, label))
        return label

    def name_repetition(self, label: str, step: int) -> str:
        """The label of a branch's second or later forward at one step: a branch of its own."""
        own, number = label, 1
        while self.last_step.get(own) == step:
            number += 1
            own = f"{label}#{number}"
        return own


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
