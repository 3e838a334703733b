"""Tiny, real pipelines that take a prompt and return an image, for the code blocks of the documentation."""

from __future__ import annotations

from typing import Any

import diffusers as d
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from .models_image import QWEN
from .pipelines_image import FLUX_FLOW, WIDTH, byte_tokenizer, flow, flux, model
from .pipelines_video import wan22, wan22_image, wan_vae

__all__ = ["prompted_flux", "prompted_qwen", "prompted_wan", "prompted_wan_image"]

_TOKENS = 32  # a prompt of 512 tokens would take most of a tiny model's time
_VOCABULARY = 257


class ShortTokenizer(PreTrainedTokenizerFast):
    """A byte tokenizer that truncates every prompt, whatever length the pipeline requests."""

    def __call__(self, *args: Any, max_length: int | None = None, **options: Any) -> Any:
        return super().__call__(*args, max_length=min(max_length or _TOKENS, _TOKENS), **options)


def tokenizer() -> ShortTokenizer:
    backend = byte_tokenizer().backend_tokenizer
    return ShortTokenizer(tokenizer_object=backend, pad_token="<pad>", model_max_length=_TOKENS)


def clip() -> CLIPTextModel:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    # With 2 as its end token the model pools the token with the highest id of the prompt, so that prompts differ.
    tokens = {"vocab_size": _VOCABULARY, "max_position_embeddings": _TOKENS, "bos_token_id": 0, "eos_token_id": 2}
    return model(lambda: CLIPTextModel(CLIPTextConfig(**sizes, **tokens)))


def t5(cls: type[T5EncoderModel] = T5EncoderModel, config: type[T5Config] = T5Config) -> T5EncoderModel:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return model(lambda: cls(config(vocab_size=_VOCABULARY, **sizes)))


def flux_vae() -> d.AutoencoderKL:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    scaling = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    sizes = {"block_out_channels": (4,) * 4, "norm_num_groups": 2, "latent_channels": 4}
    return model(d.AutoencoderKL, **sizes, **blocks, **scaling)


def prompted_flux() -> d.FluxPipeline:
    """`pipe("red apple")`: 28 steps at 64x64 pixels in half a second."""
    encoders = {"text_encoder": clip(), "text_encoder_2": t5()}
    tokenizers = {"tokenizer": tokenizer(), "tokenizer_2": tokenizer()}
    pipe = flux(vae=flux_vae(), **encoders, **tokenizers)
    pipe.default_sample_size = 8
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompted_qwen() -> d.QwenImagePipeline:
    """Qwen-Image at 64x64 pixels, with true classifier-free guidance where a negative prompt is given."""
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = model(
        lambda: Qwen2Model(Qwen2Config(vocab_size=_VOCABULARY, num_key_value_heads=2, pad_token_id=0, **sizes))
    )
    scaling = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = model(d.AutoencoderKLQwenImage, base_dim=2, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **scaling)
    pipe = d.QwenImagePipeline(
        scheduler=flow(**FLUX_FLOW),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer(),
        transformer=model(d.QwenImageTransformer2DModel, **QWEN),
    )
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "{}", 0
    pipe.default_sample_size = 8
    pipe.set_progress_bar_config(disable=True)
    return pipe


class ShortWanPipeline(d.WanPipeline):
    """Wan with defaults for a video of five small frames."""

    def __call__(self, prompt: str, **options: Any) -> Any:
        small = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 12}
        return super().__call__(prompt, **small | options)


def prompted_wan() -> d.WanPipeline:
    """Wan 2.2 with its two experts."""
    plain = wan22()
    encoder = t5(UMT5EncoderModel, UMT5Config)
    parts = plain.components | {"text_encoder": encoder, "tokenizer": tokenizer(), "vae": wan_vae()}
    pipe = ShortWanPipeline(**parts, boundary_ratio=plain.config.boundary_ratio)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompted_wan_image() -> d.WanImageToVideoPipeline:
    """Wan 2.2 that starts from an image."""
    plain = wan22_image()
    encoder = t5(UMT5EncoderModel, UMT5Config)
    parts = plain.components | {"text_encoder": encoder, "tokenizer": tokenizer()}
    pipe = d.WanImageToVideoPipeline(**parts, boundary_ratio=plain.config.boundary_ratio)
    pipe.set_progress_bar_config(disable=True)
    return pipe
