"""Tiny video transformers, with and without sound."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor

from .builder import AXES, HEADS, NOISE, TEXT, InputSampler, ModelRegistry, at, latent_side, mask, rotary, token_side

video = ModelRegistry()

FRAMES = 2


def clip(sample: InputSampler, batch: int, size: int, channels: int = 4, frames: int = FRAMES) -> Tensor:
    return sample(batch, channels, frames, *latent_side(size))


def first_clean(batch: int, frames: int, tokens: int = 1) -> Tensor:
    """Timesteps of a video whose first frame is given: (batch, frames * tokens)."""
    timesteps = torch.full((batch, frames, tokens), 1000 * NOISE)
    timesteps[:, 0] = 0
    return timesteps.flatten(1)


# Wan and models built on it

WAN = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 3,
}
WAN_IMAGE = WAN | {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 32}


@video("WanTransformer3DModel", WAN)
def wan(sample: InputSampler, batch: int, size: int, channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": clip(sample, batch, size, channels),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
    }


@video("ChronoEditTransformer3DModel", WAN_IMAGE)
@video("WanTransformer3DModel[i2v]", WAN_IMAGE)
def wan_i2v(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return wan(sample, batch, size, channels=12) | {
        "encoder_hidden_states": sample(batch, 512, 24),  # what comes before the last 512 tokens is the image
        "encoder_hidden_states_image": sample(batch, 3, 20),
    }


@video("WanTransformer3DModel[ti2v]", WAN, note="a timestep for every token; those of the first frame are clean")
def wan_ti2v(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return wan(sample, batch, size) | {"timestep": first_clean(batch, FRAMES, height * width)}


VACE = WAN | {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 12}


@video("WanVACETransformer3DModel", VACE, note="hints from vace_blocks are added after blocks 0 and 2 of four")
def wan_vace(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return wan(sample, batch, size) | {"control_hidden_states": clip(sample, batch, size, 12)}


@video("WanVACETransformer3DModel[scales]", VACE, note="unequal scales of the hints")
def wan_vace_scales(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return wan_vace(sample, batch, size) | {"control_hidden_states_scale": torch.tensor([0.5, 1.5])}


ANIMATE = WAN_IMAGE | {
    "latent_channels": 4,
    "num_layers": 4,
    "inject_face_latents_blocks": 2,
    "motion_encoder_size": 16,
}
ANIMATE |= {"motion_encoder_channel_sizes": {"4": 4, "8": 4, "16": 4}, "motion_style_dim": 8, "motion_dim": 4}
ANIMATE |= {"motion_encoder_dim": 8, "face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2}


@video("WanAnimateTransformer3DModel", ANIMATE, note="face_adapter reads the hidden states after blocks 0 and 2")
def wan_animate(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return wan_i2v(sample, batch, size) | {
        "hidden_states": clip(sample, batch, size, 12, frames=3),
        "pose_hidden_states": clip(sample, batch, size, 4, frames=2),
        "face_pixel_values": sample(batch, 3, 8, 16, 16),
    }


ANIMATE2: dict[str, Any] = {
    "text_len": 8,
    "in_dim": 12,
    "dim": 32,
    "ffn_dim": 64,
    "freq_dim": 32,
    "text_dim": 24,
    "out_dim": 4,
}
ANIMATE2 |= {"num_heads": 2, "num_layers": 3}


def animate2(sample: InputSampler, batch: int, size: int, frames: int) -> dict[str, Any]:
    height, width = token_side(size)
    return {
        "hidden_states": list(clip(sample, batch, size, 4, frames)),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": list(sample(batch, TEXT, 24)),
        "encoder_hidden_states_image": sample(batch, 3, 1280),
        "condition_latents": list(clip(sample, batch, size, 8, frames)),
        "seq_len": frames * height * width,
    }


def create_masks_eagerly(transformer: Any) -> None:
    """Keep diffusers from compiling the function that creates the block mask, which takes half a minute."""
    create_mask = transformer.create_mask

    def create_mask_eagerly(*args: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return create_mask(*args)

    transformer.create_mask = create_mask_eagerly


@video(
    "WanAnimate2Transformer3DModel",
    ANIMATE2,
    prepare=create_masks_eagerly,
    note="reads a KV cache of the driving video; keeps block masks and rotary tables on itself",
)
def wan_animate2(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    cache = WanAnimate2KVCache(3)
    for layer in cache.layer_caches:
        layer.store(sample(batch, 2 * height * width, 2, 16), sample(batch, 2 * height * width, 2, 16))
    return animate2(sample, batch, size, frames=3) | {
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "reference_grid_sizes": torch.tensor([[2, height, width]] * batch),
        "origin_len": 4,
        "origin_area": [16 * height, 16 * width],
    }


@video("WanAnimate2Transformer3DModel[kv]", ANIMATE2, note="writes a KV cache; the timestep is ignored")
def wan_animate2_extract(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return animate2(sample, batch, size, frames=2) | {
        "kv_cache": WanAnimate2KVCache(3),
        "kv_cache_mode": "extract",
        "offset_grid_sizes": torch.tensor([[2, *token_side(size)]] * batch),
    }


video("SkyReelsV2Transformer3DModel", WAN)(wan)


@video(
    "SkyReelsV2Transformer3DModel[diffusion_forcing]",
    WAN | {"num_frame_per_block": 2},
    note="a timestep for every frame; causal in blocks of two frames",
)
def skyreels_forcing(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return wan(sample, batch, size) | {
        "hidden_states": clip(sample, batch, size, frames=4),
        "timestep": first_clean(batch, 4),
        "enable_diffusion_forcing": True,
    }


@video("AnyFlowTransformer3DModel", WAN, timestep_too=("r_timestep",), note="frames come before channels")
def anyflow(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    timesteps = torch.full((batch, FRAMES), 1000 * NOISE)
    return wan(sample, batch, size) | {
        "hidden_states": sample(batch, FRAMES, 4, *latent_side(size)),
        "timestep": timesteps,
        "r_timestep": timesteps.clone(),
    }


def far_cache(sample: InputSampler, batch: int) -> list[dict[str, Tensor]]:
    return [{name: sample(2, batch, 2, 64, 16) for name in ("full_cache", "compressed_cache")} for _ in range(3)]


@video(
    "AnyFlowFARTransformer3DModel",
    WAN,
    timestep_too=("r_timestep",),
    note="the second chunk of a video: reads a KV cache of the first; padded keys are attended to",
)
def anyflow_far(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    flags = {"num_cached_chunks": 1, "is_cache_step": False}
    cache = {"kv_cache": far_cache(sample, batch), "kv_cache_flag": flags}
    return anyflow(sample, batch, size) | {"chunk_partition": [1, FRAMES]} | cache


@video(
    "AnyFlowFARTransformer3DModel[train]",
    WAN | {"full_chunk_limit": 1},
    timestep_too=("r_timestep",),
    note="no KV cache, a block mask; the first chunk is compressed and not in the output",
)
def anyflow_far_train(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return anyflow(sample, batch, size) | {"chunk_partition": [1, 1]}


@video(
    "AnyFlowFARTransformer3DModel[kv]",
    WAN,
    timestep_too=("r_timestep",),
    note="writes a KV cache in place and has no sample in its output",
)
def anyflow_far_write(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    flags = {"num_cached_chunks": 0, "is_cache_step": True}
    cache = {"kv_cache": far_cache(sample, batch), "kv_cache_flag": flags}
    return anyflow(sample, batch, size) | {"chunk_partition": [FRAMES]} | cache


@video("HeliosTransformer3DModel", WAN | {"rope_dim": AXES}, note="a clean history at three rates comes first")
def helios(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return wan(sample, batch, size) | {
        "indices_hidden_states": torch.arange(7, 9)[None],
        "indices_latents_history_long": torch.arange(0, 4)[None],
        "indices_latents_history_mid": torch.arange(4, 6)[None],
        "indices_latents_history_short": torch.arange(6, 7)[None],
        "latents_history_long": clip(sample, batch, size, frames=4),
        "latents_history_mid": clip(sample, batch, size, frames=2),
        "latents_history_short": clip(sample, batch, size, frames=1),
    }


# HunyuanVideo

HUNYUAN = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_single_layers": 3,
    "num_refiner_layers": 1,
}
HUNYUAN |= {"mlp_ratio": 2.0, "text_embed_dim": 24, "pooled_projection_dim": 12, "rope_axes_dim": AXES}


@video(
    "HunyuanVideoTransformer3DModel[token_replace]",
    HUNYUAN | {"image_condition_type": "token_replace"},
    note="tokens of the first frame are modulated as at t=0",
)
@video("HunyuanVideoTransformer3DModel", HUNYUAN)
def hunyuan_video(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": clip(sample, batch, size),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch).long(),
        "pooled_projections": sample(batch, 12),
        "guidance": at(batch, 6000.0),
    }


HUNYUAN_I2V = HUNYUAN | {"in_channels": 9, "guidance_embeds": False, "image_condition_type": "latent_concat"}


@video("HunyuanVideoTransformer3DModel[i2v]", HUNYUAN_I2V)
def hunyuan_video_i2v(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return hunyuan_video(sample, batch, size) | {"hidden_states": clip(sample, batch, size, 9), "guidance": None}


FRAMEPACK = HUNYUAN | {"has_image_proj": True, "image_proj_dim": 20, "has_clean_x_embedder": True}


@video("HunyuanVideoFramepackTransformer3DModel", FRAMEPACK, note="a clean history at three rates comes first")
def framepack(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return hunyuan_video(sample, batch, size) | {
        "image_embeds": sample(batch, 3, 20),
        "indices_latents": torch.arange(1, 3),
        "latents_clean": clip(sample, batch, size, frames=2),
        "indices_latents_clean": torch.tensor([0, 3]),
        "latents_history_2x": clip(sample, batch, size, frames=2),
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": clip(sample, batch, size, frames=4),
        "indices_latents_history_4x": torch.arange(6, 10),
    }


HUNYUAN15 = HEADS | {
    "in_channels": 9,
    "out_channels": 4,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
}
HUNYUAN15 |= {"text_embed_dim": 24, "text_embed_2_dim": 20, "image_embed_dim": 28, "rope_axes_dim": AXES}


@video(
    "HunyuanVideo15Transformer3DModel",
    HUNYUAN15,
    note="latents, a conditioning video and its mask, concatenated",
)
def hunyuan_video15(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 9, FRAMES, *token_side(size)),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch).long(),
        "encoder_hidden_states_2": sample(batch, 3, 20),
        "encoder_attention_mask_2": mask(batch, 3).long(),
        "image_embeds": sample(batch, 4, 28),
    }


MOTIF = HEADS | {
    "in_channels": 9,
    "out_channels": 4,
    "num_layers": 3,
    "num_single_layers": 4,
    "mlp_ratio": 2.0,
}
MOTIF |= {"text_embed_dim": 24, "rope_axes_dim": AXES}
MOTIF_DECODER: dict[str, Any] = {
    "enable_text_cross_attention_dual": True,
    "enable_text_cross_attention_single": True,
}


@video(
    "MotifVideoTransformer3DModel[decoder]",
    MOTIF | MOTIF_DECODER | {"num_decoder_layers": 2},
    note="the last two single blocks start again from the embedded latents",
)
@video("MotifVideoTransformer3DModel", MOTIF)
def motif(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": clip(sample, batch, size, 9),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch),
    }


# CogVideoX

COG = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 32,
    "text_embed_dim": 24,
    "num_layers": 3,
}
COG |= {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": TEXT}


@video("CogVideoXTransformer3DModel", COG, note="frames come before channels")
def cogvideox(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, FRAMES, 4, *latent_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "timestep": at(batch, 1000 * NOISE),
    }


COG15 = COG | {
    "patch_size_t": 2,
    "patch_bias": False,
    "ofs_embed_dim": 32,
    "use_rotary_positional_embeddings": True,
}


@video("CogVideoXTransformer3DModel[1.5]", COG15, note="patches of two frames")
def cogvideox15(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return cogvideox(sample, batch, size) | {
        "hidden_states": sample(batch, 2 * FRAMES, 4, *latent_side(size)),
        "image_rotary_emb": rotary(FRAMES * height * width, 16),
        "ofs": torch.full((1,), 2.0),
    }


CONSISID = COG | {"num_layers": 4, "use_rotary_positional_embeddings": True, "is_train_face": True}
CONSISID |= {
    "cross_attn_dim_head": 16,
    "cross_attn_num_heads": 2,
    "LFE_id_dim": 20,
    "LFE_vit_dim": 16,
    "LFE_depth": 2,
}
CONSISID |= {
    "LFE_dim_head": 8,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 2,
    "LFE_num_querie": 3,
    "LFE_output_dim": 21,
}


@video(
    "ConsisIDTransformer3DModel",
    CONSISID | {"LFE_num_scale": 2},
    note="perceiver_cross_attention reads the hidden states after blocks 0 and 2 of four",
)
def consisid(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return cogvideox(sample, batch, size) | {
        "image_rotary_emb": rotary(FRAMES * height * width, 16),
        "id_cond": sample(batch, 20),
        "id_vit_hidden": [sample(batch, 4, 16) for _ in range(2)],
    }


# Text in cross-attention

ALLEGRO: dict[str, Any] = {
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "in_channels": 4,
    "out_channels": 4,
}
ALLEGRO |= {"num_layers": 3, "cross_attention_dim": 24, "caption_channels": 24}


@video("AllegroTransformer3DModel", ALLEGRO | {"sample_height": 8, "sample_width": 8, "sample_frames": 2})
def allegro(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    grid = torch.meshgrid(*map(torch.arange, (FRAMES, height, width)), indexing="ij")
    cos, sin = rotary(8, 4)
    return {
        "hidden_states": clip(sample, batch, size),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch).long(),
        "timestep": at(batch, 1000 * NOISE),
        "image_rotary_emb": (((cos, sin),) * 3, tuple(axis.flatten()[None] for axis in grid)),
    }


LATTE = HEADS | {
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 3,
    "cross_attention_dim": 32,
    "attention_bias": True,
}
LATTE |= {"sample_size": 8, "patch_size": 2, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000}
LATTE |= {
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "caption_channels": 24,
    "video_length": FRAMES,
}


@video("LatteTransformer3DModel", LATTE, note="blocks over space and over time alternate, reshaped in between")
def latte(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": clip(sample, batch, size),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
    }


SANA = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
}
SANA |= {"num_layers": 3, "cross_attention_dim": 32, "caption_channels": 24}


@video("SanaVideoTransformer3DModel", SANA)
def sana_video(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return latte(sample, batch, size) | {"encoder_attention_mask": mask(batch).long()}


SANA_WM: dict[str, Any] = {"in_channels": 4, "num_layers": 4, "hidden_size": 32, "num_attention_heads": 2}
SANA_WM |= {
    "softmax_every_n": 2,
    "linear_head_dim": 16,
    "chunk_plucker_channels": 6,
    "caption_channels": 24,
    "mlp_ratio": 2.0,
}


@video(
    "SanaWMTransformer3DModel",
    SANA_WM,
    note="a world model: camera poses; the first frame is given and clean",
)
def sana_wm(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    poses = torch.eye(4).repeat(batch, FRAMES, 1, 1)
    poses[:, :, :3, 3] = sample(batch, FRAMES, 3)
    lens = torch.tensor([5.0, 5.0, width / 2, height / 2]).expand(batch, FRAMES, 4)
    return {
        "hidden_states": sample(batch, 4, FRAMES, height, width),
        "timestep": first_clean(batch, FRAMES)[:, None],
        "encoder_hidden_states": sample(batch, 1, TEXT, 24),
        "mask": mask(batch).long(),
        "camera_conditions": torch.cat([poses.flatten(2), lens], dim=-1),
        "chunk_plucker": sample(batch, 6, FRAMES, height, width),
    }


COSMOS = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
}
COSMOS |= {
    "adaln_lora_dim": 8,
    "max_size": (4, 16, 16),
    "rope_scale": (1.0, 1.0, 1.0),
    "concat_padding_mask": False,
}


@video("CosmosTransformer3DModel", COSMOS, timestep_scale=1.0, note="a padding mask would need torchvision")
def cosmos(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": clip(sample, batch, size),
        "timestep": at(batch, NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "fps": 16,
    }


@video(
    "CosmosTransformer3DModel[controlnet]",
    COSMOS | {"num_layers": 4, "controlnet_block_every_n": 2},
    timestep_scale=1.0,
    note="residuals go into blocks 0 and 2 as an argument",
)
def cosmos_controlnet(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    added = [0.3 * sample(batch, FRAMES * height * width, 32) for _ in range(2)]
    return cosmos(sample, batch, size) | {"block_controlnet_hidden_states": added}


# Text next to the video

COSMOS3: dict[str, Any] = {"head_dim": 16, "hidden_size": 32, "intermediate_size": 64, "latent_channel": 4}
COSMOS3 |= {
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "patch_latent_dim": 16,
}
COSMOS3 |= {"vocab_size": 32, "rope_axes_dim": (4, 2, 2)}


@video(
    "Cosmos3OmniTransformer",
    COSMOS3,
    latent="vision_tokens",
    timestep="vision_timesteps",
    note="one sequence without a batch axis: the prompt, then every video of the batch",
)
def cosmos3(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    tokens = batch * FRAMES * height * width
    positions = torch.arange(TEXT, TEXT + tokens)
    return {
        "input_ids": sample.ints(32, TEXT),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.arange(TEXT + tokens).expand(3, -1),
        "und_len": TEXT,
        "sequence_length": TEXT + tokens,
        "vision_tokens": [clip(sample, 1, size) for _ in range(batch)],
        "vision_token_shapes": [(FRAMES, height, width)] * batch,
        "vision_sequence_indexes": positions,
        "vision_mse_loss_indexes": positions,
        "vision_timesteps": at(tokens, 1000 * NOISE),
        "vision_noisy_frame_indexes": [torch.arange(FRAMES)] * batch,
    }


EASY = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "sample_width": 8,
    "sample_height": 8,
    "num_layers": 3,
}


@video(
    "EasyAnimateTransformer3DModel",
    EASY | {"mmdit_layers": 2, "time_embed_dim": 32, "text_embed_dim": 24},
    note="the last block shares its weights between text and video",
)
def easy_animate(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return latte(sample, batch, size)


MOCHI = HEADS | {
    "num_layers": 3,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "text_embed_dim": 24,
    "time_embed_dim": 32,
}


@video("MochiTransformer3DModel", MOCHI, timestep_flipped=True, note="takes 1 - t")
def mochi(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return latte(sample, batch, size) | {
        "timestep": at(batch, 1000 * (1 - NOISE)),
        "encoder_attention_mask": mask(batch),
    }


LTX = HEADS | {
    "in_channels": 8,
    "out_channels": 8,
    "cross_attention_dim": 32,
    "num_layers": 3,
    "caption_channels": 24,
}


@video("LTXVideoTransformer3DModel", LTX)
def ltx(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return {
        "hidden_states": sample(batch, FRAMES * height * width, 8),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch).long(),
        "timestep": at(batch, 1000 * NOISE),
        "num_frames": FRAMES,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


LTX2 = LTX | {"audio_in_channels": 6, "audio_out_channels": 6, "audio_num_attention_heads": 2}
LTX2 |= {"audio_attention_head_dim": 8, "audio_cross_attention_dim": 16}


@video("LTX2VideoTransformer3DModel", LTX2, note="video and audio: two streams in, two out")
def ltx2(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = ltx(sample, batch, size)
    del inputs["rope_interpolation_scale"]
    return inputs | {
        "audio_hidden_states": sample(batch, 6, 6),
        "audio_encoder_hidden_states": sample(batch, TEXT, 24),
        "audio_encoder_attention_mask": mask(batch).long(),
        "fps": 24.0,
        "audio_num_frames": 6,
    }


@video("LTX2VideoTransformer3DModel[stg]", LTX2 | {"perturbed_attn": True}, note="block 1 skips attention")
def ltx2_stg(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return ltx2(sample, batch, size) | {"spatio_temporal_guidance_blocks": [1]}


REFINER_NOTE = "holds the weights of the audio half of LTX-2 without using them"


@video("SanaWMLTX2RefinerTransformer3DModel", LTX2, note=REFINER_NOTE)
def sana_wm_refiner(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = ltx(sample, batch, size)
    tokens = inputs["hidden_states"].shape[1]
    kept = ("hidden_states", "encoder_hidden_states", "encoder_attention_mask")
    return {name: inputs[name] for name in kept} | {
        "timestep": torch.full((batch, tokens), 1000 * NOISE),
        "video_rotary_emb": tuple(part.expand(batch, -1, -1) for part in rotary(tokens, 32)),
    }


@video("SanaWMLTX2RefinerTransformer3DModel[kv]", LTX2, note=f"writes keys and values; {REFINER_NOTE}")
def sana_wm_refiner_capture(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    cache = {"kv_cache": SanaWMRefinerKVCache(3), "kv_cache_mode": "capture_pre_rope"}
    return sana_wm_refiner(sample, batch, size) | cache


KANDINSKY: dict[str, Any] = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 24,
    "in_text_dim2": 12,
    "time_dim": 32,
}
KANDINSKY |= {"model_dim": 32, "ff_dim": 64, "num_text_blocks": 3, "num_visual_blocks": 3, "axes_dims": AXES}


@video("Kandinsky5Transformer3DModel", KANDINSKY, note="channels last")
def kandinsky5(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, FRAMES, *latent_side(size), 4),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "pooled_projections": sample(batch, 12),
        "timestep": at(batch, 1000 * NOISE),
        "visual_rope_pos": tuple(map(torch.arange, (FRAMES, *token_side(size)))),
        "text_rope_pos": torch.arange(TEXT),
    }


@video("Kandinsky6Transformer3DModel[no_audio]", KANDINSKY | {"in_audio_dim": 6, "out_audio_dim": 6})
def kandinsky6_silent(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, FRAMES, *latent_side(size), 9),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch),
        "pooled_projections": sample(batch, 12),
        "timestep": at(batch, 1000 * NOISE),
    }


@video(
    "Kandinsky6Transformer3DModel",
    KANDINSKY | {"in_audio_dim": 6, "out_audio_dim": 6},
    note="channels last; latents, a conditioning video and its mask; two streams in, two out",
)
def kandinsky6(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return kandinsky6_silent(sample, batch, size) | {"audio_hidden_states": sample(batch, 6, 6)}


SR: dict[str, Any] = {"in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 32, "model_dim": 32, "ff_dim": 64}


@video("Kandinsky6SRTransformer3DModel", SR | {"num_visual_blocks": 3, "axes_dims": AXES}, note="no text")
def kandinsky6_sr(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, FRAMES, 8, 8 + 8 * size, 9),
        "timestep": at(batch, 1000 * NOISE),
    }


H3 = HEADS | {
    "hidden_size": 32,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "ffn_dim": 64,
    "in_channels": 4,
    "text_dim": 24,
}
H3 |= {
    "audio_in_channels": 6,
    "freq_dim": 32,
    "time_embed_hidden_dim": 32,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}


@video(
    "MiniMaxH3Transformer3DModel",
    H3,
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t; text, keyframe, sound and video in one sequence; one timestep per noise level",
)
def minimax_h3(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    frame = height * width
    rows = torch.arange(TEXT + 6 + (1 + FRAMES) * frame)
    text, keyframe, sound, frames = rows.tensor_split([TEXT, TEXT + frame, TEXT + frame + 6])
    tags = torch.zeros_like(rows)
    tags[text], tags[sound] = 1, 2
    return {
        "hidden_states": sample(batch, (1 + FRAMES) * frame, 16),
        "audio_hidden_states": sample(batch, 6, 6),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "timestep": torch.tensor([1 - NOISE, 1.0]),
        "timestep_indices": torch.isin(rows, keyframe).long(),
        "token_tags": tags,
        "position_ids": rows[:, None].expand(-1, 3).double(),
        "video_indices": torch.cat([keyframe, frames]),
        "audio_indices": sound,
        "text_indices": text,
    }
