"""The documented hooks of MagCache: the first block decides, blocks are held, the last block stores the residual.

The hooks hold and compute with the engine's policy, block passes and strategies, and share one state per branch.
`apply_mag_cache_hook` also registers one on the transformer, with an engine in it that finds the step, the branch and
the stack, which it checks as for every cache. Hooks that are registered on blocks by hand know their blocks alone: each
call of the head is a step, and the first forward of a branch records how its streams pass through the blocks. Models
for which that does not hold are refused.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from diffusers.hooks.hooks import StateManager
from torch import nn

from ..engine.hooks import NO_BRANCH, CacheHook, enter_branch
from ..engine.install import find_engine
from ..engine.storage import ON_DEVICE, STORAGES
from ..errors import EnableError, HoldoverWarning, UnsupportedModelError
from ..grid import Grid
from ..models.inputs import bind_arguments, describe_structure, unwrap_module
from ..models.registry import read_block_input
from ..models.trace import find_block_lists
from ..policies.base import Policy
from ..profiles import MagCacheRatios
from .backend import make_policy, resolve_profile
from .calibration import NEUTRAL, log_calibration, step_figures
from .config import MagCacheConfig
from .forward import FollowingForward, HookedForward, HookPasses, RecordingForward, TransformerHook, open_objects
from .state import MagCacheState
from .strategy import MagCacheStrategy, MagCacheStrategyRegistry, Residual, StrategyPasses

logger = logging.getLogger(__name__)
NO_TAIL = (
    "The last forward did not reach a tail hook, so that nothing can be held: register a MagCacheBlockHook with "
    "is_tail=True on the last block that the model calls, with the state manager of the head, or use holdover.enable."
)
RUNS_AGAIN = (
    "{} calls the head twice in one forward, so that hooks on blocks alone cannot count its steps. "
    'Use apply_mag_cache_hook or holdover.enable(transformer, "mag_cache").'
)


class MagCacheHook(CacheHook[MagCacheState]):
    """What both hooks have: a block runs or is held, and the tail ends the forward."""

    guide: TransformerHook | None = None  # the hook of the transformer, if there is one

    def __init__(
        self, state_manager: StateManager, config: MagCacheConfig, strategy: MagCacheStrategy | None, is_tail: bool
    ) -> None:
        super().__init__(state_manager, config)
        self.is_tail = is_tail
        self._strategy = strategy
        self.block: nn.Module | None = None  # the block without its hooks
        self._warned = False

    def perform_calibration(self, state: MagCacheState, current_residual: Residual) -> None:
        """Append the step's mean magnitude ratio, its standard deviation and the cosine distance to the state."""
        now, before = _as_tuple(current_residual), _as_tuple(state.previous_residual)
        measure = step_figures if self._strategy is None else self._strategy.measure_step
        figures = (measure(now, before) if before else NEUTRAL).tolist()
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
            figures = (tuple(values) for values in (state.norm_ratios, state.norm_stds, state.cos_dises))
            log_calibration(logger, [("", MagCacheRatios(*figures))])
        state.reset()

    def _run_block(
        self, state: MagCacheState, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run or hold this block, as the forward says."""
        assert state.forward is not None
        if self.block is None:
            self.block = _without_hooks(module, self.fn_ref.original_forward)
        try:
            return state.forward.call(self, self.block, args, kwargs)
        except BaseException:
            state.reset()  # nothing may build on a forward that failed half-way
            raise

    def _finish(self, state: MagCacheState) -> None:
        """End a forward at the tail: store what it computed, and advance."""
        forward = state.forward
        assert forward is not None
        if not (self.is_tail and forward.complete):
            return
        state.forward = None
        if state.should_compute:
            try:
                held = forward.finish(state)
            except BaseException:
                state.reset()
                raise
            residual = _as_residual(held.main)
            if self.config.calibrating:
                self.perform_calibration(state, residual)
            storage = ON_DEVICE if self.config.calibrating else STORAGES[self.config.hold_in]
            state.held = held if storage is ON_DEVICE else held.map(storage.store)
            state.previous_residual = _as_residual(state.held.main)
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
        self.passes = HookPasses() if self._residual_of is None else StrategyPasses(self._residual_of)
        self._transformer = transformer
        self._owner: nn.Module | None = None  # the module whose forward calls the block, once that is known
        self._policies: dict[tuple[str, Grid], Policy] = {}
        self._policies_of: MagCacheConfig | None = None

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Check that there are ratios for the block's transformer."""
        self.find_policy(NO_BRANCH, Grid(self.config.num_inference_steps))
        return module

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Decide whether the step is computed or held; the first block runs, or adds the residual."""
        if self.guide is not None:
            state = self.guide.decide()
        elif torch.is_grad_enabled() or module.training:
            return self._run_uncached(args, kwargs)
        else:
            state = self._enter(module, args, kwargs)
        if state is None:
            return self.fn_ref.original_forward(*args, **kwargs)
        starts = state.forward is None  # not where the model runs its blocks once more in the same forward
        if starts:
            state.head_block_input = read_block_input(module, bind_arguments(type(module), args, kwargs))
            state.forward = self._make_forward(state)
        output = self._run_block(state, module, args, kwargs)
        result = output
        if starts and state.should_compute:
            result = self.log_cache_miss(state, output)
        elif starts:
            several = isinstance(output, tuple)
            hidden = output[self._find_hidden_slot(state)] if several else output
            result = self.log_cache_hit(state, hidden, output if several else None)
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

    def _enter(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MagCacheState:
        """Start a forward, without a guide: locate the step, drop what does not fit these inputs, and decide."""
        state: MagCacheState
        hint, state = enter_branch(self.state_manager)
        self._mark_forward(module, state)
        if state.forward is not None:
            state.reset()
            raise UnsupportedModelError(NO_TAIL)
        tensors: list[torch.Tensor] = []
        structure = describe_structure(open_objects([args, kwargs]), tensors)
        signature: Any = (structure, [(t.shape, t.dtype, t.device) for t in tensors])
        if hint.step_index is not None:
            if hint.step_index < state.step_index:
                state.reset()
            state.step_index = hint.step_index
        state.num_inference_steps = hint.num_inference_steps or self.config.num_inference_steps
        if state.signature != signature:
            state.signature, state.stack, state.previous_residual = signature, None, None
        if state.previous_residual is None:
            state.anchor = state.held = None
        policy = self.find_policy(hint.name or NO_BRANCH, Grid(state.num_inference_steps))
        state.should_compute = policy.decide(state.step_index, None, state).compute
        return state

    def _mark_forward(self, module: nn.Module, state: MagCacheState) -> None:
        """Leave a mark in the running call of the transformer's forward; raise where the head has left one before.

        A model that runs its blocks several times in one forward would have each run taken for a step, and from the
        blocks that cannot be told from a loop over steps. So the head looks up the stack of calls for the module whose
        block it is. The mark is an additional local variable of that call, which ends with it.
        """
        frame: FrameType | None = sys._getframe(1)
        mark = f"__holdover_head_{id(self)}"
        while frame is not None:
            owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
            if isinstance(owner, nn.Module) and owner is not module and self._is_owner(owner, module):
                if mark in frame.f_locals:
                    state.reset()
                    raise UnsupportedModelError(RUNS_AGAIN.format(type(owner).__name__))
                frame.f_locals[mark] = True
                return
            frame = frame.f_back

    def _is_owner(self, candidate: nn.Module, block: nn.Module) -> bool:
        if candidate is not self._owner and any(
            block is part
            for blocks in find_block_lists(candidate).values()
            for entry in blocks
            for part in entry.modules()  # the block may be wrapped
        ):
            self._owner = candidate
        return candidate is self._owner

    def _make_forward(self, state: MagCacheState) -> HookedForward:
        """The forward that computes or holds as was decided."""
        if state.stack is None:
            return RecordingForward(self._residual_of)
        stack = state.stack.stack
        if state.should_compute:
            return FollowingForward(state.stack, self.passes.compute(stack, state.stack.merged, 0, frozenset()))
        assert state.held is not None
        storage, hold = STORAGES[self.config.hold_in], self.passes.hold(stack, 0, frozenset(), {})
        hold.load(state.held if storage is ON_DEVICE else state.held.map(storage.load))
        return FollowingForward(state.stack, hold)

    def _find_hidden_slot(self, state: MagCacheState) -> int:
        assert state.stack is not None
        stack = state.stack.stack
        link = stack.find_main_link(stack.calls[0])
        return 0 if link is None else link.slot

    def find_policy(self, branch: str, grid: Grid) -> Policy:
        """The policy of a branch, from the config of the moment."""
        config = self.config
        if self._policies_of is not config:
            self._policies, self._policies_of = {}, config
        if (branch, grid) not in self._policies:
            profile = None if config.calibrating else resolve_profile(config, self._strategy, self._transformer)
            self._policies[branch, grid] = make_policy(config, profile, branch, grid)
        return self._policies[branch, grid]

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or pass its inputs on where the step is held; the tail then ends the forward."""
        state = enter_branch(self.state_manager)[1] if self.guide is None else self.guide.state
        if state is None or state.forward is None:
            return self._run_outside(module, args, kwargs)
        output = self._run_block(state, module, args, kwargs)
        self._finish(state)
        return output

    def _run_outside(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a block that is called before the head or after the tail, or whose head holds nothing."""
        if self.guide is None and not (self._warned or torch.is_grad_enabled() or module.training):
            warnings.warn(
                f"A {type(module).__name__} with a MagCacheBlockHook is called before the head or after the tail, so "
                "it is never held: register the head on the first block that the model calls and the tail on the last.",
                HoldoverWarning,
                stacklevel=2,
            )
            self._warned = True
        return self.fn_ref.original_forward(*args, **kwargs)


def apply_mag_cache_hook(module: nn.Module, config: MagCacheConfig, strategy: MagCacheStrategy | None = None) -> None:
    """Register MagCache's hooks on the blocks of a transformer; `holdover.disable(module)` removes them.

    Without a strategy, the one registered for the transformer's class is used, if there is one.
    """
    core = unwrap_module(module)
    if find_engine(module) is not None:
        raise EnableError(f"There already is a holdover cache on this {type(module).__name__}: disable() it first.")
    if not any(find_block_lists(core).values()):
        raise UnsupportedModelError(
            f"{type(core).__name__} has no list of blocks that hooks could be registered on. "
            'Use holdover.enable(transformer, "mag_cache").'
        )
    if strategy is None:
        found, is_own = MagCacheStrategyRegistry.find(core, config.transformer_type)
        if is_own:
            strategy = found
        elif found is not None and not config.ratios_by_branch and config.profile is None:
            config = config.replaced(mag_ratios=found.mag_ratios)  # of a base class's strategy, the ratios alone
    guide = TransformerHook(module, config)
    head = MagCacheHeadHook(guide.state_manager, config, strategy, transformer=core)
    hooks: dict[nn.Module, MagCacheHook] = {}
    for block in guide.blocks.values():
        other = MagCacheBlockHook(guide.state_manager, False, config, strategy)
        hooks.setdefault(block, other if hooks else head)
    guide.register(head, hooks)


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
