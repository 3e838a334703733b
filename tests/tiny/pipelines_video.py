"""Tiny, real, randomly initialized video and audio pipelines."""

from __future__ import annotations

from typing import Any

import diffusers as d
import torch
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from .pipelines_image import (
    HEADS,
    TOKENS,
    WIDTH,
    Inputs,
    flow,
    guided,
    guided_masked,
    image,
    masks,
    model,
    noise,
    pair,
    pipeline,
    prompts,
    square,
    tiny,
)


def filmed(inputs: Inputs, frames: int = 9, **extra: Any) -> Inputs:
    """The inputs of an image, for that many frames."""
    return lambda side, guidance: inputs(side, guidance) | {"num_frames": frames} | extra


# Wan
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
}
WAN |= {"text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32}
WAN_IMAGE = WAN | {"in_channels": 12}


def unipc() -> d.UniPCMultistepScheduler:
    return d.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def wan(cls: type[d.DiffusionPipeline] = d.WanPipeline, config: dict[str, Any] = WAN, **parts: Any):
    return pipeline(cls, transformer=model(d.WanTransformer3DModel, **config), scheduler=unipc(), **parts)


def wan22() -> d.DiffusionPipeline:
    return wan(transformer_2=model(d.WanTransformer3DModel, seed=1, **WAN), boundary_ratio=0.875)


def wan_vae() -> torch.nn.Module:
    scaling = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return model(d.AutoencoderKLWan, base_dim=2, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **scaling)


def wan_image() -> d.DiffusionPipeline:
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    size = {"shortest_edge": 16}
    processor = CLIPImageProcessor(size=size, crop_size={"height": 16, "width": 16})
    parts = {"image_encoder": model(lambda: CLIPVisionModel(config)), "image_processor": processor}
    return wan(
        d.WanImageToVideoPipeline,
        WAN_IMAGE | {"image_dim": 16, "added_kv_proj_dim": 24},
        vae=wan_vae(),
        **parts,
    )


def wan22_image() -> d.DiffusionPipeline:
    low = model(d.WanTransformer3DModel, seed=1, **WAN_IMAGE)
    return wan(d.WanImageToVideoPipeline, WAN_IMAGE, transformer_2=low, boundary_ratio=0.9, vae=wan_vae())


def wan_clip_inputs(side: int, guidance: bool) -> dict[str, Any]:
    """512 text tokens, because the model treats everything before the last 512 tokens as image tokens."""
    text = {
        "prompt_embeds": noise(1, 512, WIDTH, seed=1),
        "negative_prompt_embeds": noise(1, 512, WIDTH, seed=2),
    }
    return wan_image_inputs(side, guidance) | text


def wan_image_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return filmed(guided(5.0))(side, guidance) | {"image": image(side)}


def wan_vace() -> d.DiffusionPipeline:
    transformer = model(d.WanVACETransformer3DModel, **WAN, vace_layers=[0, 2], vace_in_channels=72)
    return pipeline(d.WanVACEPipeline, transformer=transformer, scheduler=unipc(), vae=wan_vae())


def wan_vace_inputs(side: int, guidance: bool) -> dict[str, Any]:
    video = noise(1, 9, 3, side, side, seed=5).sigmoid()
    return filmed(guided(5.0), conditioning_scale=[1.0, 0.7])(side, guidance) | {"video": video}


def stop_guidance(pipe: d.DiffusionPipeline, step: int, timestep: torch.Tensor, kwargs: dict[str, Any]):
    """A callback that ends guidance halfway, as the cutoff callbacks of diffusers do."""
    if step + 1 == pipe.num_timesteps // 2:
        pipe._guidance_scale = 1.0
    return kwargs


# Others
def ltx() -> d.DiffusionPipeline:
    config = HEADS | {"in_channels": 8, "out_channels": 8, "num_layers": 3}
    transformer = model(d.LTXVideoTransformer3DModel, **config, cross_attention_dim=16, caption_channels=WIDTH)
    shift = {"base_image_seq_len": 1024, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1}
    scheduler = flow(**shift, use_dynamic_shifting=True)
    return pipeline(d.LTXPipeline, transformer=transformer, scheduler=scheduler)


COGVIDEOX_NOISE = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}


def cogvideox(scheduler: Any = None, **config: Any) -> d.DiffusionPipeline:
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
    }
    text = {"text_embed_dim": WIDTH, "max_text_seq_length": TOKENS, "time_embed_dim": 16}
    sample = {"sample_width": 8, "sample_height": 8, "sample_frames": 9}
    transformer = model(d.CogVideoXTransformer3DModel, **sizes, **text, **sample, **config)
    ddim = d.CogVideoXDDIMScheduler(snr_shift_scale=3.0, **COGVIDEOX_NOISE)
    return pipeline(d.CogVideoXPipeline, transformer=transformer, scheduler=scheduler or ddim)


def cogvideox_5b() -> d.DiffusionPipeline:
    scheduler = d.CogVideoXDPMScheduler(snr_shift_scale=1.0, **COGVIDEOX_NOISE)
    return cogvideox(scheduler, use_rotary_positional_embeddings=True)


def hunyuan_video() -> d.DiffusionPipeline:
    sizes = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 3}
    text = {"text_embed_dim": WIDTH, "pooled_projection_dim": WIDTH, "num_refiner_layers": 1}
    transformer = model(d.HunyuanVideoTransformer3DModel, **sizes, **text, rope_axes_dim=(4, 2, 2))
    return pipeline(d.HunyuanVideoPipeline, transformer=transformer, scheduler=flow(shift=7.0))


def hunyuan_video_inputs(side: int, guidance: bool) -> dict[str, Any]:
    embeds = prompts(prompt_embeds=1) | {"pooled_prompt_embeds": noise(1, WIDTH, seed=3)}
    scale = {"num_frames": 9, "guidance_scale": 6.0 if guidance else 1.0}
    return square(side) | embeds | masks("prompt_attention_mask") | scale


def mochi() -> d.DiffusionPipeline:
    sizes = HEADS | {"in_channels": 12, "num_layers": 3, "text_embed_dim": WIDTH, "time_embed_dim": 16}
    transformer = model(d.MochiTransformer3DModel, **sizes, pooled_projection_dim=16, max_sequence_length=TOKENS)
    return pipeline(d.MochiPipeline, transformer=transformer, scheduler=flow(invert_sigmas=True))


COSMOS = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
}
COSMOS |= {
    "text_embed_dim": WIDTH,
    "adaln_lora_dim": 8,
    "max_size": (4, 16, 16),
    "concat_padding_mask": False,
}


class Guardrail(d.ModelMixin):
    """Replaces the Cosmos guardrail; these pipelines have no text and no pixels to check."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def cosmos(cls: type[d.DiffusionPipeline], scheduler: Any, **config: Any) -> d.DiffusionPipeline:
    parts = {"transformer": model(d.CosmosTransformer3DModel, **COSMOS, **config), "scheduler": scheduler}
    return pipeline(cls, safety_checker=Guardrail(), **parts)


def cosmos1() -> d.DiffusionPipeline:
    edm = {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5, "final_sigmas_type": "sigma_min"}
    return cosmos(d.CosmosTextToWorldPipeline, d.EDMEulerScheduler(**edm))


def cosmos2() -> d.DiffusionPipeline:
    scheduler = flow(use_karras_sigmas=True)
    return cosmos(d.Cosmos2TextToImagePipeline, scheduler, extra_pos_embed_type=None, rope_scale=(1.0, 4.0, 4.0))


def stable_audio() -> d.DiffusionPipeline:
    sizes = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 3, "num_key_value_attention_heads": 1}
    text = {
        "cross_attention_dim": 16,
        "cross_attention_input_dim": WIDTH,
        "global_states_input_dim": 2 * WIDTH,
    }
    transformer = model(d.StableAudioDiTModel, **sizes, **text, sample_size=16, time_proj_dim=16)
    seconds = {"text_encoder_dim": WIDTH, "conditioning_dim": WIDTH, "min_value": 0, "max_value": 512}
    codec = {
        "encoder_hidden_size": 4,
        "decoder_channels": 4,
        "decoder_input_channels": 4,
        "channel_multiples": [1, 1],
    }
    return pipeline(
        d.StableAudioPipeline,
        transformer=transformer,
        projection_model=model(StableAudioProjectionModel, **seconds),
        vae=model(d.AutoencoderOobleck, **codec, downsampling_ratios=[2, 4], sampling_rate=32),
        scheduler=d.EDMDPMSolverMultistepScheduler(
            sigma_min=0.3,
            sigma_max=500.0,
            sigma_data=1.0,
            sigma_schedule="exponential",
            prediction_type="v_prediction",
        ),
    )


def stable_audio_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return pair() | {"audio_end_in_s": side / 32, "guidance_scale": 7.0 if guidance else 1.0}


VIDEO = (
    tiny("WanPipeline", wan, filmed(guided(5.0)), "cond uncond", "begin 0; context; sequential; same; t"),
    tiny(
        "WanPipeline[cutoff]",
        wan,
        filmed(guided(5.0), callback_on_step_end=stop_guidance),
        "cond uncond",
        "begin 0; context; sequential; same; t; uncond on steps 0 to 5 of 12",
    ),
    tiny(
        "WanPipeline[ti2v]",
        lambda: wan(expand_timesteps=True),
        filmed(guided(5.0)),
        "cond uncond",
        "begin 0; context; sequential; same; t expanded to one per token",
    ),
    tiny(
        "WanPipeline[2.2]",
        wan22,
        filmed(guided(5.0)),
        "cond uncond",
        "begin 0; context; sequential; same; t; transformer_2 from step 4 of 12",
    ),
    tiny(
        "WanPipeline[2.2,low=1]",
        wan22,
        filmed(guided(5.0), guidance_scale_2=1.0),
        "cond uncond",
        "begin 0; context; sequential; same; t; as 2.2, and uncond still runs at scale 1",
    ),
    tiny(
        "WanImageToVideoPipeline",
        wan_image,
        wan_clip_inputs,
        "cond uncond",
        "no begin; context; sequential; same; t; image latents are channels",
    ),
    tiny(
        "WanImageToVideoPipeline[2.2]",
        wan22_image,
        wan_image_inputs,
        "cond uncond",
        "no begin; context; sequential; same; t; transformer_2 from step 4 of 12",
    ),
    tiny("WanVACEPipeline", wan_vace, wan_vace_inputs, "cond uncond", "no begin; context; sequential; same; t"),
    tiny(
        "LTXPipeline",
        ltx,
        filmed(guided_masked(3.0), frames=17),
        "cond_uncond",
        "no begin; context; batched; same; t",
        side=128,
    ),
    tiny(
        "CogVideoXPipeline",
        cogvideox,
        filmed(guided(6.0)),
        "cond_uncond",
        "no begin; context; batched; same; t; no sigmas",
    ),
    tiny(
        "CogVideoXPipeline[5b]",
        cogvideox_5b,
        filmed(guided(6.0), use_dynamic_cfg=True),
        "cond_uncond",
        "no begin; context; batched; same; t; stochastic, scale of guidance varies",
    ),
    tiny(
        "HunyuanVideoPipeline",
        hunyuan_video,
        hunyuan_video_inputs,
        "cond",
        "begin 0; context; embedded; same; t",
    ),
    tiny(
        "MochiPipeline",
        mochi,
        filmed(guided_masked(4.5), frames=13),
        "cond_uncond",
        "begin 0; context; batched; same; t, which rises from 0",
    ),
    tiny(
        "CosmosTextToWorldPipeline",
        cosmos1,
        filmed(guided(7.0)),
        "1 2",
        "no begin; no context; sequential; same; log(sigma)/4; two scheduler.step a step",
    ),
    tiny(
        "Cosmos2TextToImagePipeline",
        cosmos2,
        guided(7.0),
        "1 2",
        "no begin; no context; sequential; same; sigma/(sigma+1)",
    ),
    tiny(
        "StableAudioPipeline",
        stable_audio,
        stable_audio_inputs,
        "batched",
        "no begin; no context; batched; same; log(sigma)/4, one for the batch; size has no effect",
    ),
)
