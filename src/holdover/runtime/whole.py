"""Takes one forward across where no cut can be traced: the whole transformer is one block, and its output is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UnsupportedModelError
from ..models.inputs import iter_tensors
from ..models.registry import INPUT_SIGNAL
from .calls import Call, Outcome
from .exchange import agreed, known_to_all
from .outputs import mapped
from .recent import KINDS, Recent
from .replay import compare
from .residuals import Held, weighted_sum
from .unit import Unit

CUT = "the whole transformer: its output is held"


class HeldOutput(Held):
    """A transformer's output, kept apart from what was returned."""

    def __init__(self, template: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._template = template
        self._tensors = tuple(tensors)

    @classmethod
    def of(cls, output: Any) -> HeldOutput:
        tensors: list[torch.Tensor] = []
        template = mapped(output, lambda tensor: tensors.append(tensor.clone()))
        return cls(template, tensors)

    def rebuilt(self) -> Any:
        """An output like the one that was returned, in memory of its own."""
        copies = iter([tensor.clone() for tensor in self._tensors])
        return mapped(self._template, lambda _: next(copies))

    def mixed(self, terms: Sequence[tuple[float, HeldOutput]]) -> HeldOutput:
        columns = zip(*(held._tensors for _, held in terms), strict=True)
        weights = [weight for weight, _ in terms]
        return HeldOutput(self._template, [weighted_sum(zip(weights, column, strict=True)) for column in columns])

    def mapped(self, change: Callable[[Any], Any]) -> HeldOutput:
        return HeldOutput(self._template, [change(tensor) for tensor in self._tensors])

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return self._tensors[:1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors)


class WholeSeam:
    """The cut around a transformer."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._checked: Recent[Any, None] = Recent(KINDS)

    def run(self, call: Call) -> Outcome:
        """Run the transformer, or return what it is predicted to return; a signal is read off the latent."""
        decision = call.decide(self._signal(call))
        if not decision.compute:
            held = call.held()
            assert isinstance(held, HeldOutput)
            return Outcome(held.rebuilt(), decision, None)
        output = call.plain(*call.args, **call.kwargs)
        held = HeldOutput.of(output)
        if not known_to_all(self._unit.groups, call.structure in self._checked):
            self._check(call, held)
        return Outcome(output, decision, held)

    def _signal(self, call: Call) -> torch.Tensor | None:
        """What enters: the only signal there is without a cut."""
        if call.signal is None:
            return None
        if call.signal is not INPUT_SIGNAL.of_block:
            raise UnsupportedModelError(
                f"No cut through this {self._unit.class_name} can be traced, so its blocks' signal cannot be read. "
                'Measure coefficients with signal="input" and use them.'
            )
        return next(iter_tensors([*call.args, *call.kwargs.values()]))

    def _check(self, call: Call, held: HeldOutput) -> None:
        """The model must give the same for the same input: one with a memory of its own must not be held."""
        again = call.plain(*call.args, **call.kwargs)
        found = compare(self._unit.class_name, (again, {}), (held.rebuilt(), {}), CUT)
        report = agreed(self._unit.groups, found)
        if not report.ok:
            raise UnsupportedModelError(
                f"{report}\n{self._unit.class_name} gives another output for the same input each time, and no cut "
                "through it can be traced: it cannot be held.",
                report,
            )
        self._checked[call.structure] = None
        self._unit.report = report
        self._unit.notes.add(f"{self._unit.name}: {CUT}")
