"""The first forward is repeated to trace and to check the model: the extra ones leave the inputs as they were."""

from __future__ import annotations

import diffusers as d
import pytest
import torch

import holdover
from tiny.models import MODELS, with_timestep
from tiny.pipelines import run
from tiny.pipelines_image import model, noise, pipeline

STEPS = 6
MAG = {"mag_ratios": [1.0] * STEPS, "mag_retention_ratio": 0.0, "mag_max_skip_steps": 2}
SIZES = {
    "sample_size": 8,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "in_channels": 4,
}
TEXTS = {"cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 16}
LENGTHS = {"text_len": 4, "text_len_t5": 4}


@pytest.fixture(scope="module")
def hunyuan_controlnet():
    """HunyuanDiT pops the ControlNet's outputs from the list that it is given."""
    return pipeline(
        d.HunyuanDiTControlNetPipeline,
        transformer=model(d.HunyuanDiT2DModel, num_layers=4, **SIZES, **TEXTS, **LENGTHS),
        controlnet=model(d.HunyuanDiT2DControlNetModel, transformer_num_layers=4, **SIZES, **TEXTS, **LENGTHS),
        vae=model(d.AutoencoderKL, block_out_channels=(4,), norm_num_groups=2, latent_channels=4),
        scheduler=d.DDPMScheduler(),
        requires_safety_checker=False,
    )


def run_hunyuan(pipe):
    embeds = ("prompt_embeds", "negative_prompt_embeds", "prompt_embeds_2", "negative_prompt_embeds_2")
    texts = {name: noise(1, 4, 16, seed=seed) for seed, name in enumerate(embeds)}
    masks = {name.replace("embeds", "attention_mask"): torch.ones(1, 4, dtype=torch.long) for name in embeds}
    control = {"control_image": noise(1, 3, 16, 16).clamp(0, 1), "use_resolution_binning": False}
    shape = {"height": 16, "width": 16, "num_inference_steps": STEPS, "output_type": "latent"}
    with torch.random.fork_rng(devices=[]):  # the latents of the control image are sampled without the generator
        torch.manual_seed(0)
        return run(pipe, **texts, **masks, **control, **shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["mag_cache", "tea_cache", "plan"])
def test_a_model_that_empties_its_list_of_controlnet_outputs(hunyuan_controlnet, method):
    pipe = hunyuan_controlnet
    nothing = {"mag_cache": {**MAG, "mag_threshold": 0.0}, "plan": {"schedule": tuple(range(STEPS))}}
    nothing["tea_cache"] = {"coefficients": [1.0, 0.0], "rel_l1_thresh": 0.0}
    plain = run_hunyuan(pipe)
    with holdover.enable(pipe, method, **nothing[method]):
        assert torch.equal(run_hunyuan(pipe), plain)
    if method == "mag_cache":
        with holdover.enable(pipe, method, **MAG, mag_threshold=1e9) as cache:
            assert torch.isfinite(run_hunyuan(pipe)).all()
            assert cache.stats().last.trace("1") == "ChhChh"


def test_cache_dit_refuses_it_in_words(hunyuan_controlnet):
    pipe = hunyuan_controlnet
    with holdover.enable(pipe, "cache_dit", max_warmup_steps=1):
        with pytest.raises(holdover.UnsupportedModelError, match="controlnet_block_samples: a held step fails"):
            run_hunyuan(pipe)


class Writer(torch.nn.Module):
    """Adds to its input in place."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden_states, timestep):
        hidden_states += timestep
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


@pytest.mark.parametrize("method", ["mag_cache", "plan"])
def test_a_model_that_writes_to_its_inputs_is_refused(method):
    settings = {"mag_cache": {**MAG, "mag_threshold": 0.0}, "plan": {"schedule": (0, 1)}}
    writer = Writer().eval()
    with torch.no_grad(), holdover.enable(writer, method, **settings[method]) as cache:
        cache.refresh(writer, STEPS)
        with pytest.raises(holdover.UnsupportedModelError, match="writes to its input tensors"):
            writer(hidden_states=torch.zeros(1, 3, 4), timestep=torch.ones(()))


FAR = {
    "patch_size": (1, 2, 2),
    "compressed_patch_size": (1, 4, 4),
    "full_chunk_limit": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 16,
    "num_layers": 2,
    "rope_max_seq_len": 32,
    "chunk_partition": (1, 1, 1),
}


@pytest.fixture(scope="module")
def anyflow_far():
    return pipeline(
        d.AnyFlowFARPipeline,
        transformer=model(d.AnyFlowFARTransformer3DModel, **FAR),
        vae=model(
            d.AutoencoderKLWan,
            base_dim=2,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        scheduler=d.FlowMapEulerDiscreteScheduler(shift=5.0),
    )


def run_anyflow(pipe):
    texts = {"prompt_embeds": noise(1, 4, 16), "negative_prompt_embeds": noise(1, 4, 16, seed=1)}
    shape = {"height": 16, "width": 16, "num_frames": 9, "num_inference_steps": 2, "output_type": "latent"}
    return run(pipe, **texts, **shape, guidance_scale=6.0, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["mag_cache", "plan"])
def test_outputs_without_elements_replay(anyflow_far, method):
    """The first chunk of AnyFlow FAR returns a KV cache that is still empty."""
    pipe = anyflow_far
    nothing = {"mag_cache": {**MAG, "mag_threshold": 0.0}, "plan": {"schedule": (0, 1)}}
    plain = run_anyflow(pipe)
    with holdover.enable(pipe, method, **nothing[method]) as cache:
        assert torch.equal(run_anyflow(pipe), plain)
        assert cache.stats().computed > 0


def test_a_hook_of_the_user_on_a_block_is_called_twice_more_by_the_first_forward():
    tiny = MODELS["FluxTransformer2DModel"]
    model, calls = tiny.build(), []
    model.transformer_blocks[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad(), holdover.enable(model, "mag_cache", **MAG, mag_threshold=0.0):
        for step in range(3):
            model(**with_timestep(tiny, tiny.inputs(), 1 - step / 3))
    assert len(calls) == 3 + 2  # to trace the blocks, and to compare with the plain forward
