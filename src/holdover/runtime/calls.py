"""One forward as a seam sees it: what it may ask, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..models.registry import BlockSignal
from ..policies.base import Decision
from .passes import Passes
from .residuals import Held

if TYPE_CHECKING:
    from .generation import Track


@dataclass(frozen=True, slots=True)
class Call:
    """One forward of a transformer, with the questions a seam may ask about it."""

    plain: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    structure: Any
    signal: BlockSignal | None
    decide: Callable[[torch.Tensor | None], Decision]
    passes: Passes
    step: int
    track: Track
    see: Callable[[torch.Tensor], None] | None = None  # where the decision does not wait for it

    def held(self) -> Held:
        """What the blocks would add at this step, predicted from what was computed before."""
        return self.track.predicted(self.step)


@dataclass(slots=True)
class Outcome:
    """How a forward went: what it returned, and what its blocks added if they ran."""

    output: Any
    decision: Decision
    held: Held | None


class Crossing(Protocol):
    """A way across one transformer: along a cut, or around the whole of it."""

    def run(self, call: Call) -> Outcome:
        """Take one forward across."""
        ...
