"""The signal a branch was last seen with, and how far it had moved."""

from __future__ import annotations

import torch

from .exchange import change_over
from .late import LateScalar
from .ranks import ALONE, Groups
from .signals import magnitude


class SeenSignal:
    """The signal of a branch's last step, and how much it had changed there: asked for now, read when it is needed."""

    def __init__(self, value: torch.Tensor, before: SeenSignal | None, groups: Groups = ALONE) -> None:
        self.value = value
        self._change: LateScalar | None = None
        if groups.in_step:  # entered by all ranks, with something to compare or not
            change = change_over(groups, value, None if before is None else before.value)
            self._change = None if before is None else LateScalar(change)
        elif before is not None:
            self._change = LateScalar(magnitude(value - before.value) / before._magnitude)
        self._magnitude: torch.Tensor = magnitude(value)  # for the next step, while the change is on its way

    def change(self) -> float | None:
        """The change since the step before; None where there was none."""
        return None if self._change is None else self._change.read()

    @property
    def nbytes(self) -> int:
        return self.value.nbytes
