"""Tiny, real, randomly initialized image pipelines, and the helpers that build every tiny pipeline."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers as d
import PIL.Image
import torch
from diffusers.callbacks import SD3CFGCutoffCallback
from diffusers.guiders import AdaptiveProjectedMixGuidance
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

TOKENS, WIDTH = 8, 16
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
Inputs = Callable[[int, bool], dict[str, Any]]


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline to build, the arguments to call it with, and what it does with its transformer."""

    name: str
    build: Callable[[], d.DiffusionPipeline]
    call: Callable[..., dict[str, Any]]
    branches: tuple[str, ...]
    note: str = ""


def tiny(
    name: str,
    build: Callable[[], d.DiffusionPipeline],
    inputs: Inputs,
    branches: str,
    note: str,
    side: int = 64,
) -> TinyPipeline:
    """Return an entry; `inputs(side, guidance)` returns the pipeline's own arguments, `size` adds half sides."""

    def call(steps: int = 12, seed: int = 0, guidance: bool = True, size: int = 0) -> dict[str, Any]:
        generator = torch.Generator("cpu").manual_seed(seed)
        common = {"num_inference_steps": steps, "generator": generator, "output_type": "latent"}
        return common | inputs(side + side // 2 * size, guidance)

    return TinyPipeline(name, build, call, tuple(branches.split()), note)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of diffusers, torch and transformers, but not those of holdover."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="diffusers|torch|transformers")
        yield


def model(cls: Callable[..., torch.nn.Module], seed: int = 0, gain: float = 1.0, **config: Any) -> torch.nn.Module:
    """Return a seeded model; parameters initialized to zero (gates, output layers) get small noise."""
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = cls(**config).eval()
        for layer in net.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.mul_(gain)
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return net


def pipeline(cls: type[d.DiffusionPipeline], **parts: Any) -> d.DiffusionPipeline:
    """Return the pipeline with None for every required component that is not given."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.name != "self"]
    return cls(**dict.fromkeys(required) | parts)


def flow(**config: Any) -> d.FlowMatchEulerDiscreteScheduler:
    return d.FlowMatchEulerDiscreteScheduler(**config)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """A seeded Gaussian tensor: a prompt, a latent, a video."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))


def image(side: int) -> PIL.Image.Image:
    pixels = noise(side, side, 3, seed=6).sigmoid().mul(255).to(torch.uint8)
    return PIL.Image.fromarray(pixels.numpy())


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def prompts(**names: int) -> dict[str, torch.Tensor]:
    """Embeddings by argument name; the value is the seed, so that a prompt and its negative prompt differ."""
    return {name: noise(1, TOKENS, WIDTH, seed=seed) for name, seed in names.items()}


def pair() -> dict[str, torch.Tensor]:
    return prompts(prompt_embeds=1, negative_prompt_embeds=2)


def pooled_pair() -> dict[str, torch.Tensor]:
    names = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return {name: noise(1, WIDTH, seed=seed) for name, seed in zip(names, (3, 4), strict=True)}


def masks(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1, TOKENS, dtype=torch.long) for name in names}


def pair_masks() -> dict[str, torch.Tensor]:
    return masks("prompt_attention_mask", "negative_prompt_attention_mask")


def guided(scale: float) -> Inputs:
    """A square image from a prompt and its negative prompt, at that guidance scale."""
    return lambda side, guidance: square(side) | pair() | {"guidance_scale": scale if guidance else 1.0}


def guided_masked(scale: float, **extra: Any) -> Inputs:
    return lambda side, guidance: guided(scale)(side, guidance) | pair_masks() | extra


# FLUX.1
FLUX_FLOW = {"shift": 3.0, "use_dynamic_shifting": True}
STREAMS = {"in_channels": 16, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": WIDTH} | HEADS
FLUX = STREAMS | {"pooled_projection_dim": WIDTH, "axes_dims_rope": (4, 2, 2)}


def flux(cls: type[d.DiffusionPipeline] = d.FluxPipeline, channels: int = 16, **parts: Any) -> d.DiffusionPipeline:
    transformer = model(d.FluxTransformer2DModel, **FLUX | {"in_channels": channels}, guidance_embeds=True)
    return pipeline(cls, transformer=transformer, scheduler=flow(**FLUX_FLOW), **parts)


def flux_controlnet() -> d.DiffusionPipeline:
    controlnet = model(d.FluxControlNetModel, seed=1, **FLUX | {"num_layers": 1, "num_single_layers": 1})
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    scaling = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    vae = model(d.AutoencoderKL, block_out_channels=(4,) * 4, norm_num_groups=2, **blocks, **scaling)
    return flux(d.FluxControlNetPipeline, controlnet=controlnet, vae=vae)


def flux_inputs(side: int, guidance: bool) -> dict[str, Any]:
    embeds = prompts(prompt_embeds=1) | {"pooled_prompt_embeds": noise(1, WIDTH, seed=3)}
    return square(side) | embeds | {"guidance_scale": 3.5 if guidance else 1.0}


def flux_true_cfg_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return flux_inputs(side, True) | pair() | pooled_pair() | {"true_cfg_scale": 4.0 if guidance else 1.0}


def flux_img2img_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return flux_inputs(side, guidance) | {
        "image": noise(1, 16, side // 8, side // 8, seed=5),
        "strength": 0.6,
    }


def flux_kontext_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return flux_inputs(side, guidance) | {"image": noise(1, 16, 8, 8, seed=5), "max_area": side**2}


def flux_controlnet_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return flux_inputs(side, guidance) | {"control_image": image(side), "controlnet_conditioning_scale": 0.7}


# FLUX.2
FLUX2 = STREAMS | {"timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2)}
FLUX2 |= {"gain": 1.4}  # without biases its modulation would be close to zero


def flux2() -> d.DiffusionPipeline:
    return pipeline(d.Flux2Pipeline, transformer=model(d.Flux2Transformer2DModel, **FLUX2), scheduler=flow(**FLUX_FLOW))


def flux2_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return square(side) | prompts(prompt_embeds=1) | {"guidance_scale": 4.0 if guidance else 1.0}


def flux2_klein() -> d.DiffusionPipeline:
    vae = model(d.AutoencoderKLFlux2, block_out_channels=(4,) * 4, norm_num_groups=2, latent_channels=4)
    transformer = model(d.Flux2Transformer2DModel, **FLUX2, guidance_embeds=False)
    return pipeline(d.Flux2KleinPipeline, transformer=transformer, scheduler=flow(**FLUX_FLOW), vae=vae)


# The families built like FLUX.1
def chroma() -> d.DiffusionPipeline:
    approximator = {"approximator_num_channels": 16, "approximator_hidden_dim": 16, "approximator_layers": 1}
    transformer = model(d.ChromaTransformer2DModel, **STREAMS, **approximator, axes_dims_rope=(4, 2, 2))
    scheduler = flow(shift=1.0, use_beta_sigmas=True)
    return pipeline(d.ChromaPipeline, transformer=transformer, scheduler=scheduler)


def chroma_inputs(side: int, guidance: bool) -> dict[str, Any]:
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    both = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask.clone()}
    return guided(5.0)(side, guidance) | both


def longcat() -> d.DiffusionPipeline:
    transformer = model(d.LongCatImageTransformer2DModel, **FLUX | {"in_channels": 64})
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    encoder = model(lambda: Qwen2Model(Qwen2Config(vocab_size=257, num_hidden_layers=1, **sizes)))
    parts = {"transformer": transformer, "text_encoder": encoder, "tokenizer": byte_tokenizer()}
    pipe = pipeline(d.LongCatImagePipeline, scheduler=flow(**FLUX_FLOW), **parts)
    pipe.tokenizer_max_length = TOKENS
    return pipe


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = ["<pad>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Sequence([ByteLevel(add_prefix_space=False), Split("", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def longcat_inputs(side: int, guidance: bool) -> dict[str, Any]:
    words = {"prompt": "a cat", "negative_prompt": "blurry", "enable_prompt_rewrite": False}
    return square(side) | words | {"guidance_scale": 4.5 if guidance else 1.0}


def hunyuan_image(guider: dict[str, Any] | None, **distilled: bool) -> d.DiffusionPipeline:
    config = HEADS | {"in_channels": 4, "out_channels": 4, "text_embed_dim": WIDTH, "text_embed_2_dim": WIDTH}
    depth = {"num_layers": 2, "num_single_layers": 3, "num_refiner_layers": 1, "rope_axes_dim": (4, 4)}
    transformer = model(d.HunyuanImageTransformer2DModel, **config, **depth, **distilled)
    guidance = None if guider is None else AdaptiveProjectedMixGuidance(**guider)
    parts = {"transformer": transformer, "guider": guidance}
    return pipeline(d.HunyuanImagePipeline, scheduler=flow(shift=5.0), **parts)


def hunyuan_image_distilled() -> d.DiffusionPipeline:
    return hunyuan_image(None, guidance_embeds=True, use_meanflow=True)


def hunyuan_image_inputs(side: int, guidance: bool) -> dict[str, Any]:
    embeds = pair() | prompts(prompt_embeds_2=7, negative_prompt_embeds_2=8)
    both = masks("prompt_embeds_mask", "negative_prompt_embeds_mask")
    glyphs = masks("prompt_embeds_mask_2", "negative_prompt_embeds_mask_2")
    return square(side) | embeds | both | glyphs | {"distilled_guidance_scale": 3.25 if guidance else 1.0}


# One stream list
def sd3() -> d.DiffusionPipeline:
    config = HEADS | {"in_channels": 4, "out_channels": 4, "joint_attention_dim": WIDTH, "num_layers": 4}
    sizes = {"caption_projection_dim": 16, "pooled_projection_dim": WIDTH, "pos_embed_max_size": 16}
    large = {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm", "sample_size": 16}
    transformer = model(d.SD3Transformer2DModel, **config, **sizes, **large)
    return pipeline(d.StableDiffusion3Pipeline, transformer=transformer, scheduler=flow(shift=3.0))


def sd3_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return guided(4.5)(side, guidance) | pooled_pair()


def sd3_skip_layers_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return sd3_inputs(side, guidance) | {"skip_guidance_layers": [1, 2]}


def sd3_cutoff_inputs(side: int, guidance: bool) -> dict[str, Any]:
    cutoff = {"callback_on_step_end": SD3CFGCutoffCallback(cutoff_step_ratio=0.5)} if guidance else {}
    return sd3_inputs(side, guidance) | cutoff


QWEN_FLOW = {
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


def qwen(cls: type[d.DiffusionPipeline] = d.QwenImagePipeline, **parts: Any) -> d.DiffusionPipeline:
    config = HEADS | {"in_channels": 16, "out_channels": 4, "num_layers": 3, "joint_attention_dim": WIDTH}
    transformer = model(d.QwenImageTransformer2DModel, **config, axes_dims_rope=(4, 2, 2))
    return pipeline(cls, transformer=transformer, scheduler=flow(**QWEN_FLOW), **parts)


def qwen_inputs(side: int, guidance: bool) -> dict[str, Any]:
    """A negative prompt shorter than the prompt, as the prompts of this family are not padded."""
    positive = square(side) | prompts(prompt_embeds=1) | masks("prompt_embeds_mask")
    negative = {name: value[:, :-3] for name, value in prompts(negative_prompt_embeds=2).items()}
    mask = {"negative_prompt_embeds_mask": torch.ones(1, TOKENS - 3, dtype=torch.long)}
    return positive | (negative | mask | {"true_cfg_scale": 4.0} if guidance else {"true_cfg_scale": 1.0})


def qwen_edit() -> d.DiffusionPipeline:
    """With an autoencoder of factor 64, since the pipeline resizes every image to a million pixels."""
    scaling = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    depth = {"dim_mult": [1] * 7, "temperal_downsample": [False] * 6, "num_res_blocks": 0}
    vae = model(d.AutoencoderKLQwenImage, base_dim=2, z_dim=4, **depth, **scaling)
    return qwen(d.QwenImageEditPipeline, vae=vae)


def qwen_edit_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return qwen_inputs(side, guidance) | {"image": image(64)}


BINNING_OFF = {"use_resolution_binning": False, "negative_prompt": None}


def pixart() -> d.DiffusionPipeline:
    config = HEADS | {"num_layers": 3, "cross_attention_dim": 16, "caption_channels": WIDTH, "sample_size": 8}
    transformer = model(d.PixArtTransformer2DModel, **config, norm_num_groups=2, use_additional_conditions=False)
    scheduler = d.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02)
    return pipeline(d.PixArtSigmaPipeline, transformer=transformer, scheduler=scheduler)


def sana() -> d.DiffusionPipeline:
    config = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 3, "caption_channels": WIDTH}
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    transformer = model(d.SanaTransformer2DModel, **config, **cross)
    solver = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return pipeline(d.SanaPipeline, transformer=transformer, scheduler=d.DPMSolverMultistepScheduler(**solver))


def cogview4() -> d.DiffusionPipeline:
    config = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 3, "text_embed_dim": WIDTH}
    sizes = {"time_embed_dim": 16, "condition_dim": 8, "pos_embed_max_size": 16, "rope_axes_dim": (16, 16)}
    transformer = model(d.CogView4Transformer2DModel, **config, **sizes, sample_size=8)
    shift = {"base_shift": 0.25, "max_shift": 0.75, "use_dynamic_shifting": True, "time_shift_type": "linear"}
    return pipeline(d.CogView4Pipeline, transformer=transformer, scheduler=flow(**shift))


# Refiners, then one joint list
def lumina2() -> d.DiffusionPipeline:
    sizes = {"in_channels": 4, "hidden_size": 24, "num_layers": 3, "num_refiner_layers": 1, "multiple_of": 8}
    heads = {
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "axes_dim_rope": (4, 4, 4),
        "axes_lens": (64, 16, 16),
    }
    transformer = model(d.Lumina2Transformer2DModel, **sizes, **heads, cap_feat_dim=WIDTH, sample_size=8)
    return pipeline(d.Lumina2Pipeline, transformer=transformer, scheduler=flow(shift=6.0))


def z_image() -> d.DiffusionPipeline:
    sizes = {"in_channels": 4, "dim": 16, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    rope = {"axes_dims": [4, 2, 2], "axes_lens": [128, 16, 16]}
    transformer = model(d.ZImageTransformer2DModel, **sizes, **rope, cap_feat_dim=WIDTH)
    return pipeline(d.ZImagePipeline, transformer=transformer, scheduler=flow(shift=3.0))


def z_image_inputs(side: int, guidance: bool) -> dict[str, Any]:
    lists = {name: [embeds[0]] for name, embeds in pair().items()}
    return square(side) | lists | {"guidance_scale": 5.0 if guidance else 0.0}


def z_image_truncation_inputs(side: int, guidance: bool) -> dict[str, Any]:
    return z_image_inputs(side, guidance) | {"cfg_truncation": 0.5}


def hidream() -> d.DiffusionPipeline:
    """With a smaller canvas, since the pipeline scales every image to the area of `default_sample_size`."""
    config = HEADS | {"in_channels": 4, "patch_size": 2, "num_layers": 2, "num_single_layers": 2}
    text = {"caption_channels": [WIDTH, WIDTH], "text_emb_dim": WIDTH, "llama_layers": [0, 1, 2, 3]}
    rope = {"axes_dims_rope": (4, 2, 2), "max_resolution": (8, 8)}
    transformer = model(d.HiDreamImageTransformer2DModel, **config, **text, **rope, force_inference_output=True)
    solver = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    scheduler = d.UniPCMultistepScheduler(**solver)
    pipe = pipeline(d.HiDreamImagePipeline, transformer=transformer, scheduler=scheduler)
    pipe.default_sample_size = 8
    return pipe


def hidream_inputs(side: int, guidance: bool) -> dict[str, Any]:
    t5 = prompts(prompt_embeds_t5=1, negative_prompt_embeds_t5=2)
    layers = {"prompt_embeds_llama3": 7, "negative_prompt_embeds_llama3": 8}
    llama = {name: noise(4, 1, TOKENS, WIDTH, seed=seed) for name, seed in layers.items()}
    scale = {"guidance_scale": 5.0 if guidance else 1.0}
    return {"height": 64, "width": side} | t5 | llama | pooled_pair() | scale


# A note says, in this order: is set_begin_index called; is cache_context used; how is guidance run; is the
# conditioning the same objects at every step; what does the transformer get for timestep t.
IMAGE = (
    tiny("FluxPipeline", flux, flux_inputs, "cond", "begin 0; context; embedded; same; t/1000"),
    tiny(
        "FluxPipeline[true_cfg]",
        flux,
        flux_true_cfg_inputs,
        "cond uncond",
        "begin 0; context; sequential; same; t/1000",
    ),
    tiny(
        "FluxImg2ImgPipeline",
        lambda: flux(d.FluxImg2ImgPipeline, 64),
        flux_img2img_inputs,
        "cond",
        "begin at the first step left; no context; embedded; same; t/1000; 8 steps of 12",
    ),
    tiny(
        "FluxKontextPipeline",
        lambda: flux(d.FluxKontextPipeline, 64),
        flux_kontext_inputs,
        "cond",
        "begin 0; no context; embedded; same; t/1000; image tokens after the latents",
    ),
    tiny(
        "FluxControlNetPipeline",
        flux_controlnet,
        flux_controlnet_inputs,
        "cond",
        "no begin; no context; embedded; same, but guidance is rebuilt and residuals are new; t/1000",
    ),
    tiny(
        "Flux2Pipeline",
        flux2,
        flux2_inputs,
        "cond",
        "begin 0; no context; embedded; same; t/1000; with an image img_ids are rebuilt",
    ),
    tiny(
        "Flux2KleinPipeline",
        flux2_klein,
        guided(4.0),
        "cond uncond",
        "begin 0; context; sequential; same; t/1000; with an image img_ids are rebuilt",
    ),
    tiny("ChromaPipeline", chroma, chroma_inputs, "1 2", "begin 0; no context; sequential; same; t/1000"),
    tiny(
        "LongCatImagePipeline",
        longcat,
        longcat_inputs,
        "cond uncond",
        "no begin; context; sequential; same; t/1000; words, through a tiny Qwen2",
    ),
    tiny(
        "HunyuanImagePipeline",
        lambda: hunyuan_image({}),
        hunyuan_image_inputs,
        "pred_cond pred_uncond",
        "begin 0; context; sequential; same; t; guidance=False has no effect",
        side=128,
    ),
    tiny(
        "HunyuanImagePipeline[interval]",
        lambda: hunyuan_image({"start": 0.2, "stop": 0.7}),
        hunyuan_image_inputs,
        "pred_cond pred_uncond",
        "begin 0; context; sequential; same; t; pred_uncond on steps 2 to 7 of 12",
        side=128,
    ),
    tiny(
        "HunyuanImagePipeline[distilled]",
        hunyuan_image_distilled,
        hunyuan_image_inputs,
        "pred_cond",
        "begin 0; context; embedded; same; t; and timestep_r, the next timestep",
        side=128,
    ),
    tiny("StableDiffusion3Pipeline", sd3, sd3_inputs, "batched", "no begin; no context; batched; same; t"),
    tiny(
        "StableDiffusion3Pipeline[skip_layers]",
        sd3,
        sd3_skip_layers_inputs,
        "1 2",
        "no begin; no context; batched; same; t; 2, with skip_layers, on steps 1 and 2 of 12",
    ),
    tiny(
        "StableDiffusion3Pipeline[cutoff]",
        sd3,
        sd3_cutoff_inputs,
        "batched",
        "no begin; no context; batched; same, replaced once; t; batch 2 for steps 0 to 6 of 12, then 1",
    ),
    tiny(
        "QwenImagePipeline",
        qwen,
        qwen_inputs,
        "cond uncond",
        "begin 0; context; sequential; same; t/1000; the negative prompt is shorter",
    ),
    tiny(
        "QwenImageEditPipeline",
        qwen_edit,
        qwen_edit_inputs,
        "cond uncond",
        "begin 0; context; sequential; same; t/1000; image tokens after the latents",
        side=512,
    ),
    tiny(
        "PixArtSigmaPipeline",
        pixart,
        guided_masked(4.5, **BINNING_OFF),
        "batched",
        "no begin; no context; batched; same; t; hidden_states is positional",
    ),
    tiny(
        "SanaPipeline",
        sana,
        guided_masked(4.5, **BINNING_OFF),
        "batched",
        "no begin; no context; batched; same; t*timestep_scale; hidden_states is positional",
        side=128,
    ),
    tiny("CogView4Pipeline", cogview4, guided(5.0), "cond uncond", "no begin; context; sequential; same; t"),
    tiny(
        "Lumina2Pipeline",
        lumina2,
        guided_masked(4.0),
        "1 2",
        "begin 0; no context; sequential; same; 1-t/1000",
    ),
    tiny(
        "Lumina2Pipeline[cfg_trunc]",
        lumina2,
        guided_masked(4.0, cfg_trunc_ratio=0.25),
        "1 2",
        "begin 0; no context; sequential; same; 1-t/1000; 2 on steps 0 to 2 of 12",
    ),
    tiny(
        "ZImagePipeline",
        z_image,
        z_image_inputs,
        "batched",
        "begin 0; no context; batched; same, in a new list; 1-t/1000; lists, positional",
    ),
    tiny(
        "ZImagePipeline[cfg_truncation]",
        z_image,
        z_image_truncation_inputs,
        "batched",
        "begin 0; no context; batched; same, in a new list; 1-t/1000; lists of 2, then of 1",
    ),
    tiny(
        "HiDreamImagePipeline",
        hidream,
        hidream_inputs,
        "batched",
        "no begin; no context; batched; same; t (timesteps=); size changes the shape, not the area",
    ),
)
