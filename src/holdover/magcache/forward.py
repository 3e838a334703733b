"""One forward of the hooked blocks: recorded the first time, computed or held along a known stack from then on.

The block passes are the engine's. What differs is who calls them: not proxies in the model's loop over its blocks, but
the hooks on the blocks themselves. Where the transformer has a hook too, an engine in it finds the stack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ..engine.blocks import BlockPasses, BlockRunner, ComputePass, HoldPass
from ..engine.engine import Engine
from ..engine.hooks import BranchStateManager, CacheHook, forget_child_registries, register_hook
from ..engine.install import CachedTransformer
from ..engine.method import Method
from ..engine.state import ForwardCall, Outcome
from ..engine.storage import HeldTensors, HeldTuple, Residuals
from ..errors import UnsupportedModelError
from ..grid import Grid
from ..models.inputs import ArgumentKey, iter_tensors, unwrap_module
from ..models.trace import Stack, Trace, find_block_lists, get_version
from ..policies.base import Decision, Policy
from .config import MagCacheConfig
from .state import MagCacheState

if TYPE_CHECKING:
    from .hook import MagCacheHeadHook, MagCacheHook
    from .strategy import MagCacheStrategy

OTHER_ORDER = (
    "The model calls other blocks than before, which hooks on blocks cannot follow. "
    'Use holdover.enable(transformer, "mag_cache").'
)


@dataclass(frozen=True)
class HookedStack:
    """The stack that the hooked blocks make, with the hook of each call; `merged` as in the engine's residuals."""

    stack: Stack
    hooks: tuple[MagCacheHook, ...]
    merged: bool = False


class HookedForward(ABC):
    """One forward of the hooked blocks, from the head to the tail."""

    @abstractmethod
    def call(self, hook: MagCacheHook, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer the call of one block."""

    @property
    def complete(self) -> bool:
        """Whether the tail, which was just called, ends the forward."""
        return True

    @abstractmethod
    def finish(self, state: MagCacheState) -> HeldTensors:
        """What the blocks added, after a computed forward."""


class RecordingForward(HookedForward):
    """The first forward of hooks that know nothing but their blocks: finds the stack and what its segments added."""

    def __init__(self, strategy: MagCacheStrategy | None) -> None:
        self._strategy = strategy
        self._trace = RecordingTrace()
        self._hooks: list[MagCacheHook] = []
        self._output: Any = None

    def call(self, hook: MagCacheHook, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._hooks.append(hook)
        self._output = self._trace.run_block(type(block).__name__, len(self._hooks) - 1, block, args, kwargs)
        return self._output

    def finish(self, state: MagCacheState) -> HeldTensors:
        stack = self._trace.build_stack()
        self._check(stack)
        state.stack = HookedStack(stack, tuple(self._hooks[call.index] for call in stack.calls))
        if self._strategy is not None and state.head_block_input is not None:
            residual = self._strategy.compute_residual(self._output, state.head_block_input)
            return HeldTuple(residual if isinstance(residual, tuple) else (residual,))
        return self._trace.compute_residuals(stack)

    def _check(self, stack: Stack) -> None:
        """Raise where what the model does between two blocks could be counted twice, which no hook on a block sees."""
        count = Counter(segment.group for segment in stack.segments)
        changed = {number for number, segment in enumerate(stack.segments) if count[segment.group] > 1}
        links = [(call.blocks, link.segment) for call in stack.calls for link in call.links]
        if any(segment in changed and stack.segments[segment].blocks != blocks for blocks, segment in links):
            reason = "calls blocks of several kinds in turn"
        elif changed and self._strategy is not None:
            reason = f"has a {type(self._strategy).__name__} for the blocks as a whole"
        else:
            return
        raise UnsupportedModelError(
            f"The model changes a stream between its blocks and {reason} ({stack}), which hooks on blocks alone cannot "
            'check. Use apply_mag_cache_hook or holdover.enable(transformer, "mag_cache").'
        )


class RecordingTrace(Trace):
    """A trace that keeps copies of the tensors at which a segment starts or ends: the model may write to its own."""

    def __init__(self) -> None:
        super().__init__()
        self._entering: dict[tuple[int, ArgumentKey], torch.Tensor] = {}
        self._leaving: dict[tuple[int, int], torch.Tensor] = {}

    def run_block(
        self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        values: dict[ArgumentKey, Any] = dict(enumerate(args)) | dict(kwargs)
        before = _list_versions(values)
        output = super().run_block(blocks, index, block, args, kwargs)
        if _list_versions(values) != before:
            raise UnsupportedModelError(
                f"{type(block).__name__} writes to its arguments, which a held step would leave out. "
                'Use apply_mag_cache_hook or holdover.enable(transformer, "mag_cache"), which know such passes.'
            )
        call = self._calls[index]
        for key in call.inputs:
            source = call.sources.get(key)
            if source is None and call.inputs[key] in call.outputs:
                self._entering[index, key] = values[key].clone()
            elif source is not None and call.inputs[key] in call.outputs[source[1] : source[1] + 1]:
                self._leaving.pop(source, None)  # the stream goes on through this block
        for slot, value in enumerate(self._lists[blocks].last_outputs):
            if value is not None:
                self._leaving[index, slot] = value.clone()
        return output

    def compute_residuals(self, stack: Stack) -> Residuals:
        """What the segments of the traced forward added."""
        residuals = Residuals(stack, merged=False)
        entering: dict[int, torch.Tensor] = {}
        for number, call in enumerate(stack.calls):
            for link in call.links:
                if link.segment not in entering:
                    entering[link.segment] = self._entering[call.index, link.key]
                if link.closes:
                    residuals.add(link.segment, self._leaving[call.index, link.slot] - entering[link.segment])
            for slot in call.side_outputs:
                residuals.sides[number, slot] = self._leaving[call.index, slot]
        return residuals


def open_objects(value: Any, seen: tuple[Any, ...] = ()) -> Any:
    """A block's arguments with caches and other plain objects as dicts of their attributes."""
    if isinstance(value, dict):
        return {key: open_objects(item, seen) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [open_objects(item, seen) for item in value]
    if isinstance(value, (torch.Tensor, type, nn.Module)) or not hasattr(value, "__dict__"):
        return value
    if any(value is other for other in seen):
        return type(value)
    return {"type": type(value).__name__} | open_objects(vars(value), (*seen, value))


def _list_versions(values: Any) -> list[tuple[int, object]]:
    """Each tensor in a block's arguments with its version."""
    return [(id(tensor), get_version(tensor)) for tensor in iter_tensors(open_objects(values))]


class HookPasses(BlockPasses):
    """The engine's passes where all streams leave the blocks: a user's hooks may read them."""

    skips_unread = False


class FollowingForward(HookedForward):
    """A forward along a known stack: a block pass of the engine computes or holds. Other blocks run as they are."""

    def __init__(self, hooked: HookedStack, pass_: ComputePass | HoldPass) -> None:
        self._hooks, self._members, self._pass = hooked.hooks, frozenset(hooked.hooks), pass_

    def call(self, hook: MagCacheHook, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if hook not in self._members:
            return block(*args, **kwargs)
        for number in range(self._pass.position, len(self._hooks)):
            site = self._pass.sites[number]
            if self._hooks[number] is hook:
                self._pass.position = number
                return self._pass.call(site.blocks, site.index, block, args, kwargs)
            if site.edge:
                break  # a block that has to be there was left out
        raise UnsupportedModelError(OTHER_ORDER)

    @property
    def complete(self) -> bool:
        return self._pass.position == len(self._hooks)

    def finish(self, state: MagCacheState) -> HeldTensors:
        assert isinstance(self._pass, ComputePass)
        return self._pass.held()


class TransformerHook(CacheHook[MagCacheState]):
    """Hook of the transformer itself, whose engine tells the hooks of its blocks the step, the branch and the stack.

    The engine's method and runner are the hooks: its policy is the head's, its states are those of their manager, and
    a forward runs through them.
    """

    def __init__(self, module: nn.Module, config: MagCacheConfig) -> None:
        super().__init__(BranchStateManager(MagCacheState, on_reset=self._forget), config)
        lists = {name: list(blocks) for name, blocks in find_block_lists(unwrap_module(module)).items()}
        self.blocks = {(name, index): block for name, blocks in lists.items() for index, block in enumerate(blocks)}
        self.head: MagCacheHeadHook
        self._hooks: dict[nn.Module, MagCacheHook] = {}
        self._engine = Engine(None, {"transformer": module}, _HookMethod(config, self))
        self._runner = BlockRunner(self._engine.transformers[0])
        self._call: ForwardCall | None = None  # the forward that runs through the hooks
        self._decisions: list[Decision] = []  # of that forward: one

    def register(self, head: MagCacheHeadHook, hooks: dict[nn.Module, MagCacheHook]) -> None:
        """Register this hook and those of the blocks, of which the first is the head and the last the tail."""
        self.head, self._hooks = head, hooks
        for block, hook in hooks.items():
            hook.guide = self
            register_hook(block, hook, "mag_cache")
        hook.is_tail = True
        module = self._engine.transformers[0].module
        register_hook(module, self, "mag_cache")
        forget_child_registries(module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """One forward of the transformer, in which the hooks of its blocks compute or hold."""
        transformer = self._engine.transformers[0]
        transformer.context.hint = self.state_manager.hint
        return self._engine.forward(transformer, self.fn_ref.original_forward, args, kwargs)

    def run(self, call: ForwardCall) -> Outcome:
        """Run a forward through the hooks, along a stack that was traced and checked before."""
        path = call.transformer.paths.get(call.structure)
        if path is None or not path.verified:
            path = self._runner.find_path(call)
        state, self.state_manager.branch = call.state.policy_state, call.branch
        state.stack = HookedStack(path.stack, self._assign_roles(path.stack), path.merged)
        self._call = call
        try:
            output = call.plain(*call.args, **call.kwargs)
            if not self._decisions or state.forward is not None:
                raise UnsupportedModelError(OTHER_ORDER)
            return Outcome(output, self._decisions[0], None)
        finally:
            self._call, self._decisions, state.forward = None, [], None

    @property
    def state(self) -> MagCacheState | None:
        """The state of the forward that runs through the hooks; None while one runs past them."""
        return None if self._call is None else self._call.state.policy_state

    def decide(self) -> MagCacheState | None:
        """The same, with the step and the decision of a forward that starts."""
        state, call = self.state, self._call
        if state is not None and call is not None and state.forward is None:
            grid = call.generation.grids[call.transformer]
            state.step_index = call.step
            state.num_inference_steps = grid.last + 1 if grid.bounded else None
            if state.previous_residual is None:
                state.anchor = state.held = None
            self._decisions.append(call.decide(None))
            state.should_compute = self._decisions[0].compute
        return state

    def _assign_roles(self, stack: Stack) -> tuple[MagCacheHook, ...]:
        """The hook of each call; the head is moved to the first block that the model calls, the tail to the last."""
        blocks = [self.blocks[call.blocks, call.index] for call in stack.calls]
        first = self._hooks[blocks[0]]
        if first is not self.head:
            old = next(block for block, hook in self._hooks.items() if hook is self.head)
            for block, hook in ((old, first), (blocks[0], self.head)):
                self._hooks[block], hook.block = hook, None
                register_hook(block, hook, "mag_cache")
        hooks = tuple(self._hooks[block] for block in blocks)
        for hook in self._hooks.values():
            hook.is_tail = hook is hooks[-1]
        return hooks

    def _forget(self) -> None:
        self._engine.refresh(None)


@dataclass(frozen=True)
class _HookPolicy:
    """The head's policy of the moment for one branch."""

    needs_signal: ClassVar[bool] = False
    head: MagCacheHeadHook
    branch: str
    grid: Grid

    def start(self) -> MagCacheState:
        state: MagCacheState = self.head.state_manager.start_branch(self.branch)
        return state

    def decide(self, step: int, signal: float | None, state: MagCacheState) -> Decision:
        return self.head.find_policy(self.branch, self.grid).decide(step, signal, state)


class _HookMethod(Method[MagCacheConfig]):
    """MagCache as its hooks have it: the engine stores nothing and measures nothing itself."""

    name = "mag_cache"

    def __init__(self, config: MagCacheConfig, hook: TransformerHook) -> None:
        super().__init__(config)
        self._hook = hook
        self.observes = config.calibrating

    @property
    def declared_steps(self) -> int:
        config: MagCacheConfig = self._hook.head.config
        return config.num_inference_steps

    def make_runner(self, transformer: CachedTransformer) -> TransformerHook:
        return self._hook

    def block_passes(self, transformer: CachedTransformer) -> BlockPasses:
        return self._hook.head.passes

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Policy:
        return _HookPolicy(self._hook.head, branch, grid if grid.bounded else Grid(self.declared_steps))
