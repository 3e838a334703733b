"""Tiny text-to-image transformers of the large families."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVCache,
    Flux2KVParallelSelfAttnProcessor,
)
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import Tensor

from .builder import (
    AXES,
    HEADS,
    NOISE,
    TEXT,
    InputSampler,
    ModelRegistry,
    at,
    grid_ids,
    latent_side,
    mask,
    token_side,
)

image = ModelRegistry()

JOINT = HEADS | {"in_channels": 16, "joint_attention_dim": 24, "axes_dims_rope": AXES}
TWO_STACKS = JOINT | {"num_layers": 3, "num_single_layers": 3}
DEEP_STACKS = JOINT | {"num_layers": 4, "num_single_layers": 4}


def residuals(sample: InputSampler, count: int, batch: int, tokens: int) -> list[Tensor]:
    """Residuals of a ControlNet."""
    return [0.3 * sample(batch, tokens, 32) for _ in range(count)]


def packed(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    """Inputs of the FLUX models: latents as a sequence, positions as ids, the timestep in [0, 1]."""
    height, width = token_side(size)
    return {
        "hidden_states": sample(batch, height * width, 16),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "timestep": at(batch, NOISE),
        "img_ids": grid_ids(height, width),
        "txt_ids": torch.zeros(TEXT, 3),
    }


# FLUX.1

POOLED: dict[str, Any] = {"pooled_projection_dim": 12, "guidance_embeds": True}


@image(
    "FluxTransformer2DModel[one_double]",
    JOINT | POOLED | {"num_layers": 1, "num_single_layers": 0},
    timestep_scale=1.0,
)
@image(
    "FluxTransformer2DModel[single_block]",
    JOINT | POOLED | {"num_layers": 1, "num_single_layers": 1},
    timestep_scale=1.0,
)
@image("FluxTransformer2DModel", TWO_STACKS | POOLED, timestep_scale=1.0)
def flux(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    extra = {"pooled_projections": sample(batch, 12), "guidance": at(batch, 3.5)}
    return packed(sample, batch, size) | extra


@image(
    "FluxTransformer2DModel[controlnet]",
    DEEP_STACKS | POOLED,
    timestep_scale=1.0,
    note="two residuals for four blocks, in both stacks",
)
def flux_controlnet(sample: InputSampler, batch: int, size: int, count: int = 2) -> dict[str, Any]:
    inputs = flux(sample, batch, size)
    tokens = inputs["hidden_states"].shape[1]
    return inputs | {
        "controlnet_block_samples": residuals(sample, count, batch, tokens),
        "controlnet_single_block_samples": residuals(sample, count, batch, tokens),
    }


@image(
    "FluxTransformer2DModel[controlnet_full]",
    TWO_STACKS | POOLED,
    timestep_scale=1.0,
    note="one residual per block",
)
def flux_controlnet_full(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return flux_controlnet(sample, batch, size, count=3)


def add_ip_adapter(model: Any) -> None:
    model.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(20, 24, 4)])
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(32, 24, num_tokens=(4,)))


@image(
    "FluxTransformer2DModel[ip_adapter]",
    TWO_STACKS | POOLED,
    add_ip_adapter,
    timestep_scale=1.0,
    note="the processors of the double blocks hold weights",
)
def flux_ip_adapter(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    embeds = {"ip_adapter_image_embeds": [sample(batch, 1, 20)]}
    return flux(sample, batch, size) | {"joint_attention_kwargs": embeds}


# FLUX.2 and FLUX.3

FLUX2 = TWO_STACKS | {"timestep_guidance_channels": 32, "mlp_ratio": 2.0, "axes_dims_rope": (4, 4, 4, 4)}


@image("Flux2Transformer2DModel", FLUX2, timestep_scale=1.0)
def flux2(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    ids = {"img_ids": grid_ids(*token_side(size), axes=4), "txt_ids": torch.zeros(TEXT, 4)}
    return packed(sample, batch, size) | ids | {"guidance": at(batch, 4.0)}


def use_kv_processors(model: Any) -> None:
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())


@image(
    "Flux2Transformer2DModel[kv]",
    FLUX2,
    use_kv_processors,
    timestep_scale=1.0,
    note="writes a KV cache: four reference tokens come before the latents and are not in the output",
)
def flux2_extract(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = flux2(sample, batch, size)
    reference_ids = grid_ids(2, 2, axes=4)
    reference_ids[:, 0] = 10
    return inputs | {
        "hidden_states": torch.cat([sample(batch, 4, 16), inputs["hidden_states"]], dim=1),
        "img_ids": torch.cat([reference_ids, inputs["img_ids"]]),
        "kv_cache_mode": "extract",
        "num_ref_tokens": 4,
    }


@image(
    "Flux2Transformer2DModel[kv_cached]",
    FLUX2,
    use_kv_processors,
    timestep_scale=1.0,
    note="reads a KV cache of four tokens",
)
def flux2_cached(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    cache = Flux2KVCache(num_double_layers=3, num_single_layers=3)
    cache.num_ref_tokens = 4
    for layer in [*map(cache.get_double, range(3)), *map(cache.get_single, range(3))]:
        layer.store(sample(batch, 4, 2, 16), sample(batch, 4, 2, 16))
    return flux2(sample, batch, size) | {"kv_cache": cache, "kv_cache_mode": "cached"}


@image(
    "Flux3Transformer2DModel",
    TWO_STACKS | {"cond_in_channels": 12, "timestep_channels": 32, "mlp_ratio": 2.0, "axes_dims_rope": (4, 4, 4, 4)},
    timestep_scale=1.0,
    note="image_cond tokens run through their own stack, held in a ModuleDict",
)
def flux3(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return packed(sample, batch, size) | {
        "img_ids": grid_ids(*token_side(size), axes=4),
        "txt_ids": torch.zeros(TEXT, 4),
        "image_cond_hidden_states": sample(batch, 4, 12),
        "image_cond_ids": grid_ids(2, 2, axes=4),
    }


# Models built like FLUX.1

CHROMA: dict[str, Any] = {"approximator_hidden_dim": 32, "approximator_layers": 2}


@image("ChromaTransformer2DModel", TWO_STACKS | CHROMA, timestep_scale=1.0)
def chroma(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = packed(sample, batch, size)
    seen = torch.cat([mask(batch), torch.ones(inputs["hidden_states"].shape[:2], dtype=torch.bool)], dim=1)
    return inputs | {"attention_mask": seen.float()}


@image(
    "ChromaTransformer2DModel[controlnet]",
    DEEP_STACKS | CHROMA,
    timestep_scale=1.0,
    note="the model writes into the outputs of its single blocks",
)
def chroma_controlnet(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = chroma(sample, batch, size)
    tokens = inputs["hidden_states"].shape[1]
    return inputs | {
        "controlnet_block_samples": residuals(sample, 2, batch, tokens),
        "controlnet_single_block_samples": residuals(sample, 2, batch, tokens),
    }


@image("BriaTransformer2DModel", TWO_STACKS)
def bria(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return packed(sample, batch, size) | {"timestep": at(batch, 1000 * NOISE)}


@image(
    "BriaTransformer2DModel[controlnet]",
    DEEP_STACKS,
    note="the model writes into the outputs of its single blocks, past as many tokens as the text has",
)
def bria_controlnet(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = bria(sample, batch, size)
    tokens = inputs["hidden_states"].shape[1]
    return inputs | {
        "controlnet_block_samples": residuals(sample, 2, batch, tokens),
        "controlnet_single_block_samples": residuals(sample, 2, batch, tokens - TEXT),
    }


@image("BriaFiboTransformer2DModel", TWO_STACKS | {"text_encoder_dim": 20})
def bria_fibo(sample: InputSampler, batch: int, size: int, layers: int = 6) -> dict[str, Any]:
    return bria(sample, batch, size) | {"text_encoder_layers": [sample(batch, TEXT, 20) for _ in range(layers)]}


@image(
    "BriaFiboTransformer2DModel[deep]",
    JOINT | {"num_layers": 4, "num_single_layers": 6, "text_encoder_dim": 20},
)
def bria_fibo_deep(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return bria_fibo(sample, batch, size, layers=10)


image("LongCatImageTransformer2DModel", TWO_STACKS, timestep_scale=1.0)(packed)
image("OvisImageTransformer2DModel", TWO_STACKS | {"out_channels": 16}, timestep_scale=1.0)(packed)


# Qwen-Image

QWEN = JOINT | {"patch_size": 2, "out_channels": 4, "num_layers": 3}


@image("QwenImageTransformer2DModel", QWEN, timestep_scale=1.0)
def qwen(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return {
        "hidden_states": sample(batch, height * width, 16),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_hidden_states_mask": mask(batch),
        "timestep": at(batch, NOISE),
        "img_shapes": [[(1, height, width)]] * batch,
    }


@image(
    "QwenImageTransformer2DModel[edit]",
    QWEN | {"zero_cond_t": True},
    timestep_scale=1.0,
    note="four clean tokens of an image follow the latents, modulated as at t=0",
)
def qwen_edit(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = qwen(sample, batch, size)
    return inputs | {
        "hidden_states": torch.cat([inputs["hidden_states"], sample(batch, 4, 16)], dim=1),
        "img_shapes": [[*shapes, (1, 2, 2)] for shapes in inputs["img_shapes"]],
    }


@image(
    "QwenImageTransformer2DModel[controlnet]",
    QWEN | {"num_layers": 4},
    timestep_scale=1.0,
    note="two residuals for four blocks",
)
def qwen_controlnet(sample: InputSampler, batch: int, size: int, count: int = 2) -> dict[str, Any]:
    inputs = qwen(sample, batch, size)
    tokens = inputs["hidden_states"].shape[1]
    return inputs | {"controlnet_block_samples": residuals(sample, count, batch, tokens)}


@image("QwenImageTransformer2DModel[controlnet_full]", QWEN, timestep_scale=1.0, note="one residual per block")
def qwen_controlnet_full(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return qwen_controlnet(sample, batch, size, count=3)


QWEN21 = HEADS | {
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 3,
    "context_in_dim": 24,
    "mlp_ratio": 2,
}
QWEN21 |= {"axes_dims_rope": AXES}


@image(
    "QwenImage21Transformer2DModel",
    QWEN21,
    timestep_scale=1.0,
    note="text, a condition image of four tokens and the latents in one sequence, all of it in the output",
)
def qwen21(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    slots = torch.zeros(batch, TEXT + 1 + height * width // 4, dtype=torch.bool)
    slots[:, 2] = True
    slots[:, TEXT + 1 :] = True
    return {
        "hidden_states": sample(batch, 4 + height * width, 16),
        "encoder_hidden_states": sample(batch, TEXT + 1, 24),
        "encoder_hidden_states_mask": mask(batch, TEXT + 1),
        "timestep": at(batch, NOISE),
        "img_shapes": [[(1, 2, 2), (1, height, width)]] * batch,
        "img_mask": slots,
    }


@image("QwenImage21Transformer2DModel[kv]", QWEN21, timestep_scale=1.0, note="writes the prefix into a KV cache")
def qwen21_extract(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return qwen21(sample, batch, size) | {"kv_cache": QwenImage21KVCache(3), "kv_cache_mode": "extract"}


@image(
    "QwenImage21Transformer2DModel[kv_cached]",
    QWEN21,
    timestep_scale=1.0,
    note="reads the prefix from a KV cache: the text and the condition image are ignored",
)
def qwen21_cached(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    cache = QwenImage21KVCache(3)
    for layer in cache.layer_caches:
        layer.store(sample(batch, TEXT + 4, 2, 16), sample(batch, TEXT + 4, 2, 16))
    return qwen21(sample, batch, size) | {"kv_cache": cache, "kv_cache_mode": "cached"}


# Stable Diffusion 3, AuraFlow, Sana

LATENT: dict[str, Any] = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4}
SD3 = HEADS | LATENT | {"num_layers": 3, "joint_attention_dim": 24, "caption_projection_dim": 32}
SD3 |= {"pooled_projection_dim": 12, "pos_embed_max_size": 12}


@image("SD3Transformer2DModel[3.5]", SD3 | {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"})
@image("SD3Transformer2DModel", SD3)
def sd3(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "pooled_projections": sample(batch, 12),
        "timestep": at(batch, 1000 * NOISE),
    }


@image(
    "SD3Transformer2DModel[skip_layers]",
    SD3 | {"num_layers": 4},
    note="skip-layer guidance leaves out block 1",
)
def sd3_skip_layers(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return sd3(sample, batch, size) | {"skip_layers": [1]}


@image("SD3Transformer2DModel[controlnet]", SD3 | {"num_layers": 4}, note="two residuals for four blocks")
def sd3_controlnet(sample: InputSampler, batch: int, size: int, count: int = 2) -> dict[str, Any]:
    height, width = token_side(size)
    added = residuals(sample, count, batch, height * width)
    return sd3(sample, batch, size) | {"block_controlnet_hidden_states": added}


@image("SD3Transformer2DModel[controlnet_full]", SD3, note="one residual per block; the last is not used")
def sd3_controlnet_full(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return sd3_controlnet(sample, batch, size, count=3)


AURA = HEADS | LATENT | {"num_mmdit_layers": 3, "num_single_dit_layers": 3, "joint_attention_dim": 24}


@image(
    "AuraFlowTransformer2DModel",
    AURA | {"caption_projection_dim": 32, "pos_embed_max_size": 64},
    timestep_scale=1.0,
)
def aura_flow(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "timestep": at(batch, NOISE),
    }


SANA = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": 4,
    "num_cross_attention_heads": 2,
    "caption_channels": 24,
}
SANA |= {"num_layers": 3, "cross_attention_head_dim": 16, "cross_attention_dim": 32}


@image("SanaTransformer2DModel", SANA)
def sana(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *token_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch).long(),
        "timestep": at(batch, 1000 * NOISE),
    }


@image(
    "SanaTransformer2DModel[controlnet]",
    SANA | {"num_layers": 4},
    note="residuals after blocks 1 and 2 of four",
)
def sana_controlnet(sample: InputSampler, batch: int, size: int, count: int = 2) -> dict[str, Any]:
    height, width = token_side(size)
    added = tuple(residuals(sample, count, batch, height * width))
    return sana(sample, batch, size) | {"controlnet_block_samples": added}


@image("SanaTransformer2DModel[controlnet_full]", SANA, note="as many residuals as blocks; the last is not used")
def sana_controlnet_full(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return sana_controlnet(sample, batch, size, count=3)


# Lumina 2, Z-Image, FIBO 2: refiners before the main stack

LUMINA2: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 3,
    "num_refiner_layers": 2,
}
LUMINA2 |= {"num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": AXES}


@image(
    "Lumina2Transformer2DModel",
    LUMINA2 | {"axes_lens": (64, 32, 32), "cap_feat_dim": 24},
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t",
)
def lumina2(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch),
        "timestep": at(batch, 1 - NOISE),
    }


Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 2,
}
Z_IMAGE |= {"cap_feat_dim": 24, "axes_dims": list(AXES), "axes_lens": [128, 32, 32]}


@image(
    "ZImageTransformer2DModel",
    Z_IMAGE,
    latent="x",
    timestep="t",
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t; latents and prompts are lists, one tensor per sample; both are padded to 32 tokens",
)
def z_image(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "x": [sample(4, 1, *latent_side(size)) for _ in range(batch)],
        "t": at(batch, 1 - NOISE),
        "cap_feats": [sample(TEXT - row % 2, 24) for row in range(batch)],
    }


@image(
    "ZImageTransformer2DModel[controlnet]",
    Z_IMAGE | {"n_layers": 4},
    latent="x",
    timestep="t",
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t; residuals come as a dict by layer",
)
def z_image_controlnet(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    added = dict(zip((0, 2), residuals(sample, 2, batch, 64), strict=True))
    return z_image(sample, batch, size) | {"controlnet_block_samples": added}


FIBO2: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 4,
    "n_heads": 2,
    "cap_feat_dim": 24,
    "perceiver_num_layers": 1,
}
FIBO2 |= {"injection_layer_ids": (1, 3), "min_num_gist_tokens": 4, "max_num_gist_tokens": 8, "gist_step": 4}
FIBO2 |= {"gist_min_text_len": 4, "gist_max_text_len": 16, "axes_dims": AXES, "axes_lens": (64, 32, 32)}


@image(
    "BriaFibo2Transformer2DModel",
    FIBO2,
    timestep_scale=1.0,
    note="one text bundle for the perceiver and one for each layer that reads the text",
)
def bria_fibo2(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "encoder_hidden_states": sample(batch, 3, TEXT, 24),
        "encoder_attention_mask": mask(batch),
        "timestep": at(batch, NOISE),
    }
