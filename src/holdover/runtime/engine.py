"""Drives one cache: finds the generation, step and branch of each forward, asks the policy, keeps what is held."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import EnableError, HoldoverWarning
from ..grid import Grid
from ..models.inputs import collect_host_values, has_fsdp_wrappers, iter_tensors
from ..models.registry import INPUT_SIGNAL
from ..policies.base import NOTHING_HELD, Decision
from ..policies.static import ASKED
from ..stats import Ledger, Stats, StepRecord
from .adopt import Adoptions
from .calls import Crossing, Outcome
from .clock import SchedulerClock, Stepped, TimestepClock
from .generation import Generation, Track
from .method import Method
from .ranks import Ranks, groups_of
from .stopwatch import Stopwatch
from .unit import Unit
from .visit import Visit

Plain = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class Engine:
    """One enabled cache on one pipeline or transformer."""

    def __init__(self, pipeline: Any, modules: Mapping[str, nn.Module], method: Method) -> None:
        self.pipeline = pipeline
        self.units = [Unit(name, module) for name, module in modules.items()]
        self.notes = tuple(note for unit in self.units for note in _prepared(method, unit, pipeline))
        self._methods = [method]
        self._crossings: dict[tuple[Unit, type[Method]], Crossing] = {}
        self._adoptions = Adoptions()
        self._clock = SchedulerClock(pipeline, self._adoptions, self._start, self._followed, self._finish)
        self._bare = TimestepClock(self._start, any(u.family.time_runs_up for u in self.units))
        self._ledger = Ledger(method.name)
        self._declared: int | None = None
        self._ranks: Ranks | None = None
        self._autograd = 0
        self._generation = Generation(method)
        self._track: Track | None = None
        self._adoptions.owner = self
        self.owner: Any = None

    @property
    def method(self) -> Method:
        """The method of the generations that start now."""
        return self._methods[-1]

    @property
    def branch_state(self) -> Any:
        """The policy's state of the branch that runs, or ran last; None between generations."""
        return None if self._track is None else self._track.state

    def install(self) -> None:
        """Put the cut in place, on every instance or on none."""
        try:
            for unit in self.units:
                unit.install(self._adoptions, self.forward)
            self._clock.watch()
        except BaseException:
            self._adoptions.release_all()
            raise

    def uninstall(self) -> None:
        """Take the cut off: every object is what it was."""
        self._adoptions.release_all()
        self._finish()

    def refresh(self, num_inference_steps: int | None) -> None:
        """The next forward begins a generation of that many steps, unless a scheduler says otherwise."""
        self._declared = num_inference_steps
        self._interrupt()

    @contextmanager
    def using(self, method: Method) -> Iterator[None]:
        """Use another method for the generations that start inside."""
        for unit in self.units:
            _prepared(method, unit, self.pipeline)
        self._methods.append(method)
        self._interrupt()
        try:
            yield
        finally:
            self._methods.pop()
            self._interrupt()

    def over(self, ranks: Ranks) -> None:
        """The next generation runs over these ranks."""
        for unit in self.units:
            unit.groups = groups_of(unit.module, ranks)
        self._ranks = ranks
        self._interrupt()

    def stats(self) -> Stats:
        """The statistics so far."""
        notes = (*self.notes, *(note for unit in self.units for note in sorted(unit.notes)))
        if self._autograd:
            notes += (f"{self._autograd} forwards ran with autograd on or in training mode: nothing was held",)
        return self._ledger.snapshot(notes)

    # One generation.

    def _start(self) -> None:
        self._finish()
        for unit in self.units:
            unit.groups = groups_of(unit.module, self._ranks)
        self._generation = Generation(self._methods[-1])
        self._generation.method.started()
        self._ledger.open(self._generation.stats)

    def _followed(self, stepped: Stepped) -> None:
        """The scheduler has made a step."""
        if self._generation.method.follows:
            self._generation.method.stepped(stepped)

    def _finish(self) -> None:
        """The generation is over, complete or not: let go of everything."""
        generation, self._track = self._generation, None
        if generation.close():
            generation.method.finished()
            _warn_if_inactive(generation)

    def _interrupt(self) -> None:
        """Whatever comes next belongs to another generation."""
        self._clock.stop()
        self._bare.restart()

    # One forward.

    def forward(self, unit: Unit, plain: Plain, args: Args, kwargs: Kwargs) -> Any:
        """Every forward of an enabled transformer comes here."""
        if unit.running is not None:
            return plain(*args, **kwargs)
        if torch.is_grad_enabled() or unit.core.training:
            return self._ungoverned(plain, args, kwargs)
        try:
            return self._governed(unit, plain, args, kwargs)
        except BaseException:
            self._interrupt()  # whatever was half done is not to be built on
            raise

    def _ungoverned(self, plain: Plain, args: Args, kwargs: Kwargs) -> Any:
        if not self._autograd:
            warnings.warn(
                "Autograd is on or the transformer is in training mode, so every step is computed: run it under "
                "torch.no_grad() and in eval mode to hold steps.",
                HoldoverWarning,
                stacklevel=4,
            )
        self._autograd += 1
        self._generation.drop()
        return plain(*args, **kwargs)

    def _governed(self, unit: Unit, plain: Plain, args: Args, kwargs: Kwargs) -> Any:
        arguments = unit.arguments.bind(args, kwargs)
        step, branch = self._arrive(unit, arguments)
        generation = self._generation
        watch = Stopwatch(next((t.device for t in iter_tensors(arguments)), None))
        reason = unit.family.must_compute(arguments) if generation.method.holds else ASKED.reason
        if reason is not None:
            outcome = Outcome(plain(*args, **kwargs), Decision(True, reason), None)
        else:
            visit = Visit(generation, unit, branch, step, arguments)
            self._track = visit.track
            outcome = self.crossing(unit, generation.method).run(visit.call(plain, args, kwargs))
            visit.settle(outcome)
        made = outcome.decision
        generation.note(StepRecord(unit.name, branch, step, made.compute, made.reason, watch.stop()), unit)
        return outcome.output

    def crossing(self, unit: Unit, method: Method) -> Crossing:
        """The way across one transformer, kept from generation to generation."""
        found = self._crossings.get((unit, type(method)))
        if found is None:
            found = self._crossings[unit, type(method)] = method.crossing(unit)
        return found

    def _arrive(self, unit: Unit, arguments: Kwargs) -> tuple[int, str]:
        """The step and branch of a forward; begins a generation where the step shows that one has begun."""
        self._clock.watch()
        timestep, runs_up = unit.arguments.get_timestep(arguments), unit.family.time_runs_up
        named = unit.hint.name is not None
        clues = ((), None) if named else (unit.arguments.get_conditioning(arguments), collect_host_values(arguments))
        if self._clock.running:
            step = self._clock.step(unit.hint, timestep, runs_up)
            if step < self._generation.step:
                self._start()  # the scheduler was set back by hand
        else:
            step = self._bare.step(unit.hint, timestep)
            label = self._generation.branches(unit).label(unit.hint.name, step, *clues)
            if self._generation.branches(unit).visited(label, step):
                self._bare.restart()  # the same branch at the same step again: a new generation began
                step = self._bare.step(unit.hint, timestep)
        generation = self._generation
        generation.step = step
        generation.settle_grid(unit, lambda: self._grid_from(unit, step), self.pipeline)
        branches = generation.branches(unit)
        return step, branches.arrive(branches.label(unit.hint.name, step, *clues), step)

    def _grid_from(self, unit: Unit, step: int) -> Grid:
        """The steps that run, of which this is the first: the scheduler's, or as many as someone has said."""
        if self._clock.running:
            return self._clock.grid.between(step, self._clock.grid.last)
        method = self._generation.method
        count = unit.hint.num_inference_steps or self._declared or method.declared_steps
        return Grid(count) if count else Grid.unbounded()


def _prepared(method: Method, unit: Unit, pipeline: Any) -> tuple[str, ...]:
    """What the method notes about a transformer; a signal that could not be read off it is refused."""
    notes = method.prepare(unit, pipeline)
    if method.signal(unit) not in (None, INPUT_SIGNAL) and has_fsdp_wrappers(unit.module):
        raise EnableError(
            f"The weights of this {unit.class_name} are in FullyShardedDataParallel's wrappers, outside of which the "
            "signal of its blocks cannot be read. Shard it with fully_shard, use another method, or measure "
            'coefficients for signal="input".'
        )
    return notes


def _warn_if_inactive(generation: Generation) -> None:
    visits = generation.stats.visits
    firsts = {v.transformer: v.step for v in reversed(visits)}
    later = [v for v in visits if v.step > firsts[v.transformer]]
    if len(later) > 1 and all(v.reason == NOTHING_HELD.reason for v in later):
        warnings.warn(
            "Nothing could be held: no forward of this generation belonged to the same branch as an earlier one, "
            "because its conditioning changes at every step. Name the branches with "
            "`with transformer.cache_context(name):`.",
            HoldoverWarning,
            stacklevel=2,
        )
