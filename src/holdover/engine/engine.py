"""Runs one cache: every forward of an enabled transformer comes to `Engine.forward`.

It finds the step and the branch of the forward, asks the method's policy whether to compute or hold, lets a runner do
it, and records what happened. State is made when a generation starts and dropped when it ends.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import EnableError, HoldoverWarning
from ..grid import Grid
from ..models.inputs import collect_host_values, describe_structure, has_fsdp_wrappers, unwrap_module
from ..models.pipelines import list_transformers
from ..models.registry import INPUT_SIGNAL
from ..policies.base import ALWAYS, NOTHING_HELD, Decision
from ..stats import GenerationStats, Ledger, Stats, StepRecord
from .branches import OTHER_CONDITIONING, OTHER_LOOP, Branches, PipelineGuiders
from .clock import SchedulerClock, SchedulerStep, TimestepClock
from .install import CachedTransformer, ContextHint, Overrides, refuse_other_caches
from .method import Method, Runner
from .parallel import Ranks, find_groups, known_to_shards
from .state import BranchState, ForwardCall, Generation, elapsed_seconds, mark_time


class Engine:
    """One enabled cache on one pipeline or transformer. `owner` is the backend the user holds."""

    def __init__(self, pipeline: Any, modules: Mapping[str, nn.Module], method: Method[Any], owner: Any = None) -> None:
        self.pipeline = pipeline
        self.owner = owner
        self.transformers: list[CachedTransformer] = []
        for name, module in modules.items():
            if all(module is not other.module for other in self.transformers):  # one module may have two names
                self.transformers.append(CachedTransformer(name, module))
        cached = [transformer.core for transformer in self.transformers]
        others = (unwrap_module(module) for module in self._pipeline_transformers().values())
        self._left_out = weakref.WeakSet(other for other in others if other not in cached)  # on purpose
        self._methods = [method]
        self.notes = self._prepare(method)
        self._runners: dict[tuple[CachedTransformer, type[Method[Any]]], Runner] = {}
        self._overrides = Overrides()
        self._clock = SchedulerClock(pipeline, self._start_scheduled, self._on_scheduler_step, self._finish)
        self._guiders = PipelineGuiders(pipeline, self.transformers)
        self._timestep_clock = TimestepClock(self._start, any(t.family.time_runs_up for t in self.transformers))
        self._ledger = Ledger(method.name)
        self._ranks: Ranks | None = None
        self._declared_steps: int | None = None
        self._uncached_forwards = 0
        self._warned_of_few_steps = self._warned_of_unknown_steps = False
        self._generation = Generation(method)
        self.branch_state: BranchState | None = None  # of the branch that runs or ran last
        self.lock = threading.RLock()  # two pipelines that share a transformer may run in two threads

    @property
    def method(self) -> Method[Any]:
        """The method of the generations that start now."""
        return self._methods[-1]

    def install(self) -> None:
        """Put the cache on every instance, or on none."""
        try:
            for transformer in self.transformers:
                transformer.install(self._overrides, self)
            self._clock.watch()
            self._guiders.watch()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Take the cache off: every object is what it was."""
        try:
            self._overrides.restore()
        finally:
            self._clock.unwatch()
            self._guiders.unwatch()
            self._finish()

    def refresh(self, num_inference_steps: int | None) -> None:
        """The next forward starts a generation of that many steps, unless a scheduler says otherwise."""
        self.check_transformers()
        self._declared_steps = num_inference_steps
        self._interrupt()

    @contextmanager
    def use(self, method: Method[Any]) -> Iterator[None]:
        """Use another method for the generations that start inside."""
        self._prepare(method)
        self._methods.append(method)
        self._interrupt()
        try:
            yield
        finally:
            self._methods.pop()
            self._interrupt()

    def set_ranks(self, ranks: Ranks) -> None:
        """The groups of ranks that the next generation runs over."""
        for transformer in self.transformers:
            find_groups(transformer.module, ranks)  # raises where they contradict the transformer
        self._ranks = ranks
        self._interrupt()

    def stats(self) -> Stats:
        """The statistics so far."""
        notes = (*self.notes, *(note for t in self.transformers for note in sorted(t.notes)))
        if self._uncached_forwards:
            notes += (f"{self._uncached_forwards} forwards ran with autograd on or in training mode: nothing was held",)
        return self._ledger.snapshot(notes)

    def _prepare(self, method: Method[Any]) -> tuple[str, ...]:
        """The method's notes about each transformer; raises where its signal could not be read."""
        notes: list[str] = []
        for transformer in self.transformers:
            if method.holds:
                refuse_other_caches(transformer.core)
            notes += method.prepare(transformer, self.pipeline)
            signal = method.signal(transformer)
            reads_weights = signal is not None and (signal.of_block is not None or signal.of_time is not None)
            if reads_weights and signal != INPUT_SIGNAL and has_fsdp_wrappers(transformer.module):
                raise EnableError(
                    f"The weights of this {transformer.class_name} are in FullyShardedDataParallel's wrappers, outside "
                    "of which the signal of its blocks cannot be read. Shard it with fully_shard, use another method, "
                    'or measure coefficients for signal="input".'
                )
        return tuple(notes)

    # One forward

    def forward(
        self, transformer: CachedTransformer, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one forward of a transformer, computed or held."""
        if transformer.running is not None:
            return plain(*args, **kwargs)  # a forward inside a forward
        if torch.is_grad_enabled() or transformer.core.training:
            return self._run_uncached(plain, args, kwargs)
        try:
            arguments = transformer.inputs.bind(args, kwargs) if args else kwargs
            name = transformer.inputs.timestep_name
            timestep = None if name is None else arguments.get(name)
            tensors: list[torch.Tensor] = []
            signature = (describe_structure(arguments, tensors), [(t.shape, t.dtype, t.device) for t in tensors])
            device = tensors[0].device if tensors else None
            step, branch = self._locate(transformer, arguments, timestep)
            generation = self._generation
            method = generation.method
            begin = mark_time(device)
            reason = None if method.holds else ALWAYS.reason
            if method.holds and transformer.family.must_compute is not None:
                reason = transformer.family.must_compute(arguments)
            if method.needs_steps and not generation.grids[transformer].bounded:
                reason = reason or "the number of steps is not known"
            if reason is not None:
                output, decision = plain(*args, **kwargs), Decision(True, reason)
            else:
                state = generation.states.get((transformer, branch)) or generation.add_branch(transformer, branch)
                self.branch_state = state
                latents = arguments.get(transformer.inputs.latents_name)
                hint = transformer.context.hint
                must_move = self._clock.running and hint.step_index is None
                conditioning = functools.partial(transformer.inputs.get_conditioning, arguments) if hint.name else None
                change = state.inputs.compare(signature, tensors, latents, timestep, must_move, conditioning)
                if step == generation.taken_over_at:
                    change = change or OTHER_LOOP
                if transformer.groups.shards is not None and not known_to_shards(transformer.groups, change is None):
                    change = change or OTHER_CONDITIONING  # ranks that share the weights compute together
                if change is not None:
                    state.forget()
                runner = self._runners.get((transformer, type(method)))
                if runner is None:
                    runner = self._runners[transformer, type(method)] = method.make_runner(transformer)
                structure = (signature[0], hint.variant) if hint.variant else signature[0]
                call = ForwardCall(
                    generation, transformer, branch, step, state, plain, args, kwargs, structure, timestep, change
                )
                if state.policy.needs_signal and (signal := method.signal(transformer)) is not None:
                    call.prepare_signal(signal)
                outcome = runner.run(call)
                call.record(outcome)
                output, decision = outcome.output, outcome.decision
            seconds = functools.partial(elapsed_seconds, begin, mark_time(device))
            record = StepRecord(transformer.name, branch, step, decision.compute, decision.reason, seconds)
            generation.stats.forwards.append(record)
            if step >= generation.grids[transformer].count - 1:
                generation.stats.finished = True
            return output
        except BaseException:
            self._interrupt()  # nothing may build on a forward that failed half-way
            raise

    def _run_uncached(self, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._uncached_forwards:
            warnings.warn(
                "Autograd is on or the transformer is in training mode, so every step is computed: run it under "
                "torch.no_grad() and in eval mode to hold steps.",
                HoldoverWarning,
                stacklevel=4,
            )
        self._uncached_forwards += 1
        self._generation.drop()
        return plain(*args, **kwargs)

    def _warn_of_few_steps(self, method: Method[Any], steps: int) -> None:
        """Say once that a generation is too short to gain from a method that holds steps and does not measure."""
        if steps >= method.least_steps or self._warned_of_few_steps or not method.holds or method.observes:
            return
        self._warned_of_few_steps = True
        warnings.warn(
            f"With {steps} steps there is little to hold: below {method.least_steps} steps {method.name} gains nothing "
            "over fewer steps without a cache. Run models that are distilled to a few steps without one.",
            HoldoverWarning,
            stacklevel=5,
        )

    def _locate(self, transformer: CachedTransformer, arguments: Mapping[str, Any], timestep: Any) -> tuple[int, str]:
        """The step and branch of a forward; starts a generation where the step shows that one has started."""
        if self.pipeline is not None:
            self._clock.watch()
            self._guiders.watch()
        hint, label = transformer.context.hint, transformer.context.hint.name
        conditioning: tuple[torch.Tensor, ...] = ()
        host_values = None
        if hint.name is None:
            conditioning, host_values = transformer.inputs.get_conditioning(arguments), collect_host_values(arguments)
        if self._clock.running:
            runs_up = transformer.family.time_runs_up
            taken_over = self._clock.stepped and self._clock.has_lost_its_loop(timestep, runs_up)
            step = self._clock.step(hint, timestep, runs_up)
            if step < self._generation.step or (self._clock.stepped and hint.step_index == self._generation.step):
                self._start()  # the scheduler was set back by hand, or another pipeline runs
            self._clock.stepped = False
            if taken_over:
                self._generation.taken_over_at = step
        else:
            step = self._timestep_clock.step(hint, timestep)
            branches = self._generation.branches.get(transformer)
            if branches is not None:
                label = label or branches.find(step, conditioning, host_values)
                last = branches.last_step.get(label, -1)
                if transformer.family.one_forward_per_step and last + 1 < (self._declared_steps or 0):
                    step = last + 1
                elif last >= step and not self._timestep_clock.continues:  # a new generation
                    self._timestep_clock.restart()
                    step, label = self._timestep_clock.step(hint, timestep), hint.name
        generation = self._generation
        if transformer not in generation.grids:
            if generation.method.holds:
                refuse_other_caches(transformer.core)
            grid = self._steps_from(transformer, step, timestep)
            if grid.bounded and generation.stats.steps is None:
                generation.stats.steps = grid.length
                self._warn_of_few_steps(generation.method, grid.length)
            generation.grids[transformer] = transformer.family.range_of(self.pipeline, transformer.module, grid)
        branches = generation.branches.get(transformer)
        if branches is None:
            branches = generation.branches[transformer] = Branches(transformer.groups.cfg_rank)
        label = label or branches.find(step, conditioning, host_values)
        if branches.last_step.get(label) == step and self._clock.running:
            step = self._follow_timestep(step, hint, branches.last_timestep[label], timestep)
        if branches.last_step.get(label) == step:
            label = branches.name_repetition(label, step)
        branches.last_step[label], branches.last_timestep[label] = step, timestep
        generation.step = step
        return step, label

    def _follow_timestep(self, step: int, hint: ContextHint, before: Any, timestep: Any) -> int:
        """The step of a branch that runs twice while the scheduler stays where it is.

        If the timestep has moved, the loop does not step this scheduler: inversion and flow editing update the latents
        themselves, and another pipeline may run on the transformer of one that was interrupted.
        """
        if hint.step_index is not None or before is None or timestep is None:
            return step
        self._timestep_clock.continue_from(step)
        self._timestep_clock.step(hint, before)
        moved = self._timestep_clock.step(hint, timestep)
        if moved == step:
            self._timestep_clock.reset()
        else:
            self._clock.leave_to_timesteps()
        return moved

    def _steps_from(self, transformer: CachedTransformer, step: int, timestep: Any) -> Grid:
        """The steps that run, of which this is the first: the scheduler's, or as many as were declared."""
        if self._clock.running:
            return self._clock.grid.between(step, self._clock.grid.last)
        method = self._generation.method
        count = transformer.context.hint.num_inference_steps or self._declared_steps or method.declared_steps
        if count:
            return Grid(count)
        if self._clock.begins_again(timestep, transformer.family.time_runs_up):
            return self._clock.grid
        if method.needs_steps and not self._warned_of_unknown_steps:
            self._warned_of_unknown_steps = True
            warnings.warn(
                f"{method.name} needs the number of steps, which nothing tells here, so every step is computed: call "
                "cache.refresh(transformer, num_inference_steps) before the loop, or enable it on the pipeline.",
                HoldoverWarning,
                stacklevel=5,
            )
        return Grid.unbounded()

    # One generation

    def _start_scheduled(self) -> None:
        """The scheduler starts a generation."""
        self.check_transformers()
        self._guiders.start()
        self._start()

    def check_transformers(self) -> None:
        """Raise if the pipeline has got another transformer since: it would run without the cache."""
        known = [*(transformer.core for transformer in self.transformers), *self._left_out]
        for name, module in self._pipeline_transformers().items():
            if unwrap_module(module) not in known:
                how = "replaced" if any(transformer.name == name for transformer in self.transformers) else "loaded"
                raise EnableError(
                    f"{type(self.pipeline).__name__}.{name} was {how} after the cache was enabled, so it would run "
                    "without it: disable() the cache and enable it again."
                )

    def _pipeline_transformers(self) -> dict[str, nn.Module]:
        return {} if self.pipeline is None else list_transformers(self.pipeline)

    def _start(self) -> None:
        with self.lock:
            self._finish()
            self._timestep_clock.reset()
            for transformer in self.transformers:
                groups = find_groups(transformer.module, self._ranks)
                if groups != transformer.groups:
                    transformer.groups = groups
                    transformer.paths.clear()
            self._generation = Generation(self.method)
            self._generation.method.on_start(self._generation.stats)
            self._ledger.open(self._generation.stats)

    def _on_scheduler_step(self, step: SchedulerStep) -> None:
        if self._generation.stats.forwards and self._generation.method.follows:
            self._generation.method.on_scheduler_step(step)

    def _finish(self) -> None:
        """The generation is over, complete or not: release everything."""
        with self.lock:
            generation, self.branch_state = self._generation, None
            generation.drop()
        if generation.open and generation.stats.forwards:
            generation.method.on_end()
            if is_inactive(generation.stats):
                warnings.warn(
                    "Nothing could be held: no forward of this generation belonged to the same branch as an earlier "
                    "one, because its conditioning changes at every step. Name the branches with "
                    "`with transformer.cache_context(name):`.",
                    HoldoverWarning,
                    stacklevel=2,
                )
        generation.open = False

    def _interrupt(self) -> None:
        """The next forward belongs to another generation."""
        self._clock.running = False
        self._timestep_clock.restart()


def is_inactive(generation: GenerationStats) -> bool:
    """Whether no forward of a generation found anything to hold after its transformer's first step."""
    first_steps = {f.transformer: f.step for f in reversed(generation.forwards)}
    later = [f for f in generation.forwards if f.step > first_steps[f.transformer]]
    return len(later) > 1 and all(f.reason == NOTHING_HELD.reason for f in later)
