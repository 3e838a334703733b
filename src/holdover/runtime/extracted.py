"""Takes one forward across the seam of a model whose CacheContext a registered extractor builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..context import CacheContext
from ..errors import UnsupportedModelError
from .calls import Call, Outcome
from .exchange import agreed, known_to_all
from .recent import KINDS, Recent
from .replay import compare
from .residuals import Held, weighted_sum
from .seam import Seam
from .unit import Unit

CUT = "by the registered extractor"


class ExtractedResiduals(Held):
    """What the blocks added to the hidden states."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def mixed(self, terms: Sequence[tuple[float, ExtractedResiduals]]) -> ExtractedResiduals:
        return ExtractedResiduals(weighted_sum((w, r._value) for w, r in terms))

    def mapped(self, change: Callable[[Any], Any]) -> ExtractedResiduals:
        return ExtractedResiduals(change(self._value))

    def added_to(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self._value

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return (self._value,)

    @property
    def nbytes(self) -> int:
        return self._value.nbytes


class ExtractedSeam:
    """The cut an extractor makes through one transformer."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._checked: Recent[object, None] = Recent(KINDS)

    def run(self, call: Call) -> Outcome:
        """Build the context, ask, then run the blocks or add what is held."""
        context = self._context(call)
        decision = call.decide(context.modulated_input)
        if not decision.compute:
            held = call.held()
            assert isinstance(held, ExtractedResiduals)
            return Outcome(context.postprocess(held.added_to(context.hidden_states)), decision, None)
        hidden = self._run_blocks(context)
        residuals = ExtractedResiduals(hidden - context.hidden_states)
        output = context.postprocess(hidden)
        if not known_to_all(self._unit.groups, call.structure in self._checked):
            self._check(call, output, residuals)
        return Outcome(output, decision, residuals)

    def _context(self, call: Call) -> CacheContext:
        assert self._unit.extractor is not None
        context = self._unit.extractor(self._unit.core, *call.args, **call.kwargs)
        if not isinstance(context, CacheContext):
            raise TypeError(f"The extractor for {self._unit.class_name} returned {context!r}, not a CacheContext.")
        context.validate()
        return context

    def _run_blocks(self, context: CacheContext) -> torch.Tensor:
        outputs = context.run_transformer_blocks()
        if not isinstance(outputs, (tuple, list)) or not outputs or not isinstance(outputs[0], torch.Tensor):
            raise TypeError("CacheContext.run_transformer_blocks must return a tuple with the hidden states first.")
        if outputs[0].shape != context.hidden_states.shape:
            raise ValueError(
                "CacheContext.run_transformer_blocks must keep the shape of the hidden states to be held: "
                f"{tuple(context.hidden_states.shape)} became {tuple(outputs[0].shape)}."
            )
        return outputs[0]

    def _check(self, call: Call, output: object, residuals: ExtractedResiduals) -> None:
        """Hold the step that was just computed: it must give the same."""
        context = self._context(call)
        held = context.postprocess(residuals.added_to(context.hidden_states))
        report = agreed(self._unit.groups, compare(self._unit.class_name, (output, {}), (held, {}), CUT))
        if not report.ok:
            raise UnsupportedModelError(
                f"{report}\nThe extractor's postprocess depends on more than the hidden states.", report
            )
        self._checked[call.structure] = None
        self._unit.report = report


def seam_of(unit: Unit) -> Seam | ExtractedSeam:
    """The way across one transformer: by its registered extractor, else by a trace."""
    return Seam(unit) if unit.extractor is None else ExtractedSeam(unit)
