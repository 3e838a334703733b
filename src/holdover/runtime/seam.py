"""Takes one forward across the seam: along a traced cut, or through a registered extractor.

A seam knows the model and nothing of methods: whether a step is computed or held it asks the call, what is held
it gets from the call, what was computed it gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..context import CacheContext
from ..errors import UnsupportedModelError, UntraceableError
from ..models.graph import Stack
from ..policies.base import Decision
from .calls import Call, Outcome
from .exchange import agreed, known_to_all
from .feeders import candidates
from .offload import onloaded
from .passes import ComputePass, DecidePass, FinishPass, HoldPass, Pass, Passes, TracePass
from .replay import ReplayReport, compare
from .residuals import Held, Residuals
from .shortcut import WHOLE_WAY, Shortcut, same_bits, shortcut
from .standin import DivergedError
from .unit import CutChoice, Unit
from .whole import WholeSeam

Choose = Callable[[torch.Tensor | None], ComputePass | HoldPass]
AtHead = Callable[[nn.Module, dict[str, Any]], ComputePass | HoldPass]
OTHER_PATH = Decision(True, "the forward took another path than before")
_TEMB = ("temb", "timestep_proj", "time_embed", "adaln_input", "conditioning")


class _HeadReachedError(Exception):
    """The head was reached and a pass was chosen there."""

    def __init__(self, chosen: ComputePass | HoldPass) -> None:
        super().__init__()
        self.chosen = chosen


class Seam:
    """The cut through one transformer, found on its first forward."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._whole: WholeSeam | None = None if unit.lists else WholeSeam(unit)

    def run(self, call: Call) -> Outcome:
        """Take one forward across; where no cut is found, the whole transformer is one block."""
        if self._whole is None:
            try:
                return self._cut(call)
            except UntraceableError:
                self._whole = WholeSeam(self._unit)
        return self._whole.run(call)

    def _cut(self, call: Call) -> Outcome:
        """Follow the cut; a forward that leaves the known path is computed on a new trace."""
        known = self._unit.cuts.get(_kind(call))
        choice = self._trace(call) if not known_to_all(self._unit.groups, known is not None) or known is None else known
        try:
            return self._follow(call, choice)
        except DivergedError:
            pass
        try:
            return self._computed(call, self._trace(call))
        except DivergedError:
            raise UnsupportedModelError(
                f"{self._unit.class_name} calls other blocks each time it is given the same input, or keeps what its "
                "modules return from one forward to the next: it cannot be cut."
            ) from None

    def _trace(self, call: Call) -> CutChoice:
        """Watch one forward; its result is thrown away, so that the next one runs as every later one."""
        watch = TracePass()
        self._unit.run(watch, self._watched(call), call.args, call.kwargs)
        cut = watch.trace.build_stack(self._unit.family.head)
        begin = cut.head if call.signal is not None else 0
        choice = self._unit.cuts[_kind(call)] = CutChoice(cut, begin, call.passes, not watch.class_asked)
        return choice

    def _watched(self, call: Call) -> Callable[..., Any]:
        """The forward in which every block call is seen: not the one of a compiler, which need not make them."""
        return self._unit.eagerly if self._unit.compiled else call.plain

    def _follow(self, call: Call, choice: CutChoice) -> Outcome:
        made: list[tuple[Decision, ComputePass | HoldPass]] = []
        self._unit.graphable = choice.graphable
        way = self._way(choice)

        def choose(signal: torch.Tensor | None) -> ComputePass | HoldPass:
            decision = call.decide(signal)
            run = choice.computing(way) if decision.compute else choice.holding(call.held(), way)
            run.witness = None if choice.checked or self._unit.compiled else {}
            made.append((decision, run))
            return run

        try:
            output = self._through(self._begun(call, choice.cut, way, choose), call)
            decision, run = made[-1]
            held = self._kept(call, choice, output, run) if isinstance(run, ComputePass) else None
            return Outcome(output, decision, held)
        finally:
            for _, run in made:
                run.start()

    def _computed(self, call: Call, choice: CutChoice) -> Outcome:
        """The forward, computed whatever anyone would decide."""
        run = choice.computing(self._way(choice))
        run.witness = None if self._unit.compiled else {}
        try:
            output = self._through(run, call)
            return Outcome(output, OTHER_PATH, self._kept(call, choice, output, run))
        finally:
            run.start()

    def _kept(self, call: Call, choice: CutChoice, output: Any, run: ComputePass) -> Held:
        """What a computed forward leaves to be held; on a new cut it is checked first."""
        return run.held if choice.checked else self._checked(call, choice, (output, run.witness), run.held)

    def _way(self, choice: CutChoice) -> Shortcut:
        """What is left out now, of all that may be."""
        return choice.shortcut if self._leaves_out(choice) else WHOLE_WAY

    def _leaves_out(self, choice: CutChoice) -> bool:
        """Not where a compiler sees the whole of it anyway, and not where ranks meet on the way."""
        return choice.passes.leaves_out and not self._unit.compiled and not self._unit.groups.in_step

    def _begun(self, call: Call, cut: Stack, way: Shortcut, choose: Choose) -> ComputePass | HoldPass | DecidePass:
        """The pass to begin with: one that decides at the head, where the decision waits for a signal there."""
        if call.signal is None:
            return choose(None)
        at_head = self._at_head(call, cut, choose)
        return self._reached(call, cut, at_head) if self._unit.compiled else DecidePass(cut, at_head, way)

    def _at_head(self, call: Call, cut: Stack, choose: Choose) -> AtHead:
        decided = choose(None) if call.see is not None else None

        def at_head(block: nn.Module, arguments: dict[str, Any]) -> ComputePass | HoldPass:
            signal = _read(call, block, arguments)
            if decided is None or call.see is None:
                return choose(self.context(call, cut, arguments, signal).modulated_input)
            call.see(signal)
            return decided

        return at_head

    def _reached(self, call: Call, cut: Stack, at_head: AtHead) -> ComputePass | HoldPass:
        """Run to the head and no further: a compiled forward cannot wait for a decision in its middle."""

        def stop(block: nn.Module, arguments: dict[str, Any]) -> ComputePass | HoldPass:
            raise _HeadReachedError(at_head(block, arguments))

        try:
            self._unit.run(DecidePass(cut, stop), self._unit.eagerly, call.args, call.kwargs)
        except _HeadReachedError as reached:
            return reached.chosen
        raise DivergedError

    def _through(self, run: ComputePass | HoldPass | DecidePass, call: Call) -> Any:
        plain = call.plain if self._unit.graphable else self._watched(call)
        with run.leaving_out():
            output = self._unit.run(run, plain, call.args, call.kwargs)
        run.done()
        return output

    def _checked(self, call: Call, choice: CutChoice, computed: Any, held: Held) -> Held:
        """What is held, in the form in which it replays."""
        if not self._unit.compiled:
            return self._check(call, choice, computed, held)
        run = choice.computing(WHOLE_WAY)
        with run.witnessed() as left:
            output = self._unit.run(run, self._unit.eagerly, call.args, call.kwargs)
            self._check(call, choice, (output, left), run.held)
        return held.lumped() if choice.lumped and isinstance(held, Residuals) else held

    def _check(self, call: Call, choice: CutChoice, computed: Any, computed_held: Held) -> Held:
        """Hold the step that was just computed: it must give the same. Lumped residuals first, they are fewer."""
        reports: list[ReplayReport] = []
        options = [computed_held]
        if isinstance(computed_held, Residuals) and choice.cut.group_count < len(choice.cut.segments):
            options.insert(0, computed_held.lumped())
        for option in options:
            run = choice.holding(option, WHOLE_WAY)
            with run.witnessed() as left:
                held = (self._unit.run(run, self._watched(call), call.args, call.kwargs), left)
                run.done()
            lumped = option is not computed_held
            report = compare(self._unit.class_name, computed, held, choice.cut, lumped)
            reports.append(agreed(self._unit.groups, report))
            if reports[-1].ok:
                choice.checked, choice.lumped = True, lumped
                choice.shortcut = self._shortcut(call, choice, option, computed[0], held[0])
                self._unit.report = self._told(reports[-1], choice)
                return option.but(choice.shortcut.unread) if isinstance(option, Residuals) else option
        raise UnsupportedModelError(
            f"{reports[-1]}\nA held step would not be what it should be, so nothing is held on this model. "
            "Register an extractor for it with holdover.register_extractor.",
            reports[-1],
        )

    def _told(self, report: ReplayReport, choice: CutChoice) -> ReplayReport:
        """The report with what a held step does without, by name."""
        way, names = choice.shortcut, choice.cut.group_names
        children = tuple(name for name, child in self._unit.core.named_children() if child in way.feeders)
        return replace(report, left_out=children, unread=tuple(names[group] for group in sorted(way.unread)))

    def _shortcut(self, call: Call, choice: CutChoice, held: Held, computed: Any, replayed: Any) -> Shortcut:
        """What may be left out of a held step, found by holding the step that was just computed and replayed; what is
        postponed until a decision at the head must not change a bit of computed steps either.
        """
        if not self._leaves_out(choice):
            return WHOLE_WAY

        def hold(way: Shortcut) -> Any:
            return through(choice.passes.hold(choice.cut, held, choice.begin, way), way)

        def through(run: ComputePass | HoldPass, way: Shortcut) -> Any:
            def at_head(block: nn.Module, arguments: dict[str, Any]) -> ComputePass | HoldPass:
                _read(call, block, arguments)
                return run

            try:
                return self._through(run if call.signal is None else DecidePass(choice.cut, at_head, way), call)
            finally:
                run.start()
                run.forget()

        feeders = candidates(self._unit.core, lambda: hold(WHOLE_WAY))
        way = shortcut(choice.cut, choice.begin, feeders, replayed, hold)
        if call.signal is None or not any(way.feeders):
            return way
        return way if same_bits(through(choice.computing(way), way), computed) else WHOLE_WAY

    def context(self, call: Call, cut: Stack, block: Mapping[str, Any], signal: torch.Tensor) -> CacheContext:
        """What crosses the seam at the head.

        In the loop the model's own forward runs the blocks and what follows them; the two callables do the same
        on demand, by running the transformer again on this step's inputs.
        """

        def again(run: Pass) -> Any:
            return self._unit.run(run, call.plain, call.args, call.kwargs)

        def run_transformer_blocks() -> tuple[torch.Tensor, ...]:
            run = ComputePass(cut, lumped=False)
            with run.witnessed() as left:
                again(run)
            hidden = [t for group, t in left.items() if group in cut.main_groups]
            return (hidden[-1], *(t for group, t in left.items() if group not in cut.main_groups))

        temb = next((block[name] for name in _TEMB if isinstance(block.get(name), torch.Tensor)), signal)
        return CacheContext(
            modulated_input=signal,
            hidden_states=block.get(cut.main_stream, signal),
            encoder_hidden_states=block.get("encoder_hidden_states"),
            temb=temb,
            run_transformer_blocks=run_transformer_blocks,
            postprocess=lambda hidden: again(FinishPass(cut, hidden)),
        )


def _kind(call: Call) -> tuple[Any, bool, Passes]:
    """What a cut is made for: the structure of the call, whether a signal is read at the head, what runs the blocks."""
    return call.structure, call.signal is not None, call.passes


def _read(call: Call, block: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    """The signal at the head."""
    assert call.signal is not None
    with onloaded(block):
        return call.signal(block, arguments)
