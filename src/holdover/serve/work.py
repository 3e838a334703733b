"""Pictures to draw, and what their maker says of them on the way. Knows neither HTTP nor pipelines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..stats import GenerationStats
from .choice import Choice
from .errors import ApiError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Job:
    """What pictures must have in common to be drawn together; `size` is width and height as drawn."""

    size: tuple[int, int]
    steps: int
    guidance: tuple[tuple[str, float], ...]
    negative: bool
    choice: Choice


@dataclass(frozen=True)
class Order:
    """One picture to draw, as who draws it is told; `shown_after` are the steps after which it is shown as it is."""

    job: Job
    prompt: str
    negative_prompt: str | None
    seed: int
    shown_after: frozenset[int] = frozenset()
    request_id: str = ""


@dataclass(frozen=True)
class Record:
    """How a picture was made."""

    seed: int
    choice: Choice
    steps: int
    drawn_size: tuple[int, int]
    computed: Mapping[str, int]
    held: Mapping[str, int]
    trace: Mapping[str, str]
    seconds: Mapping[str, float]
    batch: int
    held_bytes: int
    tokens: tuple[int, int]


@dataclass(frozen=True)
class Begun:
    """The picture waits no longer: it is being drawn."""


@dataclass(frozen=True)
class Partial:
    """A picture as it is after `step` steps."""

    picture: torch.Tensor
    step: int
    trace: Mapping[str, str]


@dataclass(frozen=True)
class Finished:
    """The picture, (3, H, W) in bytes."""

    picture: torch.Tensor
    record: Record


@dataclass(frozen=True)
class Failed:
    """There will be no picture."""

    error: ApiError


Event = Begun | Partial | Finished | Failed


@dataclass(eq=False)
class Ticket:
    """One picture that somebody waits for."""

    order: Order
    deliver: Callable[[Event], None]
    submitted: float = field(default_factory=time.monotonic)
    on_cancel: Callable[[], None] = lambda: None
    _gone: threading.Event = field(default_factory=threading.Event)

    @property
    def job(self) -> Job:
        return self.order.job

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._gone.set()
        self.on_cancel()

    @property
    def cancelled(self) -> bool:
        return self._gone.is_set()


def traces(stats: GenerationStats | None) -> dict[str, str]:
    """One character a step and branch: `C` computed, `h` held."""
    return {} if stats is None else {branch: stats.trace(branch) for branch in stats.branches}


def steps_to_show(count: int, steps: int) -> frozenset[int]:
    """After which steps to show `count` unfinished pictures: evenly spread, the last step being the picture itself."""
    count = min(count, steps - 1)
    return frozenset(round((i + 1) * steps / (count + 1)) for i in range(count))
