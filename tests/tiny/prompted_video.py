"""Tiny, real video pipelines that take a prompt, and an image where they start from one, and return pixels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers as d
from diffusers.pipelines.wan import pipeline_wan_i2v
from diffusers.utils import is_ftfy_available
from transformers import LlamaConfig, LlamaModel, UMT5Config, UMT5EncoderModel

from .pipelines_image import TOKENS, WIDTH, model
from .pipelines_video import Guardrail, cogvideox, cosmos1, hunyuan_video, ltx, wan, wan22_image, wan_vae
from .prompted import clip, prompted_wan, t5, tokenizer

__all__ = ["PROMPTED_VIDEOS", "SMALL"]

# The arguments of one small clip of each, besides the prompt.
SMALL: dict[str, dict[str, Any]] = {
    "wan": {"height": 64, "width": 64, "num_frames": 9},
    "wan21": {"height": 64, "width": 64, "num_frames": 9},
    "wan_image": {"num_frames": 9},
    "ltx": {"height": 64, "width": 96, "num_frames": 9},
    "hunyuan": {"height": 64, "width": 64, "num_frames": 9},
    "cogvideox": {"height": 64, "width": 64, "num_frames": 9},
    "cosmos": {"height": 64, "width": 64, "num_frames": 9},
}


def _small_defaults(cls: type[Any], **small: Any) -> type[Any]:
    """The pipeline with other defaults."""

    class Small(cls):  # type: ignore[misc]
        def __call__(self, **options: Any) -> Any:
            return super().__call__(**small | options)

    Small.__name__ = cls.__name__
    return Small


def _build(plain: Any, cls: type[Any], **parts: Any) -> Any:
    options = {name: plain.config[name] for name in ("boundary_ratio",) if name in plain.config}
    pipe = cls(**{name: part for name, part in plain.components.items() if name != "prompt_encoder"} | parts, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan21() -> Any:
    parts = {"text_encoder": t5(UMT5EncoderModel, UMT5Config), "tokenizer": tokenizer(), "vae": wan_vae()}
    return _build(wan(), d.WanPipeline, **parts)


def wan_image() -> Any:
    if not is_ftfy_available():  # which this pipeline cleans prompts with
        pipeline_wan_i2v.ftfy = SimpleNamespace(fix_text=str)
    parts = {"text_encoder": t5(UMT5EncoderModel, UMT5Config), "tokenizer": tokenizer()}
    return _build(wan22_image(), d.WanImageToVideoPipeline, **parts)


def prompted_ltx() -> Any:
    sizes: dict[str, Any] = dict.fromkeys(("block_out_channels", "decoder_block_out_channels"), (8,) * 4)
    sizes |= {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5, "latent_channels": 8}
    vae = model(d.AutoencoderKLLTXVideo, **sizes)
    return _build(ltx(), d.LTXPipeline, vae=vae, text_encoder=t5(), tokenizer=tokenizer())


def prompted_cogvideox() -> Any:
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    sizes = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    vae = model(d.AutoencoderKLCogVideoX, **blocks, **sizes)
    return _build(
        cogvideox(),
        _small_defaults(d.CogVideoXPipeline, max_sequence_length=TOKENS),
        vae=vae,
        text_encoder=t5(),
        tokenizer=tokenizer(),
    )


def prompted_hunyuan() -> Any:
    sizes = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
    llama = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    encoder = model(lambda: LlamaModel(LlamaConfig(vocab_size=257, pad_token_id=0, **llama)))
    template = {"template": "{}", "crop_start": 0}
    parts = {"vae": model(d.AutoencoderKLHunyuanVideo, **sizes), "text_encoder": encoder, "tokenizer": tokenizer()}
    parts |= {"text_encoder_2": clip(), "tokenizer_2": tokenizer()}
    return _build(hunyuan_video(), _small_defaults(d.HunyuanVideoPipeline, prompt_template=template), **parts)


class Passes(Guardrail):
    """A guardrail that finds everything safe."""

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def prompted_cosmos() -> Any:
    sizes = {"encoder_block_out_channels": (8,) * 4, "decode_block_out_channels": (8,) * 4, "latent_channels": 4}
    vae = model(d.AutoencoderKLCosmos, **sizes, num_layers=1, attention_resolutions=(8,), resolution=64)
    parts = {"vae": vae, "text_encoder": t5(), "tokenizer": tokenizer(), "safety_checker": Passes()}
    return _build(cosmos1(), d.CosmosTextToWorldPipeline, **parts)


PROMPTED_VIDEOS: dict[str, Callable[[], Any]] = {
    "wan": prompted_wan,
    "wan21": wan21,
    "wan_image": wan_image,
    "ltx": prompted_ltx,
    "hunyuan": prompted_hunyuan,
    "cogvideox": prompted_cogvideox,
    "cosmos": prompted_cosmos,
}
