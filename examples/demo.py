"""The demo: a tiny FLUX pipeline with random weights under each method, and that undo leaves nothing behind."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

import holdover

STEPS = 28


def tiny_flux() -> FluxPipeline:
    """A FluxPipeline of FLUX's own classes, small enough for a laptop; it draws noise, not pictures."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    vae = AutoencoderKL(
        sample_size=32,
        block_out_channels=(8,),
        norm_num_groups=4,
        latent_channels=4,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    pipe = FluxPipeline(
        scheduler=scheduler,
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer.eval(),
    )
    pipe.set_progress_bar_config(desc="denoising", leave=False)
    return pipe


def generate(pipe: FluxPipeline, seed: int = 0) -> torch.Tensor:
    """One generation from prompt embeddings, as a tensor."""
    words = torch.Generator().manual_seed(1)
    inputs: dict[str, Any] = {
        "prompt_embeds": torch.randn(1, 16, 64, generator=words),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=words),
        "height": 32,
        "width": 32,
        "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent",
    }
    latents: torch.Tensor = pipe(**inputs).images
    return latents


def timed(pipe: FluxPipeline) -> tuple[torch.Tensor, float]:
    """A generation and the seconds it took."""
    begin = time.perf_counter()
    latents = generate(pipe)
    return latents, time.perf_counter() - begin


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two results are apart, relative to the first."""
    return float((a - b).norm() / a.norm())


def show(pipe: FluxPipeline, method: str, plain: torch.Tensor, seconds: float, **settings: Any) -> None:
    """One method: its trace, its time beside the plain one, its distance from the plain result, the identities."""
    name = ", ".join([method, *(f"{key}={value}" for key, value in settings.items())])
    with holdover.enable(pipe, method, **settings) as cache:
        generate(pipe)  # the first generation also traces the model and checks the cut
        held, took = timed(pipe)
        threshold = "rel_l1_thresh" if method == "tea_cache" else "mag_threshold"
        with cache.using(**{threshold: 0.0}):
            nothing_held = generate(pipe)
        generation = cache.stats().generations[1]
    print(f"\n{name}")
    for branch in generation.branches:
        print(f"  {branch:<8} {generation.trace(branch)}   C computed, h held")
    print(
        f"  {generation.computed_total} computed, {generation.held_total} held: {took:.2f} s beside {seconds:.2f} s, ",
        end="",
    )
    print(f"{seconds / took:.1f}x; result differs by {relative_difference(plain, held):.1%}")
    print(f"  threshold 0 is bit-identical to the plain pipeline: {torch.equal(plain, nothing_held)}")
    print(f"  after disable() it is the plain pipeline again:      {torch.equal(plain, generate(pipe))}")


def main() -> None:
    """Run the demo."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", holdover.HoldoverWarning)
    pipe = tiny_flux()
    blocks = pipe.transformer.config.num_layers + pipe.transformer.config.num_single_layers
    print(f"A tiny FLUX ({blocks} blocks, random weights), {STEPS} steps, one CPU thread.")
    generate(pipe)
    plain, seconds = timed(pipe)
    show(pipe, "tea_cache", plain, seconds, rel_l1_thresh=0.6)
    show(pipe, "mag_cache", plain, seconds, mag_threshold=0.24, mag_max_skip_steps=5, mag_retention_ratio=0.1)
    show(pipe, "mag_cache", plain, seconds, mag_threshold=0.06, mag_max_skip_steps=3, mag_retention_ratio=0.2)
    print("\nRandom weights show the mechanism, not the quality.")


if __name__ == "__main__":
    main()
