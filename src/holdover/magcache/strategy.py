"""MagCache's documented way to add a model by hand: a strategy says what its residual is and how it is applied.

Where tracing suffices no strategy is needed. One that only gives `mag_ratios` changes nothing else; one that
overrides how the residual is computed or applied is followed to the letter, and checked like every other stack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.blocks import BlockPasses, ComputePass, HoldPass
from ..engine.storage import HeldTensors, HeldTuple
from ..errors import ConfigError
from ..models.inputs import get_argument
from ..models.trace import BlockCall, Stack
from ..profiles import shipped

Residual = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TransformerBlockMetadata:
    """Where a block's tuple has its hidden states and its encoder states."""

    return_hidden_states_index: int
    return_encoder_hidden_states_index: int | None = None


class MagCacheStrategy:
    """How one model's residual is measured, computed and applied; every method may be overridden."""

    @property
    def mag_ratios(self) -> torch.Tensor | None:
        """The model's magnitude ratios, one a step; None leaves them to the profiles."""
        return None

    def compute_residual(self, output: Any, head_input: torch.Tensor) -> Residual:
        """What the blocks added, from the last block's output and the first block's hidden states."""
        hidden = (
            output
            if isinstance(output, torch.Tensor)
            else next((t for t in reversed(output) if t is not None and t.shape == head_input.shape), output[-1])
        )
        residual: torch.Tensor = hidden - head_input
        return residual

    def apply_residual(self, hidden_states: torch.Tensor, residual: Residual) -> torch.Tensor:
        """The held output of a block that returns hidden states alone."""
        return hidden_states + (residual[1] if isinstance(residual, tuple) else residual)

    def apply_residual_tuple(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, residual: Residual
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The held output of a block that returns two streams, hidden states first."""
        return self.apply_residual(hidden_states, residual), encoder_hidden_states

    def register_block_metadata(self, block_class: type) -> TransformerBlockMetadata | None:
        """Where this block class returns its streams; None: as the trace found it."""
        return None

    @property
    def overrides_residual(self) -> bool:
        """Whether the strategy has its own idea of the residual."""
        own, base = type(self), MagCacheStrategy
        names = ("compute_residual", "apply_residual", "apply_residual_tuple", "register_block_metadata")
        return any(getattr(own, name) is not getattr(base, name) for name in names)


class FluxMagCacheStrategy(MagCacheStrategy):
    """FLUX.1: the published ratios."""

    FLUX_MAG_RATIOS = torch.tensor(next(p for p in shipped("mag_cache") if p.name == "mc.flux1-dev").ratios("cond"))

    @property
    def mag_ratios(self) -> torch.Tensor:
        return self.FLUX_MAG_RATIOS


_strategies: dict[str, MagCacheStrategy] = {}


def register_strategy(transformer_cls_name: str, strategy: MagCacheStrategy) -> None:
    """Use a strategy for transformers of that class."""
    if not isinstance(strategy, MagCacheStrategy):
        raise ConfigError(f"A strategy is an instance of MagCacheStrategy, not {strategy!r}.")
    _strategies[transformer_cls_name] = strategy


def unregister_strategy(transformer_cls_name: str) -> None:
    """Trace that class again."""
    _strategies.pop(transformer_cls_name, None)


def strategy_of(transformer: nn.Module) -> MagCacheStrategy | None:
    """The strategy registered for a transformer's class or the nearest of its bases."""
    return next((_strategies[c.__name__] for c in type(transformer).__mro__ if c.__name__ in _strategies), None)


class StrategyPasses(BlockPasses):
    """The first block decides, blocks hold, the last block stores: with one strategy's residual."""

    skips_unread = False

    def __init__(self, strategy: MagCacheStrategy) -> None:
        self._strategy = strategy

    def compute(self, stack: Stack, merged: bool, begin: int, unread: Collection[int]) -> ComputePass:
        return _StrategyComputePass(stack, begin, self._strategy)

    def hold(self, stack: Stack, begin: int, unread: Collection[int], lengths: Mapping[str, int]) -> HoldPass:
        return _StrategyHoldPass(stack, begin, self._strategy)


class _StrategyComputePass(ComputePass):
    traceable = False

    def __init__(self, stack: Stack, begin: int, strategy: MagCacheStrategy) -> None:
        super().__init__(stack, merged=True, begin=begin)
        self._strategy = strategy
        self._last = max(i for i, call in enumerate(stack.calls) if stack.find_main_link(call) is not None)
        self._head_input: torch.Tensor | None = None
        self._held: HeldTuple | None = None

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        site = self.next_site(blocks, index)
        if site.number == self.begin:
            link = self.stack.find_main_link(self.stack.calls[site.number])
            assert link is not None
            self._head_input = get_argument(args, kwargs, link.key)
        output = block(*args, **kwargs)
        if site.number == self._last:
            assert self._head_input is not None
            residual = self._strategy.compute_residual(output, self._head_input)
            self._held = HeldTuple(*(residual if isinstance(residual, tuple) else (residual,)))
            self._head_input = None
        return output

    def held(self) -> HeldTensors:
        assert self._held is not None
        return self._held


class _StrategyHoldPass(HoldPass):
    traceable = False

    def __init__(self, stack: Stack, begin: int, strategy: MagCacheStrategy) -> None:
        super().__init__(stack, begin)
        self._strategy = strategy
        self._residual: Residual | None = None

    def load(self, held: HeldTensors) -> None:
        assert isinstance(held, HeldTuple)
        self._residual = held.main[0] if len(held.main) == 1 else (held.main[0], held.main[1])

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        site = self.next_site(blocks, index)
        call = self.stack.calls[site.number]
        streams = {link.slot: get_argument(args, kwargs, link.key) for link in call.links}
        if site.number == self.begin:
            assert self._residual is not None
            hidden, encoder = self._find_slots(call, type(block))
            if encoder is None:
                streams[hidden] = self._strategy.apply_residual(streams[hidden], self._residual)
            else:
                streams[hidden], streams[encoder] = self._strategy.apply_residual_tuple(
                    streams[hidden], streams[encoder], self._residual
                )
        outputs = [streams.get(slot) for slot in range(max(call.width, 1))]
        return tuple(outputs) if call.width else outputs[0]

    def _find_slots(self, call: BlockCall, block_class: type) -> tuple[int, int | None]:
        """The slots of hidden and encoder states: as the strategy says, else as the trace found them."""
        metadata = self._strategy.register_block_metadata(block_class)
        if metadata is not None:
            return metadata.return_hidden_states_index, metadata.return_encoder_hidden_states_index
        main = self.stack.find_main_link(call)
        assert main is not None
        return main.slot, next((link.slot for link in call.links if link is not main), None)
