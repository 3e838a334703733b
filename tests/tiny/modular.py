"""Tiny modular pipelines, made of the denoising blocks of diffusers' presets, and guiders for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers as d
import diffusers.guiders as g
import torch
from diffusers.guiders.smoothed_energy_guidance import SmoothedEnergyGuidanceConfig
from diffusers.hooks import LayerSkipConfig

from .pipelines import PIPELINES
from .pipelines_image import noise, quiet

# The blocks of a preset, the tiny pipeline with the same components, and inputs that its other blocks would give.
PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flux": ("FluxAutoBlocks", "FluxPipeline", {}),
    "qwen": ("QwenImageAutoBlocks", "QwenImagePipeline", {}),
    "sd3": ("StableDiffusion3AutoBlocks", "StableDiffusion3Pipeline", {}),
    "wan": ("WanBlocks", "WanPipeline", {"latents": noise(1, 4, 3, 8, 8)}),
    "wan22": ("Wan22Blocks", "WanPipeline[2.2]", {"latents": noise(1, 4, 3, 8, 8)}),
}
_GUIDANCE = ("guidance_scale", "guidance_scale_2", "true_cfg_scale")


def build(name: str, guider: Any = None) -> Any:
    """A modular pipeline of the denoising blocks, with the components of the tiny pipeline."""
    blocks, source, _ = PRESETS[name]
    preset = getattr(d, blocks)()
    for other in [key for key in preset.sub_blocks if key != "denoise"]:
        preset.sub_blocks.pop(other)
    pipe, components = preset.init_pipeline(), PIPELINES[source].build().components
    pipe.update_components(**{key: part for key, part in components.items() if part and key in pipe.components})
    if guider is not None:
        pipe.update_components(guider=guider)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(name: str, steps: int) -> dict[str, Any]:
    """The arguments of one call; the scale of the guidance is the guider's, except with FLUX."""
    _, source, inputs = PRESETS[name]
    own = PIPELINES[source].call(steps=steps) | inputs | {"output": "latents"}
    return {k: v for k, v in own.items() if k != "output_type" and (name == "flux" or k not in _GUIDANCE)}


def run(pipe: Any, name: str, steps: int = 5) -> torch.Tensor:
    """The latents at the end of a generation."""
    with quiet():
        latents: torch.Tensor = pipe(**call(name, steps))
    return latents


def _layers(blocks: str = "blocks", **which: Any) -> LayerSkipConfig:
    return LayerSkipConfig([1], fqn=blocks, **which)


_SMOOTHED = SmoothedEnergyGuidanceConfig([1], fqn="blocks")
_SCORES = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}

# A pipeline on which diffusers runs the guider, and what each step of a generation of five steps runs, by branch.
GUIDERS: dict[str, tuple[str, Callable[[], Any], dict[str, int]]] = {
    "cfg": ("wan", lambda: g.ClassifierFreeGuidance(4.0), {"pred_cond": 5, "pred_uncond": 5}),
    "cfg, middle steps": (
        "wan",
        lambda: g.ClassifierFreeGuidance(4.0, start=0.2, stop=0.8),
        {"pred_cond": 5, "pred_uncond": 3},
    ),
    "zero star": (
        "wan",
        lambda: g.ClassifierFreeZeroStarGuidance(4.0, zero_init_steps=1),
        {"pred_cond": 5, "pred_uncond": 5},
    ),
    "skip layers": (
        "wan",
        lambda: g.SkipLayerGuidance(
            4.0, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=0.8, skip_layer_config=_layers()
        ),
        {"pred_cond": 5, "pred_uncond": 5, "pred_cond_skip": 3},
    ),
    "perturbed attention": (
        "qwen",
        lambda: g.PerturbedAttentionGuidance(
            4.0,
            perturbed_guidance_start=0.0,
            perturbed_guidance_stop=0.8,
            perturbed_guidance_config=_layers("transformer_blocks", **_SCORES),
        ),
        {"pred_cond": 5, "pred_uncond": 5, "pred_cond_skip": 3},
    ),
    "smoothed energy": (
        "wan",
        lambda: g.SmoothedEnergyGuidance(
            4.0, seg_guidance_start=0.0, seg_guidance_stop=0.8, seg_guidance_config=_SMOOTHED
        ),
        {"pred_cond": 5, "pred_uncond": 5, "pred_cond_seg": 3},
    ),
    "adaptive projected": (
        "wan",
        lambda: g.AdaptiveProjectedGuidance(4.0, adaptive_projected_guidance_momentum=-0.5),
        {"pred_cond": 5, "pred_uncond": 5},
    ),
    "adaptive projected mix": (
        "wan",
        lambda: g.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2),
        {"pred_cond": 5, "pred_uncond": 5},
    ),
    "frequency decoupled": (
        "sd3",
        lambda: g.FrequencyDecoupledGuidance([4.0, 3.0]),
        {"pred_cond": 5, "pred_uncond": 5},
    ),
    "tangential": (
        "wan",
        lambda: g.TangentialClassifierFreeGuidance(4.0),
        {"pred_cond": 5, "pred_uncond": 5},
    ),
    "magnitude aware": ("qwen", lambda: g.MagnitudeAwareGuidance(4.0), {"pred_cond": 5, "pred_uncond": 5}),
    "auto": (
        "wan",
        lambda: g.AutoGuidance(4.0, auto_guidance_config=_layers()),
        {"pred_cond": 5, "pred_uncond": 5},
    ),
}
