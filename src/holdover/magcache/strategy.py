"""MagCache's documented way to add a model by hand: a strategy says what its residual is and how it is applied.

Where tracing suffices no strategy is needed. One that only gives `mag_ratios` changes nothing else; one that
overrides how the residual is computed or applied is followed to the letter, and checked like every other cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..models.graph import BlockCall, Stack
from ..models.inputs import get_argument
from ..profiles import shipped
from ..runtime.passes import ComputePass, HoldPass, Passes
from ..runtime.residuals import Held, Residuals, weighted_sum
from ..runtime.shortcut import Shortcut

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


class StrategyResiduals(Held):
    """The one residual a strategy computed."""

    def __init__(self, value: Residual) -> None:
        self.value = value

    def mixed(self, terms: Sequence[tuple[float, StrategyResiduals]]) -> StrategyResiduals:
        streams = zip(*(r.main for _, r in terms), strict=True)
        sums = [weighted_sum(zip((w for w, _ in terms), stream, strict=True)) for stream in streams]
        return StrategyResiduals((sums[0], sums[1]) if isinstance(self.value, tuple) else sums[0])

    def mapped(self, change: Callable[[Any], Any]) -> StrategyResiduals:
        changed = [change(tensor) for tensor in self.main]
        return StrategyResiduals((changed[0], changed[1]) if isinstance(self.value, tuple) else changed[0])

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.main)


class StrategyPasses(Passes):
    """Head decides, blocks hold, tail stores: with one strategy's residual."""

    leaves_out = False

    def __init__(self, strategy: MagCacheStrategy) -> None:
        self._strategy = strategy

    def compute(self, cut: Stack, lumped: bool, begin: int, shortcut: Shortcut) -> ComputePass:
        return _StrategyCompute(cut, begin, self._strategy)

    def hold(self, cut: Stack, held: Held, begin: int, shortcut: Shortcut) -> HoldPass:
        assert isinstance(held, StrategyResiduals)
        return _StrategyHold(cut, held, begin, self._strategy)


class _StrategyCompute(ComputePass):
    traceable = False

    def __init__(self, cut: Stack, begin: int, strategy: MagCacheStrategy) -> None:
        super().__init__(cut, lumped=True, begin=begin)
        self._strategy = strategy
        self._tail = max(i for i, call in enumerate(cut.calls) if cut.find_main_link(call) is not None)
        self._head_input: torch.Tensor | None = None
        self._value: StrategyResiduals | None = None

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        position, call = self._advance(blocks, index)
        if position == self._begin:
            link = self._cut.find_main_link(call)
            assert link is not None
            self._head_input = get_argument(args, kwargs, link.key)
        output = block(*args, **kwargs)
        if position == self._tail:
            assert self._head_input is not None
            residual = self._strategy.compute_residual(output, self._head_input)
            self._value = StrategyResiduals(residual)
            self._head_input = None
        return output

    @property
    def held(self) -> Held:
        assert self._value is not None
        return self._value


class _StrategyHold(HoldPass):
    traceable = False

    def __init__(self, cut: Stack, held: StrategyResiduals, begin: int, strategy: MagCacheStrategy) -> None:
        super().__init__(Residuals(cut, lumped=True), begin)
        self._strategy = strategy
        self._value = held.value

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        position, call = self._advance(blocks, index)
        streams = {link.slot: get_argument(args, kwargs, link.key) for link in call.links}
        if position != self._begin:
            outputs = [streams.get(slot) for slot in range(max(call.width, 1))]
            return tuple(outputs) if call.width else outputs[0]
        hidden, encoder = self._slots(call, type(block))
        if encoder is None:
            held = {hidden: self._strategy.apply_residual(streams[hidden], self._value)}
        else:
            both = self._strategy.apply_residual_tuple(streams[hidden], streams[encoder], self._value)
            held = dict(zip((hidden, encoder), both, strict=True))
        outputs = [{**streams, **held}.get(slot) for slot in range(max(call.width, 1))]
        return tuple(outputs) if call.width else outputs[0]

    def _slots(self, call: BlockCall, block_class: type) -> tuple[int, int | None]:
        """The slots of hidden and encoder states: the strategy's word, else the trace's."""
        metadata = self._strategy.register_block_metadata(block_class)
        if metadata is not None:
            return metadata.return_hidden_states_index, metadata.return_encoder_hidden_states_index
        main = self._cut.find_main_link(call)
        assert main is not None
        return main.slot, next((link.slot for link in call.links if link is not main), None)
