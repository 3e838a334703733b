"""Who draws, as the HTTP side sees it: one worker in this process, or many replicas elsewhere. Knows neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .work import Record, Ticket

if TYPE_CHECKING:
    from .choice import Choice
    from .known import Known
    from .model import Facts


@dataclass
class Totals:
    """What one method has done since the server started."""

    images: int = 0
    generations: int = 0
    computed: int = 0
    held: int = 0
    peak_bytes: int = 0

    def add(self, record: Record) -> None:
        """A batch was drawn; any of its records will do."""
        self.images += record.batch
        self.generations += 1
        self.computed += sum(record.computed.values())
        self.held += sum(record.held.values())
        self.peak_bytes = max(self.peak_bytes, record.held_bytes)

    def merged(self, other: Totals) -> Totals:
        """Both together."""
        return Totals(
            self.images + other.images,
            self.generations + other.generations,
            self.computed + other.computed,
            self.held + other.held,
            max(self.peak_bytes, other.peak_bytes),
        )


@dataclass(frozen=True)
class Report:
    """How the cache stands and what was done with it; `prompts` are hits and misses of remembered prompts."""

    known: Known
    notes: tuple[str, ...] = ()
    totals: Mapping[str, Totals] = field(default_factory=dict)
    last: Record | None = None
    prompts: tuple[int, int] | None = None


class Studio(Protocol):
    """Whoever draws the pictures that the HTTP side takes in."""

    async def start(self) -> None:
        """Get ready; returns at once."""

    async def stop(self) -> None:
        """Draw what waits, then end."""

    def loaded(self) -> tuple[Facts, Choice]:
        """The model and the cache it stands with; an error while it is loading."""

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Take all of them in, or turn all of them away."""

    def __len__(self) -> int:
        """How many pictures wait."""

    async def report(self) -> Report:
        """For those who ask how the cache does."""

    async def metrics(self, own: bytes) -> bytes:
        """What was counted, for Prometheus; `own` is what the HTTP side that asks has counted."""
