"""One forward of the hooked blocks: recorded the first time, computed or held along the recorded stack from then on.

The block passes are the engine's. What differs is who calls them: not proxies in the model's loop over its blocks, but
the hooks on the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..engine.blocks import ComputePass, HoldPass
from ..engine.storage import HeldTensors, HeldTuple, Residuals
from ..errors import UnsupportedModelError
from ..models.inputs import ArgumentKey
from ..models.trace import Stack, Trace, get_version

if TYPE_CHECKING:
    from .hook import MagCacheHook
    from .state import MagCacheState
    from .strategy import MagCacheStrategy


@dataclass(frozen=True)
class HookedStack:
    """The stack that the hooked blocks make; for each of their calls, the hook and the call's number in the stack."""

    stack: Stack
    calls: tuple[tuple[MagCacheHook, int | None], ...]  # None: no stream passes through this call, it always runs


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
        self._hooks: list[MagCacheHook] = []
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
        if self._strategy is not None and state.head_block_input is not None:
            residual = self._strategy.compute_residual(self._output, state.head_block_input)
            return HeldTuple(residual if isinstance(residual, tuple) else (residual,))
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
        values: list[tuple[ArgumentKey, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in values:
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
            outputs: dict[int, Any] = {}
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
