"""EasyCache (Zhou et al., arXiv:2507.02860): hold what the transformer adds to its input while little is expected to
change. The gain from input to output is measured while the generation runs; there are no constants.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..config import Config, setting
from ..engine.backend import EngineBackend
from ..engine.install import CachedTransformer
from ..engine.method import Method, Runner
from ..engine.output import OutputRunner
from ..engine.parallel import Groups, largest_on_device
from ..engine.signals import AsyncScalar, SignalReading, absolute_sum
from ..engine.state import BranchState, ForwardCall
from ..engine.storage import HeldOutput
from ..grid import Grid
from ..models.registry import Arguments, Signal
from ..policies.easy_cache import EasyCachePolicy


@dataclass(frozen=True)
class EasyCacheConfig(Config):
    """Hold while the expected change of the output since the last computed step is below `threshold`."""

    method: ClassVar[str] = "easy_cache"
    color: ClassVar[str] = "blue"
    vllm_omni: ClassVar[str] = "holdover_easy_cache"

    threshold: float = setting(
        0.05, ge=0, doc="hold while the accumulated, expected change of the output is below this"
    )
    warmup_steps: int = setting(5, ge=0, doc="number of first steps that are always computed")


class HeldForward(HeldOutput):
    """Output and input of a computed forward, and how much the output changes with the input.

    `sensitivity` is the change of the output relative to its size, per change of the input; None for the first forward.
    """

    entered: tuple[torch.Tensor, ...] = ()
    sensitivity: torch.Tensor | None = None

    def measure(self, before: HeldForward) -> None:
        """Compare with the computed forward before this one."""
        change = sum_absolute(map(torch.sub, self.outputs, before.outputs)) / sum_absolute(self.outputs)
        self.sensitivity = change / sum_absolute(map(torch.sub, self.entered, before.entered))

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Every tensor of the output."""
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(tensor.nbytes for tensor in self.entered)


class DifferenceRunner(OutputRunner):
    """Holds the output minus the input: a held step adds it to its own input."""

    def hold(self, call: ForwardCall, output: Any) -> HeldForward:
        held = HeldForward.copy_of(output)
        held.entered = tuple(latent.clone() for latent in self._latents(call))
        if call.state.held:
            before = call.state.held[-1]
            assert isinstance(before, HeldForward)
            held.measure(before)
        return held

    def replay(self, call: ForwardCall, held: HeldOutput) -> Any:
        assert isinstance(held, HeldForward)
        tensors, latents = list(held.tensors), self._latents(call)
        for number, (output, entered, latent) in enumerate(zip(held.tensors, held.entered, latents, strict=False)):
            if output is not None and output.ndim == latent.ndim:
                tensors[number] = add_difference(output, entered, latent)
        return held.copy_with(tensors).build_output()

    def _latents(self, call: ForwardCall) -> tuple[torch.Tensor, ...]:
        inputs = call.transformer.inputs
        return inputs.get_latents(inputs.bind(call.args, call.kwargs))


def add_difference(output: torch.Tensor, entered: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """The latent plus the output minus the input it was computed from, where the two have the same channels.

    The input may have more, which are conditions, and the output may have more, such as variances.
    """
    if output.shape == latent.shape:
        return (latent + (output - entered)).to(output.dtype)
    shared = tuple(slice(min(sizes)) for sizes in zip(output.shape, latent.shape, strict=True))
    moved = output.clone()
    moved[shared] = (latent[shared] + (output[shared] - entered[shared])).to(output.dtype)
    return moved


def sum_absolute(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of absolute values of several tensors."""
    return functools.reduce(torch.add, map(absolute_sum, tensors))


class ExpectedChange(SignalReading):
    """The input of a step, and how much the output is expected to change from the step before, relative to its size."""

    def __init__(
        self, value: torch.Tensor, before: SignalReading | None, sensitivity: torch.Tensor | None, groups: Groups
    ) -> None:
        self.value = value
        expected = None
        if before is not None and sensitivity is not None:
            expected = absolute_sum(value - before.value) * sensitivity
        if groups.synchronized:  # an exchange all ranks enter, whether they have something to compare or not
            expected = torch.tensor(math.inf, device=value.device) if expected is None else expected
            expected = largest_on_device(dataclasses.replace(groups, cfg=None), expected)
        self._change = None if expected is None else AsyncScalar(expected)


class EasyCacheMethod(Method[EasyCacheConfig]):
    """EasyCache with one set of settings."""

    name = "easy_cache"

    def __init__(self, config: EasyCacheConfig) -> None:
        super().__init__(config)
        self._signals: dict[CachedTransformer, Signal] = {}

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return DifferenceRunner(transformer)

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        def copy_latents(arguments: Arguments, noise: float) -> torch.Tensor:
            return torch.cat([latent.flatten() for latent in transformer.inputs.get_latents(arguments)])

        self._signals[transformer] = Signal("latents", of_input=copy_latents)
        return ()

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> EasyCachePolicy:
        return EasyCachePolicy(self.config.threshold, self.config.warmup_steps, grid)

    def signal(self, transformer: CachedTransformer) -> Signal:
        return self._signals[transformer]

    def read_signal(self, value: torch.Tensor, state: BranchState, groups: Groups) -> ExpectedChange:
        last = state.held[-1] if state.held else None
        return ExpectedChange(value, state.signal, last.sensitivity if isinstance(last, HeldForward) else None, groups)


class EasyCacheBackend(EngineBackend[EasyCacheConfig]):
    """EasyCache: hold what the transformer adds to its input while its output is expected to change little."""

    config_class = EasyCacheConfig

    def make_method(self, settings: EasyCacheConfig) -> EasyCacheMethod:
        return EasyCacheMethod(settings)
