"""How a tiny model is declared: its configuration, and a function that samples the inputs its pipeline would pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import diffusers
import torch
from torch import Tensor, nn

TEXT = 5  # text tokens of every model
NOISE = 0.7  # the noise level of the inputs
HEADS: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2}
AXES = (4, 6, 6)


class InputSampler:
    """A seeded source of input tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)


SampleInputs = Callable[[InputSampler, int, int], dict[str, Any]]
D = TypeVar("D", bound=Callable[..., dict[str, Any]])


@dataclass(frozen=True)
class TinyModel:
    """A real diffusers transformer of a few thousand weights, and the inputs its pipeline would pass."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., dict[str, Any]]
    latent: str = "hidden_states"
    timestep: str = "timestep"  # "" for a model without one
    timestep_scale: float = 1000.0
    timestep_flipped: bool = False  # the model counts from noise (0) to data
    timestep_too: tuple[str, ...] = ()  # further inputs with the same value
    note: str = ""


def timestep_value(model: TinyModel, t: float) -> float:
    """Return the model's timestep for noise level t, where 1 is pure noise and 0 is data."""
    return model.timestep_scale * (1.0 - t if model.timestep_flipped else t)


def with_timestep(model: TinyModel, inputs: dict[str, Any], t: float) -> dict[str, Any]:
    """Return a copy of the inputs at noise level t in (0, 1]; the timesteps of clean tokens are kept."""
    if not 0.0 < t <= 1.0:
        raise ValueError(f"t is a noise level in (0, 1], got {t}")
    names = (model.timestep, *model.timestep_too) if model.timestep else ()
    clean, value = timestep_value(model, 0.0), timestep_value(model, t)
    moved = {name: torch.where(inputs[name] == clean, inputs[name], value) for name in names}
    return inputs | {name: moved[name].to(inputs[name].dtype) for name in names}


def build(name: str, config: dict[str, Any], prepare: Callable[[nn.Module], None] | None) -> nn.Module:
    """Build a model with the same weights at every call, without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model: nn.Module = getattr(diffusers, name)(**config)
        if prepare is not None:
            prepare(model)
        wake(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def wake(model: nn.Module) -> None:
    """Make the output depend on every weight, which it does not in a newly initialized model.

    Constant parameters get noise, since zero gates and zero output layers cut off everything before them. Weight
    matrices are scaled to keep the variance of their input, which PyTorch's initialization reduces to a third.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            module.weight.mul_(3**0.5)
    for parameter in model.parameters():
        if parameter.min() == parameter.max():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def sample_inputs(sample: SampleInputs, batch: int = 1, seed: int = 0, size: int = 0) -> dict[str, Any]:
    return sample(InputSampler(seed), batch, size)


@dataclass(frozen=True)
class ModelRegistry:
    """Tiny models by name; an instance is used as a decorator on the function that samples a model's inputs."""

    models: dict[str, TinyModel] = field(default_factory=dict)

    def __call__(
        self,
        name: str,
        config: dict[str, Any],
        prepare: Callable[[nn.Module], None] | None = None,
        **fields: Any,
    ) -> Callable[[D], D]:
        def register(sample: D) -> D:
            maker = partial(build, name.partition("[")[0], config, prepare)
            self.models[name] = TinyModel(name, maker, partial(sample_inputs, sample), **fields)
            return sample

        return register


def at(batch: int, value: float) -> Tensor:
    """One timestep per sample."""
    return torch.full((batch,), value)


def mask(batch: int, length: int = TEXT) -> Tensor:
    """Return the attention mask of prompts, of which every second one is a token shorter."""
    lengths = torch.tensor([length - row % 2 for row in range(batch)])
    return torch.arange(length)[None] < lengths[:, None]


def latent_side(size: int) -> tuple[int, int]:
    """Height and width in latent pixels."""
    return 8, 8 + 4 * size


def token_side(size: int) -> tuple[int, int]:
    """Height and width in tokens of 2x2 latent pixels."""
    return 4, 4 + 2 * size


def grid_ids(height: int, width: int, axes: int = 3) -> Tensor:
    """Position ids of an image: row and column in axes 1 and 2."""
    ids = torch.zeros(height, width, axes)
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)
    return ids.flatten(0, 1)


def rotary(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of a one-axis rotary embedding."""
    frequencies = 100.0 ** -torch.linspace(0, 1, dim // 2)
    angles = torch.outer(torch.arange(tokens), frequencies).repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()
