"""Statistics: which steps were computed and held, why, how long they took, how many bytes were held.

As text, as plain values, as HTML in a notebook, and as a plot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from .errors import HoldoverError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTED_COLOR, HELD_COLOR = "#0a7d72", "#c9c6bd"  # colors of computed and held steps


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


@dataclass(frozen=True)
class ExpectedQuality:
    """The PSNR in dB that each image of a generation is expected to have to its uncached image.

    It was estimated from what the method saw on the way. `error` is the root-mean-square error of such estimates in dB,
    and `rank_correlation` says how well they order images, both on `prompts` prompts that were not fitted to. Where the
    PSNR is unknown, `psnr` is empty and `reason` says why.
    """

    psnr: tuple[float, ...] = ()
    error: float | None = None
    rank_correlation: float | None = None
    prompts: int = 0
    reason: str = ""

    def __str__(self) -> str:
        measured = ""
        if self.error is not None:
            measured = (
                f"error {self.error:.1f} dB, rank correlation {self.rank_correlation:.2f}, {self.prompts} prompts"
            )
        if not self.psnr:
            return f"expected PSNR unknown: {self.reason}{f' ({measured})' if measured else ''}"
        return f"expected PSNR {', '.join(f'{value:.1f}' for value in self.psnr)} dB ({measured})"


@dataclass
class GenerationStats:
    """One generation. `forwards` has one record per forward; `steps` is None if the number of steps is unknown.

    `notes` are what the method says about this generation, such as where its plan comes from.
    `estimate` returns the expected quality; None where the method has none.
    """

    method: str
    settings: dict[str, Any]
    steps: int | None = None
    forwards: list[StepRecord] = field(default_factory=list)
    peak_bytes: int = 0
    finished: bool = False
    notes: tuple[str, ...] = ()
    estimate: Callable[[], ExpectedQuality] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickle has the expected quality, not the tensors from which it is estimated."""
        expected = self.expected
        return vars(self) | {"estimate": None if expected is None else functools.partial(replace, expected)}

    @property
    def expected(self) -> ExpectedQuality | None:
        """The PSNR that the images are expected to have, or why that is unknown; None for other methods than plan."""
        return None if self.estimate is None else self.estimate()

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
        names, expected = ("transformer", "branch", "step", "computed", "reason"), self.expected
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
            "expected": None if expected is None else asdict(expected),
            "notes": list(self.notes),
            "decisions": [{name: getattr(f, name) for name in names} for f in self.forwards],
        }

    def __str__(self) -> str:
        head = f"{self.steps} steps" if self.steps is not None else "steps"
        lines = [f"{self.method}, {head}, {_bytes(self.peak_bytes)} held at most"]
        width = max((len(b) for b in self.branches), default=0)
        for branch in self.branches:
            counts = f"{self.computed[branch]:3d} computed {self.held[branch]:3d} held"
            lines.append(f"  {branch:<{width}}  {counts}  {self.trace(branch)}")
        expected = self.expected
        if expected is not None and expected.psnr:
            lines.append(f"  {expected}")
        lines.append(f"  {self.seconds(True):.2f} s in computed, {self.seconds(False):.2f} s in held forwards")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A strip of computed and held steps for each branch, for notebooks."""
        cell = "display:inline-block;width:9px;height:14px;margin-right:1px;border-radius:2px;background:"
        rows = []
        for branch in self.branches:
            strip = ""
            for f in self.of_branch(branch):
                color, title = COMPUTED_COLOR if f.computed else HELD_COLOR, escape(f"step {f.step}: {f.reason}")
                strip += f'<span style="{cell}{color}" title="{title}"></span>'
            counts = f"{self.computed[branch]} computed, {self.held[branch]} held"
            cells = f'<td>{escape(branch)}</td><td style="white-space:nowrap">{strip}</td><td>{counts}</td>'
            rows.append(f"<tr>{cells}</tr>")
        head, *_, times = str(self).splitlines()
        return f"<div><b>{escape(head)}</b><table>{''.join(rows)}</table>{escape(times.strip())}</div>"

    def plot(self) -> Figure:
        """A matplotlib figure: the computed and held steps of each branch, and the milliseconds of each forward."""
        try:
            import matplotlib.pyplot as plt
            from matplotlib.patches import Patch
        except ImportError:
            raise HoldoverError("A plot needs matplotlib: pip install 'holdover[report]'.") from None
        branches = self.branches
        figure = plt.figure(figsize=(9, 2.6 + 0.3 * len(branches)), layout="constrained")
        strip, times = figure.subplots(2, 1, sharex=True, height_ratios=(0.6 + 0.4 * len(branches), 3))
        for row, branch in enumerate(branches):
            forwards, width = self.of_branch(branch), 0.86 / len(branches)
            steps, colors = [f.step for f in forwards], [COMPUTED_COLOR if f.computed else HELD_COLOR for f in forwards]
            strip.barh([row] * len(steps), 0.86, 0.8, [step - 0.43 for step in steps], color=colors)
            left = [step - 0.43 + row * width for step in steps]
            times.bar(left, [1000 * f.clock() for f in forwards], width, color=colors, align="edge")
        strip.set_yticks(range(len(branches)), branches)
        strip.invert_yaxis()
        strip.spines[:].set_visible(False)
        strip.tick_params(length=0)
        strip.set_title(str(self).splitlines()[0], loc="left", size=10)
        times.set(xlabel="step", ylabel="ms per forward")
        times.spines[["top", "right"]].set_visible(False)
        legend = [Patch(color=COMPUTED_COLOR, label="computed"), Patch(color=HELD_COLOR, label="held")]
        times.legend(handles=legend, frameon=False, ncols=2, loc="upper right")
        plt.close(figure)  # so that a notebook shows it once, as the value of the cell
        return figure


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

    def _summarize(self) -> list[str]:
        """The totals and the notes."""
        total = self.computed + self.held
        ratio = f", {total / self.computed:.2f}x fewer" if self.held else ""
        generations = "1 generation" if self.count == 1 else f"{self.count} generations"
        lines = [f"{self.method}: {generations}, {self.computed} of {total} forwards computed{ratio}"]
        return lines + [f"  {note}" for note in self.notes]

    def __str__(self) -> str:
        last = [] if self.last is None else [f"last generation: {self.last}"]
        return "\n".join(self._summarize() + last)

    def _repr_html_(self) -> str:
        """The totals, the notes and the newest generation, for notebooks."""
        last = "" if self.last is None else self.last._repr_html_()
        return f"<div>{'<br>'.join(map(escape, self._summarize()))}{last}</div>"

    def plot(self) -> Figure:
        """A matplotlib figure of the newest generation: its computed and held steps, and their times."""
        if self.last is None:
            raise HoldoverError("There is nothing to plot: no generation has run.")
        return self.last.plot()


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
