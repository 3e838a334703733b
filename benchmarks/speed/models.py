"""The transformers that are measured: full-size configs, random weights, inputs of one prompt's size.

Weights are random numbers in bfloat16, made on the device: speed does not depend on their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

SPREAD = 0.02


@dataclass(frozen=True)
class Shape:
    """The size of one forward: pixels, frames, batch, and text tokens."""

    width: int = 1024
    height: int = 1024
    frames: int = 1
    batch: int = 1
    text: int = 512

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")


@dataclass(frozen=True)
class Inputs:
    """The first latents, the fixed arguments, and the transformer's timestep argument for a timestep."""

    latent: Tensor
    fixed: dict[str, Any]
    time: Callable[[Tensor], Tensor]


Randn = Callable[..., Tensor]


@dataclass(frozen=True)
class Model:
    """One architecture, full-size and tiny."""

    title: str
    class_name: str
    inputs: Callable[[Mapping[str, Any], Shape, Randn], Inputs]
    ratios: str  # the MagCache profile that is used
    tiny: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    shape: Shape = Shape()
    uncached_steps: int = 20  # how many are measured of the uncached run

    def build(self, device: str, tiny: bool) -> nn.Module:
        """The transformer on its device, in eval mode."""
        before, dtype = torch.get_default_dtype(), torch.float32 if tiny else torch.bfloat16
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), torch.no_grad():
                transformer: nn.Module = getattr(diffusers, self.class_name)(**(self.tiny if tiny else self.config))
        finally:
            torch.set_default_dtype(before)
        _fill(transformer, torch.Generator(device).manual_seed(0))
        _keep_precise(transformer)
        return transformer.eval().requires_grad_(False)

    def inputs_for(self, transformer: Any, shape: Shape) -> Inputs:
        """Random inputs of that shape."""
        first = next(transformer.parameters())
        dtype = torch.float32 if first.device.type == "cpu" else torch.bfloat16
        generator = torch.Generator(first.device).manual_seed(1)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=first.device, dtype=dtype)

        return self.inputs(transformer.config, shape, randn)


@torch.no_grad()
def _fill(transformer: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in transformer.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0, SPREAD, generator=generator)


def _keep_precise(transformer: Any) -> None:
    """Convert to float32 what diffusers keeps in float32 when it loads this class."""
    kept = transformer._keep_in_fp32_modules or ()
    for name, parameter in transformer.named_parameters():
        if any(part in name.split(".") for part in kept):
            parameter.data = parameter.data.float()


def _of_noise(batch: int, like: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda t: t.expand(batch).to(like.dtype) / 1000


def _ids(height: int, width: int, axes: int, device: torch.device) -> Tensor:
    ids = torch.zeros(height, width, axes, device=device)
    ids[..., 1] = torch.arange(height, device=device)[:, None]
    ids[..., 2] = torch.arange(width, device=device)[None]
    return ids.flatten(0, 1)


def _packed(config: Mapping[str, Any], shape: Shape, randn: Randn, axes: int, guidance: float | None) -> Inputs:
    """Latents as a sequence of patches of 16 pixels, positions as ids: the FLUX family."""
    height, width = shape.height // 16, shape.width // 16
    latent = randn(shape.batch, height * width, config["in_channels"])
    fixed = {
        "encoder_hidden_states": randn(shape.batch, shape.text, config["joint_attention_dim"]),
        "img_ids": _ids(height, width, axes, latent.device),
        "txt_ids": torch.zeros(shape.text, axes, device=latent.device),
        "guidance": None if guidance is None else torch.full((shape.batch,), guidance, device=latent.device),
    }
    return Inputs(latent, fixed, _of_noise(shape.batch, latent))


def flux_inputs(config: Mapping[str, Any], shape: Shape, randn: Randn) -> Inputs:
    made = _packed(config, shape, randn, axes=3, guidance=3.5)
    made.fixed["pooled_projections"] = randn(shape.batch, config["pooled_projection_dim"])
    return made


def flux2_inputs(config: Mapping[str, Any], shape: Shape, randn: Randn) -> Inputs:
    return _packed(config, shape, randn, axes=4, guidance=4.0 if config["guidance_embeds"] else None)


def qwen_inputs(config: Mapping[str, Any], shape: Shape, randn: Randn) -> Inputs:
    height, width = shape.height // 16, shape.width // 16
    latent = randn(shape.batch, height * width, config["in_channels"])
    fixed = {
        "encoder_hidden_states": randn(shape.batch, shape.text, config["joint_attention_dim"]),
        "encoder_hidden_states_mask": None,
        "img_shapes": [[(1, height, width)]] * shape.batch,
    }
    return Inputs(latent, fixed, _of_noise(shape.batch, latent))


def wan_inputs(config: Mapping[str, Any], shape: Shape, randn: Randn) -> Inputs:
    frames = (shape.frames - 1) // 4 + 1
    latent = randn(shape.batch, config["in_channels"], frames, shape.height // 8, shape.width // 8)
    fixed = {"encoder_hidden_states": randn(shape.batch, shape.text, config["text_dim"])}
    return Inputs(latent, fixed, lambda t: t.expand(shape.batch))


_HEADS: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2}
_JOINT = _HEADS | {"in_channels": 16, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6)}
_STACKS = _JOINT | {"num_layers": 3, "num_single_layers": 3}
_FLUX2 = _STACKS | {"timestep_guidance_channels": 32, "mlp_ratio": 2.0, "axes_dims_rope": (4, 4, 4, 4)}
_WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 32, "ffn_dim": 64, "num_layers": 3}

MODELS: dict[str, Model] = {
    "flux": Model(
        "FLUX.1-dev, 12B",
        "FluxTransformer2DModel",
        flux_inputs,
        "mc.flux1-dev",
        _STACKS | {"pooled_projection_dim": 12, "guidance_embeds": True},
        {"guidance_embeds": True},
        uncached_steps=50,
    ),
    "qwen": Model(
        "Qwen-Image, 20B",
        "QwenImageTransformer2DModel",
        qwen_inputs,
        "mc.qwen-image",
        _JOINT | {"num_layers": 3, "out_channels": 4},
    ),
    "wan": Model(
        "Wan 2.1 T2V, 14B",
        "WanTransformer3DModel",
        wan_inputs,
        "mc.wan2.1-t2v-14B",
        _HEADS | _WAN,
        shape=Shape(832, 480, 17),
        uncached_steps=10,
    ),
    "flux2": Model(
        "FLUX.2-dev, 32B",
        "Flux2Transformer2DModel",
        flux2_inputs,
        "vllm.flux2",
        _FLUX2,
        uncached_steps=10,
    ),
    "klein": Model(
        "FLUX.2-klein-base, 9B",
        "Flux2Transformer2DModel",
        flux2_inputs,
        "vllm.flux2",
        _FLUX2 | {"guidance_embeds": False},
        {
            "num_layers": 8,
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
    ),
}
