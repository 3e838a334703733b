"""Runs a transformer block by block: computes residuals, or holds them.

The model's own loop calls its blocks; proxies send these calls to a *pass*, which answers them in order along the
traced stack. A `ComputePass` runs every block and stores what each segment adds, a `HoldPass` adds the stored residual
where a segment starts and runs no block, a `DecidePass` reads a signal at the first block and continues as one of the
two. `BlockRunner` traces a transformer, checks that a held step replays a computed one, and chooses the pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UnsupportedModelError, UntraceableError
from ..models.inputs import ArgumentKey, bind_arguments, get_argument
from ..models.registry import BlockSignal
from ..models.trace import Stack, StreamLink, Trace
from ..policies.base import Decision
from .output import OutputRunner
from .parallel import known_to_shards
from .signals import onloaded
from .state import OTHER_PATH, ForwardCall, Outcome
from .storage import DivergedError, HeldTensors, Residuals, UnreadStream
from .verify import verify_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .install import CachedTransformer

NO_GROUPS: frozenset[int] = frozenset()
WHOLE_LOOPS: Mapping[str, int] = {}


# What the model's loop over its blocks gets in place of them


class BlockProxy:
    """A block whose calls go to a pass. Dynamo can trace it: it does not pretend to be a module."""

    def __init__(self, pass_: BlockPass, blocks: str, index: int, block: nn.Module) -> None:
        self._pass, self._blocks, self._index, self._block = pass_, blocks, index, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass.call(self._blocks, self._index, self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_pass", "_blocks", "_index", "_block"):
            raise AttributeError(name)
        return getattr(self._block, name)


class TypedBlockProxy(BlockProxy):
    """A proxy that has its block's class, for loops that test it. Dynamo would take it for a module."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self._pass.class_tested = True
        return type(self._block)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass.call(self._blocks, self._index, self._block, args, kwargs)


# Passes


class BlockPass(ABC):
    """Answers the block calls of one forward.

    A `traceable` pass may be traced into the graph of a compiled transformer, and is used again for later forwards. Its
    proxies are kept; those of other passes are not, for pass and proxies would keep each other, and what the pass saw,
    alive until the garbage collector runs.
    """

    traceable = False
    lists: frozenset[str] | None = None  # the block lists it covers; None for all
    lengths: Mapping[str, int] = {}  # after how many blocks the loop over a list ends, if before its last

    def __init__(self) -> None:
        self.class_tested = False  # whether the loop tested its blocks' class
        self.proxies: dict[tuple[str, bool], tuple[list[nn.Module], list[BlockProxy]]] = {}

    @abstractmethod
    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer one block call."""

    def finish(self) -> None:
        """The forward has returned; raises DivergedError unless it made every call."""

    def make_proxies(self, name: str, modules: list[Any], traced: bool) -> Iterable[Any]:
        """What the model's loop over a list gets: one proxy per block."""
        kind = BlockProxy if traced else TypedBlockProxy
        made = [kind(self, name, index, module) for index, module in enumerate(modules[: self.lengths.get(name)])]
        if self.traceable:
            self.proxies[name, traced] = (modules, made)
        return made

    def clone_stored(self) -> None:
        """Copy what was stored during a compiled forward: a CUDA graph reuses its memory."""


class TracePass(BlockPass):
    """Runs every block and records how the streams are connected."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.trace.run_block(blocks, index, block, args, kwargs)


@dataclass(frozen=True, slots=True)
class _Site:
    """One block call of the stack, prepared: which segments start and end there.

    A `live` call comes before everything that may be held. `edge` says that a segment starts or ends at the call, or
    that it has side outputs. `keys` are the arguments that continue as the block's outputs.
    """

    number: int
    blocks: str
    index: int
    width: int
    starts: tuple[StreamLink, ...]
    ends: tuple[StreamLink, ...]
    sides: tuple[int, ...]
    keys: tuple[ArgumentKey | None, ...]
    live: bool
    edge: bool


def _prepare_sites(stack: Stack, begin: int, unread: Collection[int]) -> tuple[_Site, ...]:
    """Every call of the stack; segments start at call `begin` or later, those of unread groups not at all."""
    started: set[int] = set()
    sites = []
    for number, call in enumerate(stack.calls):
        keys: list[ArgumentKey | None] = [None] * max(call.width, 1)
        for link in call.links:
            keys[link.slot] = link.key
        live = number < begin
        links = () if live else tuple(k for k in call.links if stack.segments[k.segment].group not in unread)
        starts = tuple(link for link in links if link.segment not in started)
        started.update(link.segment for link in starts)
        ends = tuple(link for link in links if link.closes)
        sides = () if live else call.side_outputs
        edge = bool(starts or ends or sides)
        sites.append(_Site(number, call.blocks, call.index, call.width, starts, ends, sides, tuple(keys), live, edge))
    return tuple(sites)


class StackPass(BlockPass):
    """Follows the traced stack call by call. Made once for a call structure, and reset after each forward."""

    def __init__(self, stack: Stack, begin: int = 0, unread: Collection[int] = ()) -> None:
        super().__init__()
        self.stack = stack
        self.lists = frozenset(stack.lists)
        self.position = 0
        self.leaving: dict[int, torch.Tensor] | None = None  # streams that leave each group, when a replay is checked
        self.begin = begin
        self.sites = _prepare_sites(stack, begin, unread)

    def reset(self) -> None:
        """Forget the last forward."""
        self.position, self.leaving = 0, None

    @contextmanager
    def use_once(self) -> Iterator[dict[int, torch.Tensor]]:
        """Record the streams that leave the segments of the forward inside; the pass keeps nothing afterwards."""
        leaving: dict[int, torch.Tensor] = {}
        self.leaving = leaving
        try:
            yield leaving
        finally:
            self.reset()
            self.proxies.clear()

    def next_site(self, blocks: str, index: int) -> _Site:
        """The site of the call that is made; raises where the forward takes another path."""
        if self.position < len(self.sites):
            site = self.sites[self.position]
            if site.index == index and site.blocks == blocks:
                self.position += 1
                return site
        raise DivergedError

    def finish(self) -> None:
        if self.position != len(self.sites):
            raise DivergedError

    def find_lengths(self) -> dict[str, int]:
        """After how many blocks each loop may end, because the rest of them only pass streams on."""
        calls: dict[str, list[_Site]] = {}
        for site in self.sites:
            calls.setdefault(site.blocks, []).append(site)
        return {
            name: max((s.index + 1 for s in sites if s.live or s.starts or s.sides), default=0)
            for name, sites in calls.items()
            if [site.index for site in sites] == list(range(len(sites)))
        }


class ComputePass(StackPass):
    """Runs every block and stores the residual of each segment that is read."""

    traceable = True

    def __init__(self, stack: Stack, merged: bool, begin: int = 0, unread: Collection[int] = ()) -> None:
        super().__init__(stack, begin, unread)
        self._merged = merged
        self._entering: dict[int, torch.Tensor] = {}
        self._added: list[tuple[int, torch.Tensor]] = []
        self._sides: dict[tuple[int, int], torch.Tensor] = {}

    def reset(self) -> None:
        self.position, self.leaving = 0, None
        self._entering, self._added, self._sides = {}, [], {}

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        site = self.next_site(blocks, index)
        if not site.edge:
            return block(*args, **kwargs)
        for link in site.starts:
            self._entering[link.segment] = get_argument(args, kwargs, link.key)
        output = block(*args, **kwargs)
        outputs = output if site.width else (output,)
        for link in site.ends:
            self._added.append((link.segment, outputs[link.slot] - self._entering.pop(link.segment)))
            if self.leaving is not None:
                self.leaving[self.stack.segments[link.segment].group] = outputs[link.slot]
        for slot in site.sides:
            self._sides[site.number, slot] = outputs[slot].clone()
        return output

    def clone_stored(self) -> None:
        self._added = [(segment, added.clone()) for segment, added in self._added]
        self._sides = {at: side.clone() for at, side in self._sides.items()}

    def held(self) -> HeldTensors:
        """What the blocks added, once the forward has returned."""
        residuals = Residuals(self.stack, self._merged)
        for segment, added in self._added:
            residuals.add(segment, added)
        residuals.sides.update(self._sides)
        return residuals


class HoldPass(StackPass):
    """Runs no block from `begin` on: adds the residual where a segment starts, and passes the rest through."""

    traceable = True

    def __init__(
        self, stack: Stack, begin: int = 0, unread: Collection[int] = (), lengths: Mapping[str, int] = WHOLE_LOOPS
    ) -> None:
        super().__init__(stack, begin)
        self.lengths = lengths
        self.sites = tuple(site for site in self.sites if site.index < lengths.get(site.blocks, site.index + 1))
        self._residuals: dict[int, torch.Tensor] = {}
        self._sides: dict[tuple[int, int], torch.Tensor] = {}
        self._unread = {
            number: UnreadStream.of_group(segment.group)
            for number, segment in enumerate(stack.segments)
            if segment.group in unread
        }

    def load(self, held: HeldTensors) -> None:
        """The residuals to add in the next forward."""
        assert isinstance(held, Residuals)
        self._residuals, self._sides = held.values, held.sides

    def reset(self) -> None:
        self.position, self.leaving = 0, None
        self._residuals, self._sides = {}, {}

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        site = self.next_site(blocks, index)
        if site.live:
            return block(*args, **kwargs)
        outputs: list[Any] = []
        for key in site.keys:
            outputs.append(None if key is None else args[key] if isinstance(key, int) else kwargs[key])
        if site.edge:
            for link in site.starts:
                if link.segment in self._unread:
                    outputs[link.slot] = self._unread[link.segment]
                elif link.segment in self._residuals:
                    outputs[link.slot] = outputs[link.slot] + self._residuals[link.segment]
            if self.leaving is not None:
                for link in site.ends:
                    self.leaving[self.stack.segments[link.segment].group] = outputs[link.slot]
            for slot in site.sides:
                outputs[slot] = self._sides[site.number, slot].clone()
        return tuple(outputs) if site.width else outputs[0]


class DecidePass(BlockPass):
    """Runs the blocks before the stack's first, reads a signal there, and continues as the pass that `choose` returns.

    With `read`, the signal is computed from the arguments of that block, before it runs. Without, the block runs at
    every step, and the signal is what it adds to the main stream.
    """

    def __init__(self, stack: Stack, read: BlockSignal | None, choose: Callable[[torch.Tensor], StackPass]) -> None:
        super().__init__()
        self.lists = frozenset(stack.lists)
        self._stack, self._read, self._choose, self._position = stack, read, choose, 0
        self.chosen: StackPass | None = None

    def make_proxies(self, name: str, modules: list[Any], traced: bool) -> Iterable[Any]:
        return _DecidedLoop(self, name, modules)

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.chosen is None and self._position == self._stack.head and self._read is not None:
            try:
                with onloaded(block):
                    signal = self._read(block, bind_arguments(type(block), args, kwargs))
            except (AttributeError, KeyError) as error:
                raise UnsupportedModelError(
                    f"The signal of this method cannot be read at {blocks}.{index}, a {type(block).__name__}, with "
                    "which the stack begins in this pass. Blocks before it return their streams in another order "
                    "where a guider skips them: use a method that reads nothing there, such as mag_cache."
                ) from error
            self._continue(signal)
        if self.chosen is not None:
            return self.chosen.call(blocks, index, block, args, kwargs)
        site = self._stack.calls[self._position]
        if (site.blocks, site.index) != (blocks, index):
            raise DivergedError
        output = block(*args, **kwargs)
        self._position += 1
        if self._position > self._stack.head:
            link = self._stack.find_main_link(site)
            assert link is not None
            added = (output if site.width else (output,))[link.slot] - get_argument(args, kwargs, link.key)
            self._continue(added)
        return output

    def _continue(self, signal: torch.Tensor) -> None:
        self.chosen = self._choose(signal)
        self.chosen.position = self._position

    def finish(self) -> None:
        if self.chosen is None:
            raise DivergedError
        self.chosen.finish()


@dataclass(frozen=True)
class _DecidedLoop:
    """The loop over a list that may be under way when the decision is made; it ends as the chosen pass says."""

    pass_: DecidePass
    name: str
    modules: list[Any]

    def __iter__(self) -> Iterator[Any]:
        for index, module in enumerate(self.modules):
            chosen = self.pass_.chosen
            if chosen is not None and index >= chosen.lengths.get(self.name, index + 1):
                return
            yield TypedBlockProxy(self.pass_, self.name, index, module)


class BlockPasses:
    """Makes the passes of a method. A method with a residual of its own overrides both."""

    skips_unread = True  # whether streams that nothing reads may be left out

    def compute(self, stack: Stack, merged: bool, begin: int, unread: Collection[int]) -> ComputePass:
        return ComputePass(stack, merged, begin, unread)

    def hold(self, stack: Stack, begin: int, unread: Collection[int], lengths: Mapping[str, int]) -> HoldPass:
        return HoldPass(stack, begin, unread, lengths)


# The runner


@dataclass
class CallPath:
    """The traced stack for one call structure, what its replay check has found, and the passes that are used again."""

    stack: Stack
    begin: int  # the first call that may be held
    passes: BlockPasses
    traceable: bool  # the loop only calls its blocks
    verified: bool = False
    merged: bool = False
    unread: frozenset[int] = NO_GROUPS
    lengths: Mapping[str, int] = field(default_factory=dict)
    compute_passes: dict[tuple[bool, frozenset[int]], ComputePass] = field(default_factory=dict)
    hold_passes: dict[bool, HoldPass] = field(default_factory=dict)

    def make_compute_pass(self, unread: frozenset[int]) -> ComputePass:
        """A pass that computes."""
        pass_ = self.passes.compute(self.stack, self.merged, self.begin, unread)
        if pass_.traceable:
            self.compute_passes[self.merged, unread] = pass_
        return pass_

    def make_hold_pass(self, whole: bool) -> HoldPass:
        """A pass that holds; the `whole` way is without what a held step may leave out."""
        unread, lengths = (NO_GROUPS, WHOLE_LOOPS) if whole else (self.unread, self.lengths)
        pass_ = self.passes.hold(self.stack, self.begin, unread, lengths)
        if pass_.traceable:
            self.hold_passes[whole] = pass_
        return pass_


class _SignalReadError(Exception):
    """Ends a forward at the stack's first block, once its signal is read."""


class BlockRunner:
    """Runs one transformer block by block; its stack is traced at the first forward of each call structure."""

    def __init__(self, transformer: CachedTransformer) -> None:
        self._transformer = transformer
        self._whole: OutputRunner | None = None if transformer.lists else OutputRunner(transformer)

    def run(self, call: ForwardCall) -> Outcome:
        """Run one forward; where no stack can be traced, the transformer's output is held instead."""
        if self._whole is not None:
            return self._whole.run(call)
        if any(isinstance(value, (list, tuple, dict)) for value in (*call.args, *call.kwargs.values())):
            call.keep_inputs()
        reads_residual = None if call.signal is None else call.signal.of_residual is not None
        structure, groups = (call.structure, reads_residual, call.state.passes), self._transformer.groups
        path = self._transformer.paths.get(structure)
        try:
            if path is None or groups.shards is not None:
                known = known_to_shards(groups, path is not None)  # every rank that shares the weights traces, or none
                path = path if known and path is not None else self._trace(call, structure)
            try:
                return self._follow(call, path)
            except DivergedError:
                pass
            try:
                path = self._trace(call, structure)
                call.restore_inputs()
                return self._follow(call, path, OTHER_PATH)
            except DivergedError:
                raise UnsupportedModelError(
                    f"{self._transformer.class_name} calls other blocks each time it gets the same input, or keeps "
                    "what its modules return from one forward to the next: its steps cannot be held."
                ) from None
        except UntraceableError:
            self._whole = OutputRunner(self._transformer)
            return self._whole.run(call)

    def find_path(self, call: ForwardCall) -> CallPath:
        """Trace and check the stack of a forward, for a caller that follows it with passes of its own."""
        call.keep_inputs()
        path = self._trace(call, call.structure)
        self._verify(call, path, self._transformer.eager_call(call.plain))
        return path

    def _follow(self, call: ForwardCall, path: CallPath, decided: Decision | None = None) -> Outcome:
        """Compute or hold along the traced stack, as the policy decides; computed if that is decided already."""
        transformer = self._transformer
        unread = NO_GROUPS if transformer.compiled else path.unread
        decisions: list[tuple[Decision, StackPass]] = []

        def choose(signal: torch.Tensor | None) -> StackPass:
            decision = decided or call.decide(signal)
            pass_: StackPass
            if decision.compute:
                pass_ = path.compute_passes.get((path.merged, unread)) or path.make_compute_pass(unread)
            else:
                whole = transformer.compiled
                pass_ = hold = path.hold_passes.get(whole) or path.make_hold_pass(whole)
                hold.load(call.state.predict(call.step))
            pass_.leaving = None if path.verified or transformer.compiled else {}
            decisions.append((decision, pass_))
            return pass_

        try:
            at_once = call.signal is None or decided is not None
            first: BlockPass = choose(None) if at_once else self._read_signal(call, path.stack, choose)
            plain = call.plain if path.traceable else transformer.eager_call(call.plain)
            output = transformer.run(first, plain, call.args, call.kwargs)
            first.finish()
            decision, pass_ = decisions[-1]
            held = self._keep(call, path, output, pass_) if isinstance(pass_, ComputePass) else None
            return Outcome(output, decision, held)
        finally:
            for _, pass_ in decisions:
                pass_.reset()

    def _read_signal(
        self, call: ForwardCall, stack: Stack, choose: Callable[[torch.Tensor | None], StackPass]
    ) -> BlockPass:
        """A pass that reads the signal at the stack's first block and continues as the policy decides.

        A compiled forward cannot wait for a decision in its middle: it is run uncompiled up to that block first.
        """
        assert call.signal is not None
        of_residual, decided = call.signal.of_residual, choose(None) if call.reads_late else None

        def choose_at_first_block(value: torch.Tensor) -> StackPass:
            signal = value if of_residual is None else of_residual(value)
            if decided is None:
                return choose(signal)
            call.observe_signal(signal)
            return decided

        if not self._transformer.compiled:
            return DecidePass(stack, call.signal.of_block, choose_at_first_block)
        chosen: list[StackPass] = []

        def stop_at_first_block(value: torch.Tensor) -> StackPass:
            chosen.append(choose_at_first_block(value))
            raise _SignalReadError

        try:
            eager = self._transformer.call_eager
            pass_ = DecidePass(stack, call.signal.of_block, stop_at_first_block)
            call.repeat(partial(self._transformer.run, pass_, eager))
        except _SignalReadError:
            return chosen[0]
        raise DivergedError

    def _trace(self, call: ForwardCall, structure: Any) -> CallPath:
        """Trace one forward; its result is dropped, so that the next one runs as every later one."""
        pass_, plain = TracePass(), self._transformer.eager_call(call.plain)
        call.repeat(partial(self._transformer.run, pass_, plain))
        stack = pass_.trace.build_stack(self._transformer.family.head)
        begin = 0 if call.signal is None else stack.head if call.signal.of_residual is None else stack.head + 1
        if begin >= len(stack.calls):
            raise UnsupportedModelError(
                f"{self._transformer.class_name} has a single block, and this method runs the first one at every step: "
                "there is nothing to hold. Use a method that holds the output, such as easy_cache or spectrum."
            )
        path = self._transformer.paths[structure] = CallPath(stack, begin, call.state.passes, not pass_.class_tested)
        return path

    def _keep(self, call: ForwardCall, path: CallPath, output: Any, pass_: ComputePass) -> HeldTensors:
        """What a computed forward leaves to be held; on a new path, in the form in which it replays."""
        held = pass_.held()
        if path.verified:
            return held
        if not self._transformer.compiled:
            return verify_path(self._transformer, call, path, (output, pass_.leaving), held)
        self._verify(call, path, self._transformer.call_eager)
        return held.merge() if path.merged and isinstance(held, Residuals) else held

    def _verify(self, call: ForwardCall, path: CallPath, plain: Callable[..., Any]) -> None:
        """Compute a step in an extra forward, and check that it replays."""
        pass_ = path.passes.compute(path.stack, False, path.begin, NO_GROUPS)
        with pass_.use_once() as leaving:
            output = call.repeat(partial(self._transformer.run, pass_, plain))
            verify_path(self._transformer, call, path, (output, leaving), pass_.held())
