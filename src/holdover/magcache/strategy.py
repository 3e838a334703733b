"""MagCache strategies, the documented way to add a model: how its residual is computed and applied.

A model whose blocks can be traced needs none. A strategy that only gives `mag_ratios` changes nothing else. One that
overrides how the residual is computed or applied replaces the engine's own residuals, and the replay check applies to
it as to every other stack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.hooks._helpers import TransformerBlockMetadata as TransformerBlockMetadata
from diffusers.hooks._helpers import TransformerBlockRegistry as TransformerBlockRegistry
from torch import nn

from ..engine.blocks import BlockPasses, ComputePass, HoldPass
from ..engine.storage import HeldTensors, HeldTuple
from ..errors import ConfigError, did_you_mean
from ..models.inputs import get_argument
from ..models.trace import BlockCall, Stack
from ..policies.magcache import nearest_ratios
from ..profiles import shipped
from .calibration import NEUTRAL, step_figures

Residual = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _shipped_ratios(name: str) -> torch.Tensor:
    return torch.tensor(next(profile for profile in shipped("mag_cache") if profile.name == name).ratios("cond"))


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
        return hidden_states + (residual[0] if isinstance(residual, tuple) else residual)

    def apply_residual_tuple(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, residual: Residual
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of a held stack whose blocks return two streams; hidden states come first, in `residual` too.

        One residual belongs to the hidden states; the encoder states then pass through unchanged.
        """
        if isinstance(residual, tuple):
            return hidden_states + residual[0], encoder_hidden_states + residual[1]
        return hidden_states + residual, encoder_hidden_states

    def register_block_metadata(self, block_class: type) -> TransformerBlockMetadata | None:
        """Where blocks of this class return their streams; None to use what tracing found."""
        return None

    def compute_calibration_metrics(
        self, current_residual: Residual, previous_residual: Residual | None
    ) -> tuple[float, float, float]:
        """Mean ratio of the tokens' norms, its standard deviation, mean cosine distance; 1, 0, 0 at the first step."""
        figures = NEUTRAL
        if previous_residual is not None:
            figures = step_figures(as_tensors(current_residual), as_tensors(previous_residual))
        ratio, deviation, distance = figures.tolist()
        return ratio, deviation, distance

    def measure_step(self, residual: Sequence[torch.Tensor], previous: Sequence[torch.Tensor]) -> torch.Tensor:
        """The calibration metrics of one step; without an override they stay on the device."""
        if type(self).compute_calibration_metrics is MagCacheStrategy.compute_calibration_metrics:
            return step_figures(residual, previous)
        now, before = (parts[0] if len(parts) == 1 else (parts[0], parts[1]) for parts in (residual, previous))
        return torch.tensor(self.compute_calibration_metrics(now, before))

    @staticmethod
    def nearest_interp(src_array: torch.Tensor, target_length: int) -> torch.Tensor:
        """The ratios for another number of steps, as the published code takes them: the nearest of `src_array`."""
        return src_array[torch.tensor(nearest_ratios(range(len(src_array)), target_length), device=src_array.device)]

    @property
    def overrides_residual(self) -> bool:
        """Whether how the residual is computed or applied is overridden, by more than the strategies of this module."""
        names = ("compute_residual", "apply_residual", "apply_residual_tuple", "register_block_metadata")
        return any(getattr(type(self), name).__module__ != __name__ for name in names)


class FluxMagCacheStrategy(MagCacheStrategy):
    """FLUX.1, with the published ratios. A residual of two parts is (encoder states, hidden states)."""

    FLUX_MAG_RATIOS: ClassVar[torch.Tensor] = _shipped_ratios("mc.flux1-dev")

    @property
    def mag_ratios(self) -> torch.Tensor:
        return self.FLUX_MAG_RATIOS

    def apply_residual(self, hidden_states: torch.Tensor, residual: Residual) -> torch.Tensor:
        return hidden_states + (residual[1] if isinstance(residual, tuple) else residual)

    def apply_residual_tuple(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, residual: Residual
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only the hidden states are read after the last block, so the encoder states pass through unchanged."""
        return self.apply_residual(hidden_states, residual), encoder_hidden_states


class Flux2MagCacheStrategy(FluxMagCacheStrategy):
    """FLUX.2, whose single-stream blocks return one sequence: the text tokens, then those of the image."""

    FLUX2_MAG_RATIOS: ClassVar[torch.Tensor] = _shipped_ratios("vllm.flux2")

    @property
    def mag_ratios(self) -> torch.Tensor:
        return self.FLUX2_MAG_RATIOS

    def register_block_metadata(self, block_class: type) -> TransformerBlockMetadata:
        if "Single" in block_class.__name__:
            return TransformerBlockMetadata(return_hidden_states_index=0)
        return TransformerBlockMetadata(return_hidden_states_index=1, return_encoder_hidden_states_index=0)

    def compute_residual(self, output: Any, head_input: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Residual:
        """The residual of the image tokens; (encoder, hidden) if both streams are in the input and in the output."""
        if isinstance(output, torch.Tensor):
            head = head_input[1] if isinstance(head_input, tuple) else head_input
            return output[:, -head.shape[1] :] - head
        encoder, hidden = output
        if isinstance(head_input, tuple):
            return encoder - head_input[0], hidden - head_input[1]
        if head_input.shape[1] == encoder.shape[1] + hidden.shape[1]:
            text = encoder.shape[1]
            return encoder - head_input[:, :text], hidden - head_input[:, text:]
        residual: torch.Tensor = hidden - head_input
        return residual

    def apply_residual(self, hidden_states: torch.Tensor, residual: Residual) -> torch.Tensor:
        """Add the residual to the last tokens: those of the image, also in one sequence with the text."""
        image = residual[1] if isinstance(residual, tuple) else residual
        text = hidden_states.shape[1] - image.shape[1]
        if text == 0:
            return hidden_states + image
        return torch.cat([hidden_states[:, :text], hidden_states[:, text:] + image], dim=1)


class MagCacheStrategyRegistry:
    """The strategies by the name of the transformer's class."""

    _registry: ClassVar[dict[str, MagCacheStrategy]] = {}
    _shipped: ClassVar[dict[str, MagCacheStrategy]] = {
        "FluxTransformer2DModel": FluxMagCacheStrategy(),
        "Flux2Transformer2DModel": Flux2MagCacheStrategy(),
    }

    @classmethod
    def register(cls, name: str, strategy: MagCacheStrategy) -> None:
        """Use a strategy for transformers of the class of that name; its subclasses get the ratios of it."""
        if not isinstance(strategy, MagCacheStrategy):
            raise ConfigError(f"A strategy must be an instance of MagCacheStrategy, not {strategy!r}.")
        cls._registry[name] = strategy

    @classmethod
    def unregister(cls, name: str) -> None:
        """Remove the strategy of a class; its transformers are traced again."""
        cls._registry.pop(name, None)

    @classmethod
    def get(cls, transformer_type: str) -> MagCacheStrategy:
        """The strategy registered for exactly that class name, else the shipped one; ConfigError if there is none."""
        strategy = cls.get_if_exists(transformer_type)
        if strategy is None:
            known = sorted(cls._shipped | cls._registry)
            raise ConfigError(
                f"No MagCache strategy is registered for {transformer_type!r}.{did_you_mean(transformer_type, known)} "
                f"There are strategies for {', '.join(known)}; a model that can be traced needs none."
            )
        return strategy

    @classmethod
    def get_if_exists(cls, transformer_type: str) -> MagCacheStrategy | None:
        """The same, or None if there is none."""
        return cls._registry.get(transformer_type) or cls._shipped.get(transformer_type)

    @classmethod
    def find(cls, transformer: nn.Module, transformer_type: str = "") -> tuple[MagCacheStrategy | None, bool]:
        """The strategy registered for a transformer, and whether it was for exactly this class or the type given.

        Of a base class's strategy only the ratios are meant for the subclass, whose blocks may return other streams.
        A shipped strategy is not found: what it says is also in the profiles, for more variants of the model.
        """
        names = transformer_type, type(transformer).__name__
        own = next((cls._registry[name] for name in names if name in cls._registry), None)
        if own is not None:
            return own, True
        bases = (base.__name__ for base in type(transformer).__mro__[1:])
        return next((cls._registry[name] for name in bases if name in cls._registry), None), False


def register_strategy(transformer_cls_name: str, strategy: MagCacheStrategy) -> None:
    """Use a strategy for transformers of the class of that name; its subclasses get the ratios of it."""
    MagCacheStrategyRegistry.register(transformer_cls_name, strategy)


def unregister_strategy(transformer_cls_name: str) -> None:
    """Remove the strategy of a class; its transformers are traced again."""
    MagCacheStrategyRegistry.unregister(transformer_cls_name)


def get_strategy(transformer_cls_name: str) -> MagCacheStrategy:
    """The strategy registered for exactly that class name, else the shipped one; ConfigError if there is none."""
    return MagCacheStrategyRegistry.get(transformer_cls_name)


def get_block_metadata(
    block_class: type, strategy: MagCacheStrategy | None, output: Any = None, traced: Any = None
) -> Any:
    """Where blocks of a class return their streams, from diffusers' TransformerBlockRegistry.

    A class that is not registered there is registered: as the strategy says, else as `traced`, else by an `output` of
    such a block, else as one that returns (encoder states, hidden states).
    """
    try:
        return TransformerBlockRegistry.get(block_class)
    except ValueError:
        metadata = (None if strategy is None else strategy.register_block_metadata(block_class)) or traced
        if metadata is None and isinstance(output, torch.Tensor):
            metadata = TransformerBlockMetadata(return_hidden_states_index=0)
        if metadata is None:
            metadata = TransformerBlockMetadata(return_hidden_states_index=1, return_encoder_hidden_states_index=0)
        TransformerBlockRegistry.register(block_class, metadata)
        return metadata


def as_tensors(residual: Residual) -> tuple[torch.Tensor, ...]:
    """A residual as the tuple of its parts."""
    return (residual,) if isinstance(residual, torch.Tensor) else tuple(residual)


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
        """The output slots of hidden and encoder states: as registered, else from the strategy, else from the trace."""
        main = self.stack.find_main_link(call)
        assert main is not None
        other = next((link.slot for link in call.links if link is not main), None)
        metadata = get_block_metadata(block_class, self._strategy, traced=TransformerBlockMetadata(main.slot, other))
        return metadata.return_hidden_states_index, metadata.return_encoder_hidden_states_index
