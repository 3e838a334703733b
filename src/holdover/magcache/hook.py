"""The documented hooks of MagCache: the first block decides, blocks are held, the last block stores the residual.

Registered on the blocks of a transformer, by hand or by `apply_mag_cache_hook`, the hooks hold and compute with the
engine's policy, block passes and strategies, and share one state per branch. The first forward of a branch records how
its streams pass through the hooked blocks; from then on each hook knows its place in the stack.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks import ModelHook
from diffusers.hooks.hooks import StateManager
from torch import nn

from ..engine.blocks import ComputePass, HoldPass
from ..engine.hooks import (
    NO_BRANCH,
    BranchStateManager,
    CacheHook,
    enter_branch,
    forget_child_registries,
    register_hook,
)
from ..engine.install import ContextHint, find_engine
from ..engine.method import BLOCK_PASSES
from ..engine.storage import ON_DEVICE, STORAGES, HeldTensors, HeldTuple, Residuals
from ..errors import EnableError, HoldoverWarning, UnsupportedModelError
from ..grid import Grid
from ..models.inputs import ArgumentKey, ForwardSignature, bind_arguments, describe_structure, unwrap_module
from ..models.registry import get_family, read_block_input
from ..models.trace import Stack, Trace, find_block_lists, get_version
from ..policies.base import Policy
from .backend import make_policy, resolve_profile
from .calibration import NEUTRAL, step_figures
from .config import MagCacheConfig
from .state import MagCacheState
from .strategy import MagCacheStrategy, Residual, StrategyPasses, strategy_of

logger = logging.getLogger(__name__)


# What the hooks of one forward share


@dataclass(frozen=True)
class HookedStack:
    """The stack that the hooked blocks make, and for each of their calls the hook and the call's number in the stack."""

    stack: Stack
    calls: tuple[tuple[ModelHook, int | None], ...]  # None: no stream passes through this call, it always runs


class HookedForward:
    """One forward of the hooked blocks, from the head to the tail; this one just runs them."""

    stores = False  # whether what it computes is held

    def call(self, hook: MagCacheHook, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer the call of one block."""
        return block(*args, **kwargs)

    def finish(self, state: MagCacheState) -> HeldTensors | None:
        """What the blocks added, if it is known."""
        return None


class RecordingForward(HookedForward):
    """The first forward: runs every block, finds the stack, and computes what its segments added."""

    stores = True

    def __init__(self, head: str | None, strategy: MagCacheStrategy | None) -> None:
        self._head, self._strategy = head, strategy
        self._trace = RecordingTrace()
        self._hooks: list[ModelHook] = []
        self._output: Any = None

    def call(self, hook: MagCacheHook, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._hooks.append(hook)
        name = hook.blocks or type(block).__name__
        self._output = self._trace.run_block(name, len(self._hooks) - 1, block, args, kwargs)
        return self._output

    def finish(self, state: MagCacheState) -> HeldTensors | None:
        stack = self._trace.build_stack(self._head)
        if len(stack.group_names) < len(stack.segments):
            raise UnsupportedModelError(
                f"The model changes a stream between its blocks ({stack}). MagCache's hooks hold one residual per "
                "stream, from the first block to the last, which would be wrong here. "
                'Use holdover.enable(transformer, "mag_cache").'
            )
        numbers = iter(range(len(stack.calls)))
        lists = [self._trace.list_of(call) for call in range(len(self._hooks))]
        found = [next(numbers) if name in stack.lists else None for name in lists]
        state.stack = HookedStack(stack, tuple(zip(self._hooks, found, strict=True)))
        if self._strategy is not None:
            return HeldTuple(_as_tuple(self._strategy.compute_residual(self._output, state.head_block_input)))
        return self._trace.compute_residuals(stack, [call for call, number in enumerate(found) if number is not None])


class RecordingTrace(Trace):
    """A trace that keeps the tensors at which a segment starts or ends."""

    def __init__(self) -> None:
        super().__init__()
        self._entering: dict[tuple[int, ArgumentKey], torch.Tensor] = {}
        self._leaving: dict[tuple[int, int], tuple[torch.Tensor, object]] = {}  # with the version it left in

    def run_block(
        self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        output = super().run_block(blocks, index, block, args, kwargs)
        number, call = len(self._calls) - 1, self._calls[-1]
        for key, value in (*enumerate(args), *kwargs.items()):
            source = call.sources.get(key)
            if source is None and key in call.inputs:
                self._entering[number, key] = value
            elif source is not None and call.inputs[key] in call.outputs[source[1] : source[1] + 1]:
                self._leaving.pop(source, None)  # the stream goes on through this block
        traced = self._lists[blocks]
        for slot, (value, version) in enumerate(zip(traced.last_outputs, traced.last_versions, strict=True)):
            if isinstance(value, torch.Tensor):
                self._leaving[number, slot] = value, version
        return output

    def list_of(self, call: int) -> str:
        """The name of the list that a call belongs to."""
        return self._calls[call].blocks

    def compute_residuals(self, stack: Stack, calls: Sequence[int]) -> Residuals | None:
        """What the segments of the traced forward added; None if an output was used up or written to since."""
        residuals = Residuals(stack, merged=False)
        entering: dict[int, torch.Tensor] = {}
        for number, (traced, call) in enumerate(zip(calls, stack.calls, strict=True)):
            outputs = {}
            for slot in (*(link.slot for link in call.links if link.closes), *call.side_outputs):
                outputs[slot], version = self._leaving.get((traced, slot), (None, None))
                if outputs[slot] is None or get_version(outputs[slot]) != version:
                    return None
            for link in call.links:
                if link.segment not in entering:
                    entering[link.segment] = self._entering[traced, link.key]
                if link.closes:
                    residuals.add(link.segment, outputs[link.slot] - entering[link.segment])
            for slot in call.side_outputs:
                residuals.sides[number, slot] = outputs[slot].clone()
        return residuals


class FollowingForward(HookedForward):
    """A later forward: a block pass of the engine computes or holds along the stack."""

    stores = True

    def __init__(self, hooked: HookedStack, pass_: ComputePass | HoldPass) -> None:
        self._calls, self._pass, self._position = hooked.calls, pass_, 0

    def call(self, hook: MagCacheHook, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        while self._position < len(self._calls):
            expected, number = self._calls[self._position]
            self._position += 1
            if expected is hook:
                if number is None:
                    return block(*args, **kwargs)
                site = self._pass.sites[number]
                self._pass.position = number
                return self._pass.call(site.blocks, site.index, block, args, kwargs)
            if number is not None and self._pass.sites[number].edge:
                break  # a block that has to be there was left out
        raise UnsupportedModelError(
            f"The model calls other blocks than before ({type(block).__name__} out of order), which hooks on blocks "
            'cannot follow. Use holdover.enable(transformer, "mag_cache").'
        )

    def finish(self, state: MagCacheState) -> HeldTensors | None:
        return self._pass.held() if isinstance(self._pass, ComputePass) else None


# The hooks


class MagCacheHook(CacheHook[MagCacheState]):
    """What both hooks have: a block runs or is held, and the tail ends the forward."""

    blocks = ""  # the name of the list the block is in, where it is known

    def __init__(
        self, state_manager: StateManager, config: MagCacheConfig, strategy: MagCacheStrategy | None, is_tail: bool
    ) -> None:
        super().__init__(state_manager, config)
        self.is_tail = is_tail
        self._strategy = strategy
        self._block: nn.Module | None = None  # the block without its hooks
        self._warned = False

    def perform_calibration(self, state: MagCacheState, current_residual: Residual) -> None:
        """Append the step's mean magnitude ratio, its standard deviation and the cosine distance to the state."""
        now, before = _as_tuple(current_residual), _as_tuple(state.previous_residual)
        figures = (step_figures(now, before) if before else NEUTRAL).tolist()
        for values, figure in zip((state.norm_ratios, state.norm_stds, state.cos_dises), figures, strict=True):
            values.append(figure)

    def log_residual_computed(self, state: MagCacheState, residual: Residual) -> None:
        """Log the shape of the residual that is stored."""
        shapes = [tuple(tensor.shape) for tensor in _as_tuple(residual)]
        logger.debug("residual of step %s stored: %s", state.step_index, shapes)

    def advance_step(self, state: MagCacheState) -> None:
        """End a step. After the last one, log what a calibration has measured and forget everything."""
        state.step_index += 1
        if state.step_index < (state.num_inference_steps or self.config.num_inference_steps):
            return
        if self.config.calibrating:
            logger.info("MagCache calibration complete.")
            for name in ("norm_ratios", "norm_stds", "cos_dises"):
                logger.info("%s: %s", name, [round(value, 5) for value in getattr(state, name)])
            logger.info("Copy these values to DiffusionCacheConfig(mag_ratios=...).")
        state.reset()

    def _run_block(self, state: MagCacheState, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run or hold this block, as the forward says."""
        assert state.forward is not None
        if self._block is None:
            self._block = _without_hooks(module, self.fn_ref.original_forward)
        try:
            return state.forward.call(self, self._block, args, kwargs)
        except BaseException:
            state.reset()  # nothing may build on a forward that failed half-way
            raise

    def _finish(self, state: MagCacheState) -> None:
        """End a forward: store what it computed, and advance."""
        forward, state.forward = state.forward, None
        assert forward is not None
        if state.should_compute and forward.stores:
            try:
                held = forward.finish(state)
            except BaseException:
                state.reset()
                raise
            residual = None if held is None else _as_residual(held.main)
            if residual is not None and self.config.calibrating:
                self.perform_calibration(state, residual)
            storage = ON_DEVICE if self.config.calibrating else STORAGES[self.config.hold_in]
            state.held = held if held is None or storage is ON_DEVICE else held.map(storage.store)
            state.previous_residual = None if state.held is None else _as_residual(state.held.main)
            if residual is not None:
                self.log_residual_computed(state, residual)
        self.advance_step(state)


class MagCacheHeadHook(MagCacheHook):
    """Hook of the first block, at which each step is computed or held; `is_tail` if it is the only block.

    Ratios are those of the config, of the strategy, or of the shipped profile that fits `transformer`.
    """

    def __init__(
        self,
        state_manager: StateManager,
        config: MagCacheConfig,
        strategy: MagCacheStrategy | None = None,
        is_tail: bool = False,
        transformer: nn.Module | None = None,
    ) -> None:
        super().__init__(state_manager, config, strategy, is_tail)
        self._residual_of = strategy if strategy is not None and strategy.overrides_residual else None
        self._passes = BLOCK_PASSES if self._residual_of is None else StrategyPasses(self._residual_of)
        self._transformer = transformer
        self._head = None if transformer is None else get_family(transformer).head
        self._policies: dict[tuple[str, int], Policy] = {}
        self._policies_of: MagCacheConfig | None = None
        self.must_compute = False  # whether the forward that runs is never held

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Check that there are ratios for the block's transformer."""
        self._find_policy(NO_BRANCH, self.config.num_inference_steps)
        return module

    @torch.compiler.disable
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Decide whether the step is computed or held; the first block runs, or adds the residual."""
        if torch.is_grad_enabled() or module.training:
            return self._run_uncached(args, kwargs)
        hint, state = enter_branch(self.state_manager)
        self._start(hint, state, args, kwargs)
        state.head_block_input = read_block_input(module, bind_arguments(type(module), args, kwargs))
        if self.must_compute:
            state.should_compute, state.forward = True, HookedForward()
        else:
            policy = self._find_policy(hint.name or NO_BRANCH, state.num_inference_steps)
            state.should_compute = policy.decide(state.step_index, None, state).compute
            state.forward = self._make_forward(state)
        output = self._run_block(state, module, args, kwargs)
        if state.should_compute:
            result = self.log_cache_miss(state, output)
        else:
            several = isinstance(output, tuple)
            hidden = output[self._find_hidden_slot(state)] if several else output
            result = self.log_cache_hit(state, hidden, output if several else None)
        if self.is_tail:
            self._finish(state)
        return result

    def log_cache_hit(self, state: MagCacheState, output: Any, ret: Any) -> Any:
        """Log that the step is held; returns what the first block returns: `ret`, or `output` without one."""
        logger.debug(
            "step %s held, accumulated error %.4f over %d steps",
            state.step_index,
            state.accumulated_err,
            state.accumulated_steps,
        )
        return output if ret is None else ret

    def log_cache_miss(self, state: MagCacheState, output: Any) -> Any:
        """Log that the step is computed; returns what the first block returns."""
        logger.debug("step %s computed", state.step_index)
        return output

    def _start(self, hint: ContextHint, state: MagCacheState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Locate the step, and drop what does not fit this forward."""
        if state.forward is not None:
            state.reset()
            raise UnsupportedModelError(
                "The last forward did not reach a tail hook, so that nothing can be held: register a "
                "MagCacheBlockHook with is_tail=True on the last block that the model calls, with the state manager "
                "of the head."
            )
        if hint.step_index is not None:
            if hint.step_index < state.step_index:
                state.reset()
            state.step_index = hint.step_index
        state.num_inference_steps = hint.num_inference_steps or self.config.num_inference_steps
        tensors: list[tuple[Any, ...]] = []
        signature = (describe_structure([args, kwargs], tensors), tensors)
        if state.signature != signature:
            state.signature, state.stack, state.previous_residual = signature, None, None
        if state.previous_residual is None:
            state.anchor = state.held = None

    def _make_forward(self, state: MagCacheState) -> HookedForward:
        """The forward that computes or holds as was decided."""
        if state.stack is None:
            return RecordingForward(self._head, self._residual_of)
        if state.should_compute:
            return FollowingForward(state.stack, self._passes.compute(state.stack.stack, False, 0, frozenset()))
        assert state.held is not None
        storage, hold = STORAGES[self.config.hold_in], self._passes.hold(state.stack.stack, 0, frozenset(), {})
        hold.load(state.held if storage is ON_DEVICE else state.held.map(storage.load))
        return FollowingForward(state.stack, hold)

    def _find_hidden_slot(self, state: MagCacheState) -> int:
        assert state.stack is not None
        stack = state.stack.stack
        link = stack.find_main_link(stack.calls[0])
        return 0 if link is None else link.slot

    def _find_policy(self, branch: str, steps: int) -> Policy:
        """The policy of a branch, from the config of the moment."""
        config = self.config
        if self._policies_of is not config:
            self._policies, self._policies_of = {}, config
        if (branch, steps) not in self._policies:
            profile = None if config.calibrating else resolve_profile(config, self._strategy, self._transformer)
            self._policies[branch, steps] = make_policy(config, profile, branch, Grid(steps))
        return self._policies[branch, steps]

    def _run_uncached(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._warned:
            warnings.warn(
                "Autograd is on or the block is in training mode, so every step is computed: run it under "
                "torch.no_grad() and in eval mode to hold steps.",
                HoldoverWarning,
                stacklevel=2,
            )
        self._warned = True
        self.state_manager.reset()
        return self.fn_ref.original_forward(*args, **kwargs)


class MagCacheBlockHook(MagCacheHook):
    """Hook of every other block, which runs or is held; the last one (`is_tail`) stores the residual."""

    def __init__(
        self,
        state_manager: StateManager,
        is_tail: bool = False,
        config: MagCacheConfig | None = None,
        strategy: MagCacheStrategy | None = None,
    ) -> None:
        super().__init__(state_manager, config or MagCacheConfig(), strategy, is_tail)

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Leaves the block as it is."""
        return module

    @torch.compiler.disable
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or pass its inputs on where the step is held; the tail then ends the forward."""
        state = enter_branch(self.state_manager)[1]
        if state.forward is None:
            return self._run_outside(module, args, kwargs)
        output = self._run_block(state, module, args, kwargs)
        if self.is_tail:
            self._finish(state)
        return output


    def _run_outside(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a block that is called before the head or after the tail, or whose head holds nothing."""
        if not (self._warned or torch.is_grad_enabled() or module.training):
            warnings.warn(
                f"A {type(module).__name__} with a MagCacheBlockHook is called before the head or after the tail, so it "
                "is never held: register the head on the first block that the model calls, the tail on the last one.",
                HoldoverWarning,
                stacklevel=2,
            )
            self._warned = True
        return self.fn_ref.original_forward(*args, **kwargs)


class _TransformerHook(CacheHook[MagCacheState]):
    """Hook of the transformer itself: tells the head of forwards that are never held, by the model's family."""

    def __init__(self, head: MagCacheHeadHook, transformer: nn.Module) -> None:
        super().__init__(head.state_manager, head.config)
        self._head = head
        self._find_reason = get_family(transformer).must_compute
        self._signature = ForwardSignature(transformer)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._find_reason is not None
        self._head.must_compute = self._find_reason(self._signature.bind(args, kwargs)) is not None
        return args, kwargs


def apply_mag_cache_hook(module: nn.Module, config: MagCacheConfig, strategy: MagCacheStrategy | None = None) -> None:
    """Register MagCache's hooks on the blocks of a transformer; `holdover.disable(module)` removes them.

    Without a strategy, the one registered for the transformer's class is used, if there is one.
    """
    core = unwrap_module(module)
    if find_engine(module) is not None:
        raise EnableError(f"There already is a holdover cache on this {type(module).__name__}: disable() it first.")
    lists = find_block_lists(core)
    blocks = [(name, block) for name, blocks in lists.items() for block in blocks]
    if not blocks:
        raise UnsupportedModelError(
            f"{type(core).__name__} has no list of blocks that hooks could be registered on. "
            'Use holdover.enable(transformer, "mag_cache").'
        )
    strategy, manager = strategy or strategy_of(core), BranchStateManager(MagCacheState)
    head = MagCacheHeadHook(manager, config, strategy, len(blocks) == 1, core)
    for number, (name, block) in enumerate(blocks):
        is_tail = number == len(blocks) - 1
        hook = head if number == 0 else MagCacheBlockHook(manager, is_tail, config, strategy)
        hook.blocks = name
        register_hook(block, hook, "mag_cache")
    if get_family(core).must_compute is not None:
        register_hook(module, _TransformerHook(head, core), "mag_cache")
    forget_child_registries(module)


def _without_hooks(module: nn.Module, forward: Any) -> nn.Module:
    """The block as it was before a hook: same class and weights, with `forward` as its forward."""
    block = copy.copy(module)
    block.forward = forward
    block._forward_hooks, block._forward_pre_hooks = OrderedDict(), OrderedDict()
    return block


def _as_residual(tensors: Sequence[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _as_tuple(residual: Any) -> tuple[torch.Tensor, ...]:
    if residual is None:
        return ()
    return (residual,) if isinstance(residual, torch.Tensor) else tuple(residual)
