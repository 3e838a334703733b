"""Takes one forward across with cache-dit: each list is iterated as one block, which the library runs or holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..models.inputs import iter_tensors
from ..runtime.calls import Call, Outcome
from ..runtime.exchange import agreed, everywhere, known_to_all
from ..runtime.recent import KINDS, Recent
from ..runtime.replay import ReplayReport, compare
from ..runtime.unit import Unit
from .contexts import BranchContexts, StepContextManager
from .fitting import Fitting


class UnifiedPass:
    """Lets the loop over a list see one block: the list under cache-dit."""

    def __init__(self, fitting: Fitting, manager: StepContextManager) -> None:
        self._lists = {unified.name: unified for unified in fitting.lists}
        self._emptied = fitting.emptied
        self._manager = manager
        self.seen: set[str] = set()

    def covers(self, blocks: str) -> bool:
        return blocks in self._lists or blocks in self._emptied

    def items(self, blocks: str, modules: Sequence[nn.Module]) -> Sequence[Any]:
        """The one block, with the contexts of the branch that runs; nothing where another list has taken them over."""
        if blocks in self._emptied:
            return ()
        unified = self._lists[blocks]
        unified.block.transformer_blocks = unified.blocks()
        unified.block.context_manager = self._manager
        self.seen.add(blocks)
        return (unified.block,)


class CacheDiTCrossing:
    """The way across one transformer."""

    def __init__(self, unit: Unit, fitting: Fitting) -> None:
        self._unit, self._fitting = unit, fitting
        self._checked: Recent[Any, None] = Recent(KINDS)

    def run(self, call: Call) -> Outcome:
        """Run the forward with the lists under cache-dit, which decides inside; then ask what it decided."""
        contexts: BranchContexts = call.track.state
        manager = contexts.at(call.step)
        known = known_to_all(self._unit.groups, call.structure in self._checked)
        output = self._through(call, manager) if known else self._tried(call, manager)
        decision = call.decide(None)
        if not decision.compute:
            return Outcome(output, decision, None)
        if not known and manager.decisions:
            self._check(call, output, manager)
        return Outcome(output, decision, contexts.held())

    def _tried(self, call: Call, manager: StepContextManager) -> Any:
        """The first forward of a kind: one that only the plain model can run is refused by name."""
        try:
            return self._through(call, manager)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            call.plain(*call.args, **call.kwargs)  # where this fails too, its own error is the one to see
            raise self._refusal(call, "the model runs, but not through cache-dit", error) from error

    def _through(self, call: Call, manager: StepContextManager) -> Any:
        run = UnifiedPass(self._fitting, manager)
        with self._fitting.patches.applied():
            output = self._unit.run(run, call.plain, call.args, call.kwargs)
        missed = [unified.name for unified in self._fitting.lists if unified.name not in run.seen]
        if missed:
            raise UnsupportedModelError(
                f"This forward of {self._unit.class_name} does not iterate over {', '.join(missed)}: cache-dit cannot "
                "take its place. Use tea_cache or mag_cache."
            )
        return output

    def _check(self, call: Call, output: Any, manager: StepContextManager) -> None:
        """A computed step must be the plain forward, and holding it at once must give the same again."""
        plain = call.plain(*call.args, **call.kwargs)
        if not self._equal(plain, output):
            report = self._compared(plain, output)
            if not report.ok or self._equal(plain, call.plain(*call.args, **call.kwargs)):
                raise self._refusal(call, "a computed step is not the plain forward", report)
        manager.replaying = True
        try:
            report = self._compared(output, self._through(call, manager))
        finally:
            manager.replaying = False
        if not report.ok:
            raise self._refusal(call, "a held step does not replay a computed one", report)
        self._checked[call.structure] = None
        self._unit.report = report

    def _compared(self, one: Any, other: Any) -> ReplayReport:
        report = compare(self._unit.class_name, (one, {}), (other, {}), str(self._fitting))
        return agreed(self._unit.groups, report)

    def _equal(self, one: Any, other: Any) -> bool:
        return everywhere(self._unit.groups, _equal(one, other))

    def _refusal(self, call: Call, what: str, found: object) -> UnsupportedModelError:
        """An error with the model's name, what is wrong with which arguments, and what to do."""
        given = self._unit.arguments.bind(call.args, call.kwargs).items()
        control = [name for name, value in given if "control" in name and value is not None]
        cause = f" with {', '.join(control)}" if control else ""
        return UnsupportedModelError(
            f"cache-dit cannot cache {self._unit.class_name}{cause}: {what}. It takes all blocks of a list for one, so "
            f"what a model does between them is lost. Use tea_cache or mag_cache, which run that live.\n{found}",
            found if isinstance(found, ReplayReport) else None,
        )


def _equal(one: Any, other: Any) -> bool:
    """Bit for bit, with equal NaNs taken as equal."""
    ours, theirs = (list(iter_tensors(dict(o) if isinstance(o, dict) else o)) for o in (one, other))
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(ours, theirs, strict=True)
    )
