"""The outputs of each branch of a run, and how the scheduler's output is mixed of them: found, not assumed.

Pipelines mix their branches in ways of their own. Where what the scheduler got is the same linear mix of the branches'
outputs at every step, branches are told apart in a profile; so they are where it is that mix scaled, with some of the
latent added (models that their pipeline preconditions). Where it is neither (norms are rescaled, outputs are cut, a
branch runs at some steps only), the profile is of what the scheduler got.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ..errors import HoldoverError
from ..models.inputs import iter_tensors
from ..plan.intake import Intake
from ..plan.kernel import Array, Kernel
from ..runtime.method import Computed
from .shelf import Shelf, grams

_SAME = 1e-2  # of the largest share: by how much the mix may differ from run to run
_MISSED = 1e-4  # of the squared length: what rounding to bfloat16 may leave unexplained
_ROUNDED = 4e-6  # of that of a latent: what its own rounding may


@dataclass(frozen=True)
class Mixed:
    """Inner products of the outputs, of each branch or of what the scheduler got, and how it was mixed."""

    grams: Array
    branches: tuple[str, ...] = ()
    mix: tuple[float, ...] = (1.0,)
    intake: Intake | None = None

    def kernel(self, noise: Array) -> Kernel:
        """The same on its grid, with nothing known of how errors grow."""
        return Kernel(noise, self.grams, np.zeros((len(self.grams), len(noise) + 1)), self.mix)


def together(measured: Sequence[Mixed]) -> Mixed:
    """Several runs as one; branches are told apart if they are and mix alike in all of them."""
    if len({m.intake is None for m in measured}) > 1:
        raise HoldoverError("What the scheduler gets is made of other things from call to call: calibrate one alone.")
    first, mixes = measured[0], np.array([m.mix for m in measured if m.branches == measured[0].branches])
    if len(mixes) == len(measured) and np.ptp(mixes, axis=0).max() < _SAME * np.abs(mixes).max():
        mix = tuple(mixes.mean(axis=0).tolist())
        return Mixed(np.concatenate([m.grams for m in measured]), first.branches, mix, first.intake)
    steps = measured[0].grams.shape[1] // len(first.mix)
    return Mixed(np.concatenate([m.kernel(np.zeros(steps)).merged.grams for m in measured]), intake=first.intake)


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
        output = next(iter_tensors(computed.output), None)
        shelf = self._shelves.get(computed.branch)
        if shelf is None:
            shelf = self._shelves[computed.branch] = self._stack.enter_context(Shelf(self._place))
        if isinstance(output, torch.Tensor):
            shelf.put(output)

    def clear(self) -> None:
        """Begin again."""
        self._shelves.clear()

    def mixed(self, outputs: Shelf, latents: Shelf) -> Mixed:
        """How the outputs the scheduler got are made of the branches; as they are where that cannot be told."""
        shelves = list(self._shelves.values())
        alike = all(len(s) == len(outputs) and s[0].numel() == outputs[0].numel() for s in shelves)
        if not shelves or not alike or any(len(s[0]) != len(outputs[0]) for s in shelves):
            return Mixed(grams([outputs]))
        names, steps = tuple(self._shelves), len(outputs)
        got = slice(len(names) * steps, (len(names) + 1) * steps)
        products = grams([*shelves, outputs])
        found = _told_apart(products, names, steps)
        if found is None and latents[0].numel() == outputs[0].numel():
            found = _preconditioned(grams([*shelves, outputs, latents]), names, steps)
        return found or Mixed(products[:, got, got])


def _told_apart(products: Array, branches: tuple[str, ...], steps: int) -> Mixed | None:
    """The branches with their mix, if it explains what the scheduler got; one alone is as the scheduler got it."""
    count, inner = len(branches), len(branches) * steps
    same_step = np.einsum("gbtct->bc", products.reshape(-1, count + 1, steps, count + 1, steps))
    each = np.eye(count + 1)
    mix, missed = _made_of(each[:-1], each[-1], same_step)
    if missed > _MISSED:
        return None
    if count == 1:
        return Mixed(products[:, inner:, inner:])
    return Mixed(products[:, :inner, :inner], branches, tuple(map(float, mix)))


def _preconditioned(products: Array, branches: tuple[str, ...], steps: int) -> Mixed | None:
    """The same, if the scheduler got that mix scaled and some of the latent, in a way of its own at each step.

    Where a step is short, what the scheduler gets may be mostly rounding, and guidance makes it more: there only what
    it does to the latent counts. A third of the steps must be clear without that.
    """
    count, inner, total = len(branches), len(branches) * steps, products.sum(axis=0)
    of_step = [total[at : inner + 2 * steps : steps, at : inner + 2 * steps : steps] for at in range(steps)]
    *each, got, latent = np.eye(count + 2)
    shares = np.array([_made_of(np.stack([*each, latent]), got, gram)[0][:-1] for gram in of_step])
    scale = shares.sum(axis=1, keepdims=True)
    if np.any(np.abs(scale) < 1e-6):
        return None
    mix = np.median(shares / scale, axis=0)
    fitted = [_made_of(np.stack([mix @ each, latent]), got, gram) for gram in of_step]
    missed = np.array([rest for _, rest in fitted])
    clear, rounded = missed <= _MISSED, missed * _moved(total[inner + steps :, inner + steps :]) <= _ROUNDED * mix @ mix
    if clear.mean() < 1 / 3 or not np.all(clear | rounded):
        return None
    own = Mixed(products[:, :inner, :inner], intake=Intake(*np.array([share for share, _ in fitted]).T))
    return own if count == 1 else replace(own, branches=branches, mix=tuple(map(float, mix)))


def _moved(latents: Array) -> Array:
    """How far each latent is from the one before, squared, over its squared length."""
    sizes, beside = np.diag(latents), np.diag(latents, 1)
    moved: Array = (sizes[1:] - 2 * beside + sizes[:-1]) / np.maximum(sizes[:-1], 1e-30)
    return moved


def _made_of(features: Array, wanted: Array, gram: Array) -> tuple[Array, float]:
    """How much of each feature is in what is wanted, and the part of its squared length that is missed."""
    normal, known, whole = features @ gram @ features.T, features @ gram @ wanted, float(wanted @ gram @ wanted)
    size = np.sqrt(np.maximum(np.diag(normal), 1e-30))
    shares: Array = np.linalg.lstsq(normal / np.outer(size, size), known / size, rcond=1e-12)[0] / size
    return shares, (whole - float(shares @ known)) / max(whole, 1e-30)
