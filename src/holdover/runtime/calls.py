"""One forward as a seam sees it: what it may ask, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..models.family import BlockSignal
from ..policies.base import Decision
from .passes import Passes
from .residuals import Held


@dataclass(frozen=True, slots=True)
class Call:
    """One forward of a transformer, with the questions a seam may ask about it."""

    plain: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    structure: Any
    signal: BlockSignal | None
    decide: Callable[[torch.Tensor | None], Decision]
    held: Callable[[], Held]
    passes: Passes


@dataclass(slots=True)
class Outcome:
    """How a forward went: what it returned, and what its blocks added if they ran."""

    output: Any
    decision: Decision
    held: Held | None
