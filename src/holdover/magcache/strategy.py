"""MagCache strategies, the documented way to add a model: how its residual is computed and applied.

A model whose blocks can be traced needs none. A strategy that only gives `mag_ratios` changes nothing else. One that
overrides how the residual is computed or applied replaces the engine's own residuals, and the replay check applies to
it as to every other stack.
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
    """The indices of hidden states and encoder states in the tuple that a block returns."""

    return_hidden_states_index: int
    return_encoder_hidden_states_index: int | None = None


class MagCacheStrategy:
    """How the residual of one model is computed and applied; every method may be overridden."""

    @property
    def mag_ratios(self) -> torch.Tensor | None:
        """The model's magnitude ratios, one per step; None to use a profile."""
        return None

    def compute_residual(self, output: Any, head_input: torch.Tensor) -> Residual:
        """The residual, from the output of the last block and the hidden states that enter the first."""
        hidden = (
            output
            if isinstance(output, torch.Tensor)
            else next((t for t in reversed(output) if t is not None and t.shape == head_input.shape), output[-1])
        )
        residual: torch.Tensor = hidden - head_input
        return residual

    def apply_residual(self, hidden_states: torch.Tensor, residual: Residual) -> torch.Tensor:
        """The output of a held stack whose blocks return only hidden states."""
        return hidden_states + (residual[1] if isinstance(residual, tuple) else residual)

    def apply_residual_tuple(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, residual: Residual
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of a held stack whose blocks return two streams; hidden states come first."""
        return self.apply_residual(hidden_states, residual), encoder_hidden_states

    def register_block_metadata(self, block_class: type) -> TransformerBlockMetadata | None:
        """Where blocks of this class return their streams; None to use what tracing found."""
        return None

    @property
    def overrides_residual(self) -> bool:
        """Whether the strategy overrides how the residual is computed or applied."""
        own, base = type(self), MagCacheStrategy
        names = ("compute_residual", "apply_residual", "apply_residual_tuple", "register_block_metadata")
        return any(getattr(own, name) is not getattr(base, name) for name in names)


class FluxMagCacheStrategy(MagCacheStrategy):
    """The published ratios of FLUX.1."""

    FLUX_MAG_RATIOS = torch.tensor(next(p for p in shipped("mag_cache") if p.name == "mc.flux1-dev").ratios("cond"))

    @property
    def mag_ratios(self) -> torch.Tensor:
        return self.FLUX_MAG_RATIOS


_strategies: dict[str, MagCacheStrategy] = {}


def register_strategy(transformer_cls_name: str, strategy: MagCacheStrategy) -> None:
    """Use a strategy for transformers of this class and its subclasses."""
    if not isinstance(strategy, MagCacheStrategy):
        raise ConfigError(f"A strategy must be an instance of MagCacheStrategy, not {strategy!r}.")
    _strategies[transformer_cls_name] = strategy


def unregister_strategy(transformer_cls_name: str) -> None:
    """Remove the strategy of a class; its transformers are traced again."""
    _strategies.pop(transformer_cls_name, None)


def strategy_of(transformer: nn.Module) -> MagCacheStrategy | None:
    """The strategy registered for a transformer's class or the nearest of its bases."""
    return next((_strategies[c.__name__] for c in type(transformer).__mro__ if c.__name__ in _strategies), None)


class StrategyPasses(BlockPasses):
    """Block passes that compute and apply the residual as a strategy says."""

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
            self._held = HeldTuple(residual if isinstance(residual, tuple) else (residual,))
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
        """The output slots of hidden and encoder states: from the strategy, else from the trace."""
        metadata = self._strategy.register_block_metadata(block_class)
        if metadata is not None:
            return metadata.return_hidden_states_index, metadata.return_encoder_hidden_states_index
        main = self.stack.find_main_link(call)
        assert main is not None
        return main.slot, next((link.slot for link in call.links if link is not main), None)
