"""The outputs of each branch of a run, and how the scheduler's output is mixed of them: found, not assumed.

Pipelines mix their branches in ways of their own. Where what the scheduler got is the same linear mix of the branches'
outputs at every step, branches are told apart in a profile; where it is not (norms are rescaled, outputs are cut, a
branch runs at some steps only), the profile is of what the scheduler got.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ..models.arguments import tensors_in
from ..plan.kernel import Array, Kernel
from ..runtime.method import Computed
from .shelf import Shelf, grams

_SAME = 1e-2  # by how much the mix may differ from run to run
_MISSED = 1e-4  # of the squared length: what rounding to bfloat16 may leave unexplained


@dataclass(frozen=True)
class Mixed:
    """Inner products of the outputs, of each branch or of what the scheduler got, and how it was mixed."""

    grams: Array
    branches: tuple[str, ...] = ()
    mix: tuple[float, ...] = (1.0,)

    def kernel(self, noise: Array) -> Kernel:
        """The same on its grid, with nothing known of how errors grow."""
        return Kernel(noise, self.grams, np.zeros((len(self.grams), len(noise) + 1)), self.mix)


def together(measured: Sequence[Mixed]) -> Mixed:
    """Several runs as one; branches are told apart if they are and mix alike in all of them."""
    first, mixes = measured[0], np.array([m.mix for m in measured if m.branches == measured[0].branches])
    if len(mixes) == len(measured) and np.ptp(mixes, axis=0).max() < _SAME:
        return Mixed(np.concatenate([m.grams for m in measured]), first.branches, tuple(mixes.mean(axis=0).tolist()))
    steps = measured[0].grams.shape[1] // len(first.mix)
    return Mixed(np.concatenate([m.kernel(np.zeros(steps)).merged.grams for m in measured]))


class Branched:
    """What the transformer returned at each step, by branch; a context manager like the shelves it keeps them on."""

    def __init__(self, place: str) -> None:
        self._place, self._stack = place, ExitStack()
        self._shelves: dict[str, Shelf] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, computed: Computed) -> None:
        output = next(tensors_in(computed.output), None)
        shelf = self._shelves.get(computed.branch)
        if shelf is None:
            shelf = self._shelves[computed.branch] = self._stack.enter_context(Shelf(self._place))
        if isinstance(output, torch.Tensor):
            shelf.put(output)

    def clear(self) -> None:
        """Begin again."""
        self._shelves.clear()

    def mixed(self, outputs: Shelf) -> Mixed:
        """How the outputs the scheduler got are made of the branches; as they are where there is one, or no mix."""
        shelves = list(self._shelves.values())
        alike = all(len(s) == len(outputs) and s[0].numel() == outputs[0].numel() for s in shelves)
        if len(shelves) < 2 or not alike or any(len(s[0]) != len(outputs[0]) for s in shelves):
            return Mixed(grams([outputs]))
        products = grams([*shelves, outputs])
        return _told_apart(products, tuple(self._shelves), len(outputs))


def _told_apart(products: Array, branches: tuple[str, ...], steps: int) -> Mixed:
    """The branches with their mix, if it explains what the scheduler got."""
    count, inner = len(branches), len(branches) * steps
    same_step = np.einsum("gbtct->bc", products.reshape(-1, count + 1, steps, count + 1, steps))
    mix = np.linalg.lstsq(same_step[:-1, :-1], same_step[:-1, -1], rcond=None)[0]
    missed = same_step[-1, -1] - mix @ same_step[:-1, -1]
    if missed > _MISSED * same_step[-1, -1]:
        return Mixed(products[:, inner:, inner:])
    return Mixed(products[:, :inner, :inner], branches, tuple(map(float, mix)))
