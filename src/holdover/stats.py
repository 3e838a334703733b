"""Statistics: which steps were computed and held, why, how long they took, how many bytes were held."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class StepRecord:
    """One forward of one branch at one step; `clock()` returns the seconds it took."""

    transformer: str
    branch: str
    step: int
    computed: bool
    reason: str
    clock: Callable[[], float]

    def __reduce__(self) -> Any:
        """A pickle has the seconds, not the events of the device that measure them."""
        measured = functools.partial(float, self.clock())
        return type(self), (self.transformer, self.branch, self.step, self.computed, self.reason, measured)


@dataclass
class GenerationStats:
    """One generation. `forwards` has one record per forward; `steps` is None if the number of steps is unknown."""

    method: str
    settings: dict[str, Any]
    steps: int | None = None
    forwards: list[StepRecord] = field(default_factory=list)
    peak_bytes: int = 0
    finished: bool = False

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches in order of appearance; with two transformers, `transformer/branch`."""
        several = len({f.transformer for f in self.forwards}) > 1
        return tuple(dict.fromkeys(f"{f.transformer}/{f.branch}" if several else f.branch for f in self.forwards))

    def of_branch(self, branch: str) -> list[StepRecord]:
        """The forwards of one branch, in order."""
        return [f for f in self.forwards if branch in (f.branch, f"{f.transformer}/{f.branch}")]

    @property
    def computed(self) -> dict[str, int]:
        """Number of computed steps by branch."""
        return {b: self.trace(b).count("C") for b in self.branches}

    @property
    def held(self) -> dict[str, int]:
        """Number of held steps by branch."""
        return {b: self.trace(b).count("h") for b in self.branches}

    @property
    def computed_total(self) -> int:
        """Number of computed forwards of all branches."""
        return sum(f.computed for f in self.forwards)

    @property
    def held_total(self) -> int:
        """Number of held forwards of all branches."""
        return len(self.forwards) - self.computed_total

    def seconds(self, computed: bool) -> float:
        """Total time of the computed or of the held forwards."""
        return sum(f.clock() for f in self.forwards if f.computed == computed)

    def trace(self, branch: str) -> str:
        """One character per forward: `C` for computed, `h` for held."""
        return "".join("C" if f.computed else "h" for f in self.of_branch(branch))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("transformer", "branch", "step", "computed", "reason")
        return {
            "method": self.method,
            "settings": self.settings,
            "steps": self.steps,
            "computed": self.computed,
            "held": self.held,
            "seconds_computed": self.seconds(True),
            "seconds_held": self.seconds(False),
            "peak_bytes": self.peak_bytes,
            "finished": self.finished,
            "decisions": [{name: getattr(f, name) for name in names} for f in self.forwards],
        }

    def __str__(self) -> str:
        head = f"{self.steps} steps" if self.steps is not None else "steps"
        lines = [f"{self.method}, {head}, {_bytes(self.peak_bytes)} held at most"]
        width = max((len(b) for b in self.branches), default=0)
        for branch in self.branches:
            counts = f"{self.computed[branch]:3d} computed {self.held[branch]:3d} held"
            lines.append(f"  {branch:<{width}}  {counts}  {self.trace(branch)}")
        lines.append(f"  {self.seconds(True):.2f} s in computed, {self.seconds(False):.2f} s in held forwards")
        return "\n".join(lines)


@dataclass
class Stats:
    """All generations since the cache was enabled, newest last. The oldest are only counted in the totals."""

    method: str
    generations: list[GenerationStats]
    dropped: int = 0
    dropped_computed: int = 0
    dropped_held: int = 0
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> GenerationStats | None:
        """The newest generation."""
        return self.generations[-1] if self.generations else None

    @property
    def computed(self) -> int:
        """Number of computed forwards in all generations."""
        return self.dropped_computed + sum(g.computed_total for g in self.generations)

    @property
    def held(self) -> int:
        """Number of held forwards in all generations."""
        return self.dropped_held + sum(g.held_total for g in self.generations)

    @property
    def count(self) -> int:
        """Number of generations."""
        return self.dropped + len(self.generations)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at a time."""
        return max((g.peak_bytes for g in self.generations), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "method": self.method,
            "generations": self.count,
            "computed": self.computed,
            "held": self.held,
            "peak_bytes": self.peak_bytes,
            "notes": list(self.notes),
            "last": [g.as_dict() for g in self.generations],
        }

    def __str__(self) -> str:
        total = self.computed + self.held
        ratio = f", {total / self.computed:.2f}x fewer" if self.held else ""
        generations = "1 generation" if self.count == 1 else f"{self.count} generations"
        lines = [f"{self.method}: {generations}, {self.computed} of {total} forwards computed{ratio}"]
        lines += [f"  {note}" for note in self.notes]
        if self.last is not None:
            lines.append(f"last generation: {self.last}")
        return "\n".join(lines)


class Ledger:
    """Collects the statistics of an engine: the newest generations in full, older ones as totals."""

    KEPT = 32

    def __init__(self, method: str) -> None:
        self._stats = Stats(method, [])

    def open(self, generation: GenerationStats) -> None:
        """Add a generation that starts now; drop the last one if it never ran a forward."""
        generations = self._stats.generations
        if generations and not generations[-1].forwards:
            generations.pop()
        generations.append(generation)
        if len(generations) > self.KEPT:
            oldest = generations.pop(0)
            self._stats.dropped += 1
            self._stats.dropped_computed += oldest.computed_total
            self._stats.dropped_held += oldest.held_total

    def snapshot(self, notes: Iterable[str] = ()) -> Stats:
        """The statistics up to now."""
        return replace(self._stats, generations=[g for g in self._stats.generations if g.forwards], notes=tuple(notes))


def _bytes(count: int) -> str:
    """`1.5 MB`."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count} B"
