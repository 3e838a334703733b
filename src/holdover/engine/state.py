"""What is remembered in one generation: per branch, the policy's state and the held tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import UnsupportedModelError
from ..grid import Grid
from ..models.inputs import copy_containers, iter_tensors
from ..models.registry import Signal
from ..policies.base import NOTHING_HELD, Decision, Policy
from ..predictors import Hold, Predictor
from ..stats import GenerationStats
from .branches import MAX_BRANCHES, Branches, BranchInputs
from .clock import noisiest
from .signals import SignalReading, compute_changes, read_time_signal
from .storage import ON_DEVICE, HeldTensors, RecentDict, Storage

if TYPE_CHECKING:
    from .blocks import BlockPasses
    from .install import CachedTransformer
    from .method import Method

OTHER_PATH = Decision(True, "the forward took another path than before")
HOLD = Hold()


class Outcome(NamedTuple):
    """How a forward went: its output, what was decided, and the tensors to hold if it was computed."""

    output: Any
    decision: Decision
    held: HeldTensors | None


@dataclass
class BranchState:
    """One branch of one transformer in one generation."""

    policy: Policy
    policy_state: Any
    passes: BlockPasses  # how the blocks are run and held
    predictor: Predictor = HOLD
    storage: Storage = ON_DEVICE
    inputs: BranchInputs = field(default_factory=BranchInputs)
    signal: SignalReading | None = None
    last_step: int | None = None
    anchors: list[int] = field(default_factory=list)  # computed steps that are held
    held: list[HeldTensors] = field(default_factory=list)

    def forget(self) -> None:
        """Drop everything that is held."""
        self.anchors.clear()
        self.held.clear()
        self.signal = None
        self.policy_state.anchor = None

    def store(self, step: int, held: HeldTensors) -> None:
        """Hold a computed step, and no more steps than the predictor needs."""
        if self.held and not held.is_compatible(self.held[-1]):
            self.anchors.clear()
            self.held.clear()
        self.anchors.append(step)
        self.held.append(held if self.storage is ON_DEVICE else held.map(self.storage.store))
        depth = self.predictor.depth
        del self.anchors[:-depth], self.held[:-depth]

    def predict(self, step: int) -> HeldTensors:
        """What a held step adds, or returns: a weighted sum of the computed steps."""
        if not self.held:
            raise RuntimeError("The policy holds a step before any was computed.")
        held = self.held if self.storage is ON_DEVICE else [h.map(self.storage.load) for h in self.held]
        if self.predictor is HOLD:
            return held[-1]
        weights = self.predictor.weights(step, self.anchors)
        if weights[-1] == 1.0 and not any(weights[:-1]):
            return held[-1]
        return held[-1].weighted_sum([(w, h) for w, h in zip(weights, held, strict=True) if w])

    @property
    def nbytes(self) -> int:
        return (0 if self.signal is None else self.signal.nbytes) + sum(held.nbytes for held in self.held)


class Generation:
    """One run of the denoising loop."""

    def __init__(self, method: Method[Any]) -> None:
        self.method = method
        self.stats = GenerationStats(method.name, method.config.as_dict())
        self.step = -1
        self.taken_over_at: int | None = None  # the step from which on another loop runs
        self.open = True
        self.grids: dict[CachedTransformer, Grid] = {}  # the steps each transformer handles
        self.branches: dict[CachedTransformer, Branches] = {}
        self.states: RecentDict[tuple[CachedTransformer, str], BranchState] = RecentDict(MAX_BRANCHES)
        self.known_changes: dict[CachedTransformer, tuple[float, ...] | None] = {}

    def add_branch(self, transformer: CachedTransformer, branch: str) -> BranchState:
        """The state of a branch that runs for the first time."""
        grid, method = self.grids[transformer], self.method
        policy = method.policy(transformer, branch, grid)
        self.stats.notes = method.generation_notes
        passes, predictor = method.block_passes(transformer), method.predictor(transformer, branch, grid)
        state = BranchState(policy, policy.start(), passes, predictor, method.storage)
        self.states[transformer, branch] = state
        return state

    def drop(self) -> None:
        """Release every tensor."""
        self.states.clear()
        self.branches.clear()
        self.known_changes.clear()

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())


@dataclass(slots=True)
class ForwardCall:
    """One forward of one branch at one step, with the questions a runner asks about it.

    `signal` is the policy's signal if it is read at the stack's first block; None where the policy needs none, or where
    the signal depends on the inputs alone.
    """

    generation: Generation
    transformer: CachedTransformer
    branch: str
    step: int
    state: BranchState
    plain: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    structure: Any
    timestep: Any
    change_of_inputs: Decision | None = None  # why the branch was forgotten before this forward
    signal: Signal | None = None
    reads_late: bool = False  # decide before the signal of this step is read
    change: float | None = None
    _signal: Signal | None = None
    _known: tuple[float, ...] | None = None
    _kept: tuple[Sequence[Any], Mapping[str, Any]] | None = None

    def keep_inputs(self) -> None:
        """Keep the contents of lists and dicts among the inputs: some models empty those they are given."""
        self._kept = copy_containers((tuple(self.args), dict(self.kwargs)))

    def restore_inputs(self) -> None:
        """Run the forward again on the inputs as they were before it."""
        if self._kept is not None:
            self.args, self.kwargs = copy_containers(self._kept)

    def repeat(self, run: Callable[[Sequence[Any], Mapping[str, Any]], Any]) -> Any:
        """Run an extra forward on the inputs as they were before the first, to trace or to check the model."""
        args, kwargs = copy_containers(self._kept) if self._kept is not None else (self.args, self.kwargs)
        tensors = [t for t in iter_tensors([args, kwargs]) if not t.is_inference()]
        versions = [tensor._version for tensor in tensors]
        output = run(args, kwargs)
        if [tensor._version for tensor in tensors] != versions:
            raise UnsupportedModelError(
                f"{self.transformer.class_name} writes to its input tensors, so it cannot run once more to be traced "
                "and checked. Let its forward work on copies."
            )
        return output

    def prepare_signal(self, signal: Signal) -> None:
        """Find out how this call learns the change of the policy's signal."""
        self._signal = signal
        if signal.of_time is not None:
            known, transformer = self.generation.known_changes, self.transformer
            if transformer not in known:
                grid = self.generation.grids[transformer]
                known[transformer] = compute_changes(transformer, signal.of_time, grid, self.step, self.timestep)
            self._known = known[transformer]
        self.signal = None if signal.of_block is None and signal.of_residual is None else signal
        self.reads_late = self.generation.method.reads_late and self._known is None

    def decide(self, signal: torch.Tensor | None) -> Decision:
        """Ask the policy, given the signal where it was read."""
        state = self.state
        before = state.signal
        if self._signal is not None:
            self.change = self._signal_change(signal)
        decision = state.policy.decide(self.step, self.change, state.policy_state)
        if not decision.compute and self.generation.method.compares_computed:
            state.signal = before
        return self.change_of_inputs or decision if decision is NOTHING_HELD else decision

    def _signal_change(self, signal: torch.Tensor | None) -> float | None:
        """How much the signal has changed since this branch's last step."""
        state = self.state
        if self._known is not None:
            return None if state.last_step is None else sum(self._known[state.last_step + 1 : self.step + 1])
        kind = self._signal
        assert kind is not None
        if kind.of_input is not None:
            signal = kind.of_input(self.transformer.inputs.bind(self.args, self.kwargs), self.noise)
        elif signal is None and kind.of_time is not None:
            signal = read_time_signal(self.transformer, kind.of_time, self.timestep)
        if self.reads_late:  # the change at the last step if that was computed: reading it overlaps with its blocks
            computed = state.signal is not None and state.policy_state.anchor == state.last_step
            change = state.signal.change() if state.signal is not None and computed else None
            if signal is not None:
                self.observe_signal(signal)
            return change
        if signal is None:
            return None
        self.observe_signal(signal)
        return None if state.signal is None else state.signal.change()

    def observe_signal(self, signal: torch.Tensor) -> None:
        """Keep the signal of this step and start to read its change."""
        self.state.signal = self.generation.method.read_signal(signal, self.state, self.transformer.groups)

    @property
    def noise(self) -> float:
        """The noise level of this step, where 1 is pure noise: the scheduler's, or without one the timestep's."""
        grid, runs_up = self.generation.grids[self.transformer], self.transformer.family.time_runs_up
        if self.step < len(grid.noise):  # more steps run where another pipeline goes on after a stopped one
            counts_up = grid.noise[0] < grid.noise[-1]  # a few schedulers do
            return 1.0 - grid.noise[self.step] if counts_up else grid.noise[self.step]
        time = noisiest(self.timestep, runs_up)
        if time is None:
            return 1.0 - self.step / grid.count
        time = time if time <= 1.0 else time / 1000.0
        return 1.0 - time if runs_up else time

    def record(self, outcome: Outcome) -> None:
        """Store what was computed, and release what no later step needs."""
        state, generation, method = self.state, self.generation, self.generation.method
        grid = generation.grids[self.transformer]
        state.last_step = self.step
        if outcome.decision is OTHER_PATH:  # computed although the policy may have held it: start again from here
            state.policy_state = state.policy.start()
            state.policy_state.anchor = self.step
        if outcome.held is not None:
            state.store(self.step, outcome.held)
            generation.stats.peak_bytes = max(generation.stats.peak_bytes, generation.nbytes)
            if method.observes:
                method.observe(
                    ComputedForward(
                        self.transformer, self.branch, self.step, grid, self.change, outcome.held.main, outcome.output
                    )
                )
        if self.step >= grid.last:
            state.forget()


@dataclass(frozen=True, slots=True)
class ComputedForward:
    """What a method may look at after a computed forward."""

    transformer: CachedTransformer
    branch: str
    step: int
    grid: Grid
    change: float | None
    residual: tuple[torch.Tensor, ...]
    output: Any


def mark_time(device: torch.device | None) -> Any:
    """A point in time: an event on CUDA, so that nothing waits for the device; the host's clock elsewhere."""
    if device is None or device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def elapsed_seconds(begin: Any, end: Any) -> float:
    """The seconds between two marks; waits for the device if it must."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
