"""What happened: which steps were computed and held, why, how long they took, what was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StepRecord:
    """One forward of one branch at one step."""

    transformer: str
    branch: str
    step: int
    computed: bool
    reason: str
    clock: Callable[[], float]

    def as_dict(self) -> dict[str, Any]:
        return {
            "transformer": self.transformer,
            "branch": self.branch,
            "step": self.step,
            "computed": self.computed,
            "reason": self.reason,
        }


@dataclass
class GenerationStats:
    """One generation: its steps, its decisions, its cost."""

    method: str
    settings: dict[str, Any]
    steps: int | None = None
    visits: list[StepRecord] = field(default_factory=list)
    peak_bytes: int = 0
    finished: bool = False

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches in the order they came; with two transformers, `transformer/branch`."""
        several = len({v.transformer for v in self.visits}) > 1
        return tuple(dict.fromkeys(f"{v.transformer}/{v.branch}" if several else v.branch for v in self.visits))

    def of_branch(self, branch: str) -> list[StepRecord]:
        """The forwards of one branch, in order."""
        return [v for v in self.visits if branch in (v.branch, f"{v.transformer}/{v.branch}")]

    @property
    def computed(self) -> dict[str, int]:
        """Computed steps by branch."""
        return {b: sum(v.computed for v in self.of_branch(b)) for b in self.branches}

    @property
    def held(self) -> dict[str, int]:
        """Held steps by branch."""
        return {b: sum(not v.computed for v in self.of_branch(b)) for b in self.branches}

    @property
    def computed_total(self) -> int:
        """Computed forwards of all branches."""
        return sum(self.computed.values())

    @property
    def held_total(self) -> int:
        """Held forwards of all branches."""
        return sum(self.held.values())

    def seconds(self, computed: bool) -> float:
        """Time in computed or in held forwards."""
        return sum(v.clock() for v in self.visits if v.computed == computed)

    def trace(self, branch: str) -> str:
        """One character a forward: `C` computed, `h` held."""
        return "".join("C" if v.computed else "h" for v in self.of_branch(branch))

    def as_dict(self) -> dict[str, Any]:
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
            "decisions": [v.as_dict() for v in self.visits],
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
    """Every generation since the cache was enabled, the newest last; old ones only in the totals."""

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
        """Computed forwards in all generations."""
        return self.dropped_computed + sum(g.computed_total for g in self.generations)

    @property
    def held(self) -> int:
        """Held forwards in all generations."""
        return self.dropped_held + sum(g.held_total for g in self.generations)

    @property
    def count(self) -> int:
        """How many generations there were."""
        return self.dropped + len(self.generations)

    @property
    def peak_bytes(self) -> int:
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
    """Keeps the newest generations whole and the older ones as totals."""

    def __init__(self, method: str, keep: int = 32) -> None:
        self._stats = Stats(method, [])
        self._keep = keep

    def open(self, generation: GenerationStats) -> None:
        """A generation begins; one that never ran a forward is forgotten."""
        generations = self._stats.generations
        if generations and not generations[-1].visits:
            generations.pop()
        generations.append(generation)
        if len(generations) > self._keep:
            oldest = generations.pop(0)
            self._stats.dropped += 1
            self._stats.dropped_computed += oldest.computed_total
            self._stats.dropped_held += oldest.held_total

    def snapshot(self, notes: Iterable[str] = ()) -> Stats:
        """The statistics as of now."""
        generations = [g for g in self._stats.generations if g.visits]
        stats = self._stats
        return Stats(stats.method, generations, stats.dropped, stats.dropped_computed, stats.dropped_held, tuple(notes))


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1000  # type: ignore[assignment]
    raise AssertionError("unreachable")
