"""The other tiny transformers: further image models, sound, early DiTs, priors, parts of U-Nets, proteins."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import nn

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
    rotary,
    token_side,
)
from .models_image import JOINT, qwen

other = ModelRegistry()


def duration(size: int) -> int:
    """Length of a sound in latents."""
    return 12 + 4 * size


# CogView, GLM-Image

COGVIEW = HEADS | {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "text_embed_dim": 24,
}
COGVIEW |= {"time_embed_dim": 32, "condition_dim": 8}


@other("CogView3PlusTransformer2DModel", COGVIEW | {"pos_embed_max_size": 8, "sample_size": 8})
@other(
    "CogView4Transformer2DModel",
    COGVIEW | {"pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)},
)
def cogview(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = latent_side(size)
    return {
        "hidden_states": sample(batch, 4, height, width),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "timestep": at(batch, 1000 * NOISE),
        "original_size": torch.tensor([[8.0 * height, 8.0 * width]] * batch),
        "target_size": torch.tensor([[8.0 * height, 8.0 * width]] * batch),
        "crop_coords": torch.zeros(batch, 2),
    }


GLM = COGVIEW | {"prior_vq_quantizer_codebook_size": 32}


@other("GlmImageTransformer2DModel", GLM)
def glm(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    inputs = cogview(sample, batch, size)
    del inputs["original_size"]
    return inputs | {
        "prior_token_id": sample.ints(32, batch, height * width),
        "prior_token_drop": torch.zeros(batch, height * width, dtype=torch.bool),
    }


@other("GlmImageTransformer2DModel[kv]", GLM, note="writes a KV cache, which grows at every call; no text")
def glm_write(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    cache = GlmImageKVCache(3)
    cache.set_mode("write")
    inputs = glm(sample, batch, size)
    return inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :0], "kv_caches": cache}


@other("GlmImageTransformer2DModel[kv_cached]", GLM, note="reads a KV cache of four tokens")
def glm_read(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    cache = GlmImageKVCache(3)
    for layer in cache.caches:
        layer.store(sample(1, 4, 2, 16), sample(1, 4, 2, 16))
    cache.set_mode("read")
    return glm(sample, batch, size) | {"kv_caches": cache}


# HiDream, HunyuanImage

HIDREAM = HEADS | {"patch_size": 2, "in_channels": 4, "caption_channels": [20, 24], "text_emb_dim": 12}
HIDREAM |= {"num_routed_experts": 4, "axes_dims_rope": AXES, "max_resolution": (16, 16)}


@other(
    "HiDreamImageTransformer2DModel",
    HIDREAM | {"num_layers": 3, "num_single_layers": 3, "llama_layers": list(range(6))},
    timestep="timesteps",
)
def hidream(sample: InputSampler, batch: int, size: int, layers: int = 6) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "timesteps": at(batch, 1000 * NOISE),
        "encoder_hidden_states_t5": sample(batch, TEXT, 20),
        "encoder_hidden_states_llama3": sample(layers, batch, TEXT, 24),
        "pooled_embeds": sample(batch, 12),
    }


@other(
    "HiDreamImageTransformer2DModel[deep]",
    HIDREAM | {"num_layers": 4, "num_single_layers": 6, "llama_layers": list(range(10))},
    timestep="timesteps",
)
def hidream_deep(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return hidream(sample, batch, size, layers=10)


HUNYUAN = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_single_layers": 3,
    "num_refiner_layers": 1,
}


@other(
    "HunyuanImageTransformer2DModel",
    HUNYUAN | {"mlp_ratio": 2.0, "text_embed_dim": 24, "text_embed_2_dim": 20, "rope_axes_dim": (8, 8)},
)
def hunyuan_image(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *token_side(size)),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch),
        "encoder_hidden_states_2": sample(batch, 3, 20),
        "encoder_attention_mask_2": mask(batch, 3),
    }


# One sequence of text and image

IDEOGRAM = HEADS | {
    "in_channels": 16,
    "num_layers": 3,
    "intermediate_size": 64,
    "adaln_dim": 16,
    "llm_features_dim": 24,
}


@other(
    "Ideogram4Transformer2DModel",
    IDEOGRAM | {"mrope_section": (4, 2, 2)},
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t; hidden_states has rows for the text tokens too",
)
def ideogram4(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    length = TEXT + height * width
    indicator = torch.full((batch, length), 2)
    indicator[:, :TEXT] = 3
    text_ids = torch.arange(TEXT)[:, None].expand(TEXT, 3)
    image_ids = grid_ids(height, width).long() + 65536
    return {
        "hidden_states": torch.cat([torch.zeros(batch, TEXT, 16), sample(batch, height * width, 16)], dim=1),
        "encoder_hidden_states": sample(batch, length, 24),
        "timestep": at(batch, 1 - NOISE),
        "position_ids": torch.cat([text_ids, image_ids]).expand(batch, length, 3),
        "segment_ids": torch.zeros(batch, length, dtype=torch.long),
        "indicator": indicator,
    }


KREA = HEADS | {
    "in_channels": 16,
    "num_layers": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "timestep_embed_dim": 32,
}
KREA |= {
    "text_hidden_dim": 24,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
}
KREA |= {"text_intermediate_size": 48, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}


@other("Krea2Transformer2DModel", KREA | {"axes_dims_rope": AXES}, timestep_scale=1.0)
def krea2(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return {
        "hidden_states": sample(batch, height * width, 16),
        "encoder_hidden_states": sample(batch, TEXT, 3, 24),
        "encoder_attention_mask": mask(batch),
        "timestep": at(batch, NOISE),
        "position_ids": torch.cat([torch.zeros(TEXT, 3), grid_ids(height, width)]),
    }


ERNIE: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 3, "ffn_hidden_size": 64}
ERNIE |= {"in_channels": 16, "out_channels": 16, "text_in_dim": 24, "rope_axes_dim": AXES}


@other("ErnieImageTransformer2DModel", ERNIE, note="sequence first: the blocks see (tokens, batch, channels)")
def ernie(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 16, *token_side(size)),
        "timestep": at(batch, 1000 * NOISE),
        "text_bth": sample(batch, TEXT, 24),
        "text_lens": mask(batch).sum(dim=1),
    }


OMNIGEN: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
OMNIGEN |= {
    "intermediate_size": 64,
    "num_layers": 3,
    "pad_token_id": 0,
    "vocab_size": 32,
    "pos_embed_max_size": 16,
}
OMNIGEN |= {"time_step_dim": 32, "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}


@other(
    "OmniGenTransformer2DModel",
    OMNIGEN,
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t; the prompt comes as token ids; one image of four tokens stands in it",
)
def omnigen(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    length = TEXT + 4 + 1 + height * width
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "timestep": at(batch, 1 - NOISE),
        "input_ids": sample.ints(32, batch, TEXT + 4),
        "input_img_latents": [sample(1, 4, 4, 4) for _ in range(batch)],
        "input_image_sizes": {row: [(1, 5)] for row in range(batch)},
        "attention_mask": torch.ones(batch, length, length),
        "position_ids": torch.arange(length).expand(batch, length),
    }


# Image tokens that attend to the text, or run next to it

PRX: dict[str, Any] = {
    "in_channels": 4,
    "context_in_dim": 24,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 3,
}


@other("PRXTransformer2DModel", PRX | {"axes_dim": [8, 8]}, timestep_scale=1.0)
def prx(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "attention_mask": mask(batch),
        "timestep": at(batch, NOISE),
    }


@torch.no_grad()
def fill_experts(model: nn.Module) -> None:
    """diffusers leaves the experts of Nucleus as uninitialized memory."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.normal_(std=0.2)


NUCLEUS = JOINT | {
    "patch_size": 2,
    "out_channels": 4,
    "num_layers": 6,
    "num_key_value_heads": 1,
    "mlp_ratio": 6.0,
}


@other(
    "NucleusMoEImageTransformer2DModel",
    NUCLEUS | {"num_experts": 4, "moe_intermediate_dim": 16, "capacity_factors": 2.0},
    fill_experts,
    timestep_scale=1.0,
    note="blocks 3 and 4 of six are mixtures of experts",
)
def nucleus(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    inputs = qwen(sample, batch, size)
    return inputs | {"img_shapes": [shapes[0] for shapes in inputs["img_shapes"]]}


JOY: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 24,
    "num_layers": 3,
}
JOY |= {"mlp_width_ratio": 2.0, "rope_dim_list": list(AXES)}


@other(
    "JoyImageEditTransformer3DModel",
    JOY,
    note="the image to edit and the latents are two items of one input",
)
def joy_edit(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 2, 4, 1, *latent_side(size)),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
    }


@other(
    "JoyImageEditPlusTransformer3DModel",
    JOY,
    note="patches in, patches out; shape_list says where they belong",
)
def joy_edit_plus(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return {
        "hidden_states": sample(batch, height * width + 4, 4, 1, 2, 2),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_hidden_states_mask": mask(batch).float(),
        "shape_list": [[(1, height, width), (1, 2, 2)]] * batch,
    }


# Sound

ACE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
ACE |= {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "in_channels": 12,
    "audio_acoustic_hidden_dim": 4,
    "encoder_hidden_size": 24,
}


@other("AceStepTransformer1DModel", ACE | {"sliding_window": 2}, timestep_scale=1.0, timestep_too=("timestep_r",))
def ace_step(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, duration(size), 4),
        "timestep": at(batch, NOISE),
        "timestep_r": at(batch, NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "context_latents": sample(batch, duration(size), 8),
    }


LONGCAT: dict[str, Any] = {
    "dit_dim": 32,
    "dit_depth": 3,
    "dit_heads": 2,
    "dit_text_dim": 24,
    "latent_dim": 4,
    "ff_mult": 2.0,
}


@other(
    "LongCatAudioDiTTransformer",
    LONGCAT,
    timestep_scale=1.0,
    note="a long skip from the embedding to the end",
)
def longcat_audio(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, duration(size), 4),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch),
        "timestep": at(batch, NOISE),
        "attention_mask": mask(batch, duration(size)),
        "latent_cond": sample(batch, duration(size), 4),
    }


STABLE = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 3, "num_key_value_attention_heads": 1}
STABLE |= {
    "cross_attention_dim": 16,
    "time_proj_dim": 16,
    "global_states_input_dim": 12,
    "cross_attention_input_dim": 24,
}


@other("StableAudioDiTModel", STABLE, timestep_scale=1.0, note="one timestep for the whole batch")
def stable_audio(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, duration(size)),
        "timestep": at(1, NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "global_hidden_states": sample(batch, 1, 12),
        "rotary_embedding": rotary(duration(size) + 1, 8),
    }


STABLE3: dict[str, Any] = {
    "io_channels": 4,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 2,
    "cond_token_dim": 24,
}
STABLE3 |= {
    "global_cond_dim": 12,
    "local_add_cond_dim": 5,
    "timestep_features_dim": 16,
    "num_memory_tokens": 4,
}


@other("StableAudio3DiTModel", STABLE3, timestep_scale=1.0, note="memory tokens come before the latents")
def stable_audio3(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, duration(size)),
        "timestep": at(batch, NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch),
        "global_hidden_states": sample(batch, 12),
        "local_add_cond": sample(batch, 5, duration(size)),
    }


MUSIC = HEADS | {"in_channels": 4, "condition_dim": 24, "num_layers": 3, "ff_inner_dim": 64, "rotary_dim": 8}


@other(
    "MiniMaxMusic3Transformer1DModel",
    MUSIC | {"fourier_embedding_dim": 16},
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t; the timestep is a token of the sequence",
)
def minimax_music(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, duration(size)),
        "timestep": at(batch, 1 - NOISE),
        "encoder_hidden_states": sample(batch, duration(size), 24),
    }


DEPTH: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@other(
    "MiniMaxMusic3RVQDepthDecoder",
    DEPTH | {"audio_vocab_size": 16, "num_codebooks": 4},
    latent="inputs_embeds",
    timestep="",
    note="a language model over codebooks, no diffusion; its embeddings and heads are used outside",
)
def rvq_depth_decoder(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {"inputs_embeds": sample(batch, 4 + 2 * size, 32)}


FILM: dict[str, Any] = {
    "input_dims": 4,
    "targets_length": 16,
    "d_model": 32,
    "num_layers": 3,
    "num_heads": 2,
    "d_kv": 16,
    "d_ff": 64,
}


@other("T5FilmDecoder", FILM, latent="decoder_input_tokens", timestep="decoder_noise_time", timestep_scale=1.0)
def t5_film(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "encodings_and_masks": [(sample(batch, TEXT, 32), mask(batch)), (sample(batch, 3, 32), mask(batch, 3))],
        "decoder_input_tokens": sample(batch, duration(size), 4),
        "decoder_noise_time": at(batch, NOISE),
    }


# The first diffusion transformers

LATENT = HEADS | {"in_channels": 4, "num_layers": 3, "sample_size": 8, "patch_size": 2}


@other(
    "DiTTransformer2DModel",
    LATENT | {"num_embeds_ada_norm": 10},
    note="square only; a class label, no prompt",
)
def dit(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, 8 + 4 * size, 8 + 4 * size),
        "timestep": at(batch, 1000 * NOISE).long(),
        "class_labels": sample.ints(10, batch),
    }


PIXART = LATENT | {
    "out_channels": 8,
    "cross_attention_dim": 32,
    "caption_channels": 24,
    "use_additional_conditions": False,
}


@other("PixArtTransformer2DModel", PIXART)
def pixart(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_attention_mask": mask(batch).long(),
        "timestep": at(batch, 1000 * NOISE),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


HUNYUAN_DIT = LATENT | {
    "num_layers": 6,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 32,
    "text_len": TEXT,
}
HUNYUAN_DIT |= {"cross_attention_dim_t5": 24, "pooled_projection_dim": 16, "text_len_t5": 4}


@other("HunyuanDiT2DModel", HUNYUAN_DIT, note="skips from the first blocks to the last, as in a U-Net")
def hunyuan_dit(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    height, width = token_side(size)
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "timestep": at(batch, 1000 * NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 32),
        "text_embedding_mask": mask(batch).long(),
        "encoder_hidden_states_t5": sample(batch, 4, 24),
        "text_embedding_mask_t5": mask(batch, 4).long(),
        "image_meta_size": torch.tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]] * batch),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": rotary(height * width, 16),
    }


@torch.no_grad()
def fill_pad_token(model: Any) -> None:
    """diffusers leaves the pad token of Lumina-Next as uninitialized memory."""
    model.pad_token.zero_()


LUMINA: dict[str, Any] = {
    "sample_size": 8,
    "hidden_size": 32,
    "num_layers": 3,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
}


@other(
    "LuminaNextDiT2DModel",
    LUMINA | {"multiple_of": 16, "cross_attention_dim": 24},
    fill_pad_token,
    timestep_scale=1.0,
    timestep_flipped=True,
    note="takes 1 - t",
)
def lumina_next(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 4, *latent_side(size)),
        "timestep": at(batch, 1 - NOISE),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "encoder_mask": mask(batch).long(),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 16, 16),
        "cross_attention_kwargs": {},  # the blocks unpack it, and its default is None
    }


# Priors and parts of U-Nets


@other(
    "PriorTransformer",
    HEADS | {"num_layers": 3, "embedding_dim": 24, "num_embeddings": TEXT},
    note="denoises the embedding of an image: one size only",
)
def prior(sample: InputSampler, batch: int, _size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 24),
        "timestep": at(batch, 1000 * NOISE).long(),
        "proj_embedding": sample(batch, 24),
        "encoder_hidden_states": sample(batch, TEXT, 24),
        "attention_mask": mask(batch),
    }


UNET = HEADS | {"in_channels": 32, "num_layers": 3, "norm_num_groups": 4, "cross_attention_dim": 24}


@other(
    "DreamLiteTransformer2DModel",
    UNET | {"qk_norm": "rms_norm", "use_linear_projection": True},
    timestep="",
    note="a part of a U-Net, whose other blocks get the timestep",
)
@other("Transformer2DModel", UNET, timestep="", note="a part of a U-Net, whose other blocks get the timestep")
def unet_part(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {
        "hidden_states": sample(batch, 32, *token_side(size)),
        "encoder_hidden_states": sample(batch, TEXT, 24),
    }


@other(
    "Transformer2DModel[ada_norm]",
    UNET | {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10},
    note="with a timestep and a class of its own",
)
def unet_part_with_time(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    known = {"timestep": at(batch, 1000 * NOISE).long(), "class_labels": sample.ints(10, batch)}
    return unet_part(sample, batch, size) | known


@other(
    "TransformerTemporalModel",
    HEADS | {"in_channels": 32, "num_layers": 3, "norm_num_groups": 4},
    timestep="",
    note="the motion module of a U-Net: attends over frames, gets neither timestep nor text",
)
def temporal_part(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return {"hidden_states": sample(3 * batch, 32, *token_side(size)), "num_frames": 3}


# Proteins

RFD4: dict[str, Any] = {
    "nlayers": 3,
    "token_dim": 32,
    "nheads": 2,
    "dim_cond": 16,
    "pair_repr_dim": 16,
    "latent_dim": 4,
}
RFD4 |= {
    "t_emb_dim": 16,
    "token_type_emb_dim": 8,
    "xt_pair_dist_dim": 8,
    "tri_mult_c": 8,
    "num_sequence_classes": 5,
}
RFD4 |= {"feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"), "recycle_conditioning_dim": 2}
RFD4 |= {"feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining")}
RFD4 |= {"feats_pair_repr": ("xt_bb_ca_pair_dists", "bond_mask")}
PROTEIN: dict[str, Any] = {
    "latent": "bb_ca",
    "timestep": "bb_ca_time",
    "timestep_too": ("local_latents_time",),
}
PROTEIN |= {"timestep_scale": 1.0, "timestep_flipped": True}


@other(
    "RFD4ProteinaTransformer",
    RFD4,
    **PROTEIN,
    note="takes 1 - t; pair_update_layers rewrite the pairs between the blocks",
)
def rfd4(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    tokens = 6 + 2 * size
    everything = torch.ones(batch, tokens, dtype=torch.bool)
    return {
        "bb_ca": sample(batch, tokens, 3),
        "local_latents": sample(batch, tokens, 4),
        "bb_ca_time": at(batch, 1 - NOISE),
        "local_latents_time": at(batch, 1 - NOISE),
        "padding_mask": mask(batch, tokens),
        "token_type": sample.ints(7, batch, tokens),
        "conditioning": {"is_in_context_conditioning": ~everything, "supports_local_latent": everything},
    }


@other("RFD4ProteinaTransformer[recycle]", RFD4, **PROTEIN, note="takes 1 - t; the stack runs twice")
def rfd4_recycle(sample: InputSampler, batch: int, size: int) -> dict[str, Any]:
    return rfd4(sample, batch, size) | {"recycle_depth": 2}
