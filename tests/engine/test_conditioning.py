"""What is held belongs to one prompt of one generation: other inputs under the same branch name are computed."""

from __future__ import annotations

import pytest
import torch

import holdover
from constant_free import HOLD
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

STEPS = 6
# Each holds everything after the first step.
METHODS = {
    "mag_cache": {
        "mag_ratios": [1.0] * STEPS,
        "mag_threshold": 1e9,
        "mag_max_skip_steps": STEPS,
        "mag_retention_ratio": 0.0,
    },
    "tea_cache": {"coefficients": [1.0, 0.0], "rel_l1_thresh": 1e9},
    "plan": {"schedule": (0,), "predictor": "hold"},
    "cache_dit": {"residual_diff_threshold": 1e9, "max_warmup_steps": 1, "max_continuous_cached_steps": -1},
}
NAMED = ["FluxPipeline[true_cfg]", "QwenImagePipeline", "WanPipeline"]
CHANGED = "the conditioning changed"


@pytest.fixture(scope="module", params=[*NAMED, "StableDiffusion3Pipeline"])
def built(request):
    tiny = PIPELINES[request.param]
    return tiny, tiny.build()


@pytest.fixture(params=sorted(METHODS))
def method(request):
    return request.param


def other_pipeline(pipe):
    """A second pipeline on the same transformer, with a scheduler of its own."""
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    if "shift_terminal" in scheduler.config:
        scheduler.register_to_config(shift_terminal=None)  # it makes the only step of a generation NaN
    return type(pipe)(**pipe.components | {"scheduler": scheduler})


def stopped(pipe, tiny, after, **call):
    """Run a generation that the user stops after some steps."""

    def stop(pipe, step, timestep, kwargs):
        pipe._interrupt = step >= after
        return {}

    run(pipe, **{**tiny.call(steps=STEPS), **call}, callback_on_step_end=stop)


def with_other_prompt(call):
    """The same call with other embeddings."""
    return {key: value + 0.5 if "embeds" in key else value for key, value in call.items()}


@pytest.mark.parametrize(("after", "same_prompt"), [(0, True), (2, True), (2, False)])
def test_a_stopped_generation_does_not_reach_another_pipeline(built, method, same_prompt, after):
    tiny, pipe = built
    other, call = other_pipeline(pipe), tiny.call(steps=1, seed=5)
    call = call if same_prompt else with_other_prompt(call)
    plain = run(other, **call)
    with holdover.enable(pipe, method, **METHODS[method]) as cache:
        stopped(pipe, tiny, after)
        assert (cache.stats().held > 0) == (after > 0)
        call["generator"].manual_seed(5)
        assert torch.equal(run(other, **call), plain)


@pytest.mark.parametrize("end", ["interrupt", "exception"])
@pytest.mark.parametrize("after", [0, 2])
def test_nor_does_one_with_the_same_prompt_tensors(built, end, after):
    """Without a timestep or a prompt that tells them apart, the second loop's first step is computed."""
    tiny, pipe = built
    other, call = other_pipeline(pipe), tiny.call(steps=1) | {"guidance_scale": 1.0}
    plain = run(other, **call)

    def raise_error(pipe, step, timestep, kwargs):
        if step == after:
            raise KeyError(step)
        return {}

    with holdover.enable(pipe, "mag_cache", **METHODS["mag_cache"]) as cache:
        if end == "interrupt":
            stopped(pipe, tiny, after, **call | {"num_inference_steps": STEPS})
        else:
            with pytest.raises(KeyError):
                run(pipe, **call | {"num_inference_steps": STEPS}, callback_on_step_end=raise_error)
        assert (cache.stats().held > 0) == (after > 0)
        call["generator"].manual_seed(0)
        assert torch.equal(run(other, **call), plain)


def test_the_other_pipeline_is_held_on_its_own(built):
    tiny, pipe = built
    other = other_pipeline(pipe)
    with holdover.enable(pipe, "mag_cache", **METHODS["mag_cache"]) as cache:
        stopped(pipe, tiny, after=1)
        run(other, **with_other_prompt(tiny.call(steps=3)))
        assert cache.stats().last.trace(cache.stats().last.branches[-1])[-3:] == "Chh"


@pytest.mark.parametrize("method", HOLD)
def test_the_other_pipeline_may_run_more_steps_than_were_left(method):
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    other = other_pipeline(pipe)
    with holdover.enable(pipe, method, **HOLD[method]) as cache:
        stopped(pipe, tiny, after=2)
        assert torch.isfinite(run(other, **tiny.call(steps=2 * STEPS))).all()
        assert cache.stats().computed + cache.stats().held == 3 + 2 * STEPS


@pytest.mark.parametrize("name", NAMED)
def test_a_prompt_switched_in_the_middle_is_computed(name, method):
    tiny = PIPELINES[name]
    pipe = tiny.build()

    def switch(pipe, step, timestep, kwargs):
        return {"prompt_embeds": kwargs["prompt_embeds"] + 0.5} if step in (1, 3) else {}

    call = {"callback_on_step_end": switch, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    with holdover.enable(pipe, method, **METHODS[method]) as cache:
        run(pipe, **tiny.call(steps=STEPS), **call)
        generation = cache.stats().last
    assert generation.trace("cond")[:5] == "ChChC"
    assert [record.reason for record in generation.of_branch("cond")][2] in (CHANGED, "nothing to hold yet", "warm-up")
    assert generation.trace("uncond")[:5] == "Chhhh"


@pytest.fixture
def flux():
    tiny = MODELS["FluxTransformer2DModel"]
    with torch.no_grad():
        yield tiny, tiny.build()


def forward(model, tiny, inputs, t, name="cond"):
    with model.cache_context(name):
        return model(**with_timestep(tiny, inputs, t))[0]


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("method", ["mag_cache", "plan", "tea_cache"])
def test_a_stopped_loop_does_not_reach_one_that_starts_lower(flux, method, seed):
    tiny, model = flux
    inputs, other = tiny.inputs(), {**tiny.inputs(seed=seed), "hidden_states": tiny.inputs(seed=9)["hidden_states"]}
    plain = forward(model, tiny, other, 0.4)
    with holdover.enable(model, method, **METHODS[method]) as cache:
        cache.refresh(model, STEPS)
        for t in (1.0, 0.8, 0.6):
            forward(model, tiny, inputs, t)
        assert torch.equal(forward(model, tiny, other, 0.4), plain)
        assert cache.stats().last.forwards[-1].reason == CHANGED
        forward(model, tiny, other, 0.2)
        assert cache.stats().last.trace("cond") == "ChhCh"


def test_a_named_conditioning_that_is_rebuilt_at_every_step_is_held_until_its_values_change(flux):
    tiny, model = flux
    inputs = tiny.inputs()
    with holdover.enable(model, "mag_cache", **METHODS["mag_cache"]) as cache:
        for t in (1.0, 0.8, 0.6, 0.4, 0.2):
            inputs = {key: value.clone() for key, value in inputs.items()}
            if t == 0.4:
                inputs["pooled_projections"] += 1.0
            forward(model, tiny, inputs, t)
        assert cache.stats().last.trace("cond") == "ChhCh"


def test_a_buffer_with_both_conditionings_in_turn_is_held_by_name(flux):
    """Static buffers that the caller fills before each forward: the name says the branch, the values are compared."""
    tiny, model = flux
    prompts = {"cond": tiny.inputs(seed=0), "uncond": tiny.inputs(seed=9)}
    buffers = {key: value.clone() for key, value in prompts["cond"].items()}
    with holdover.enable(model, "mag_cache", **METHODS["mag_cache"]) as cache:
        for step, t in enumerate((1.0, 0.8, 0.6, 0.4, 0.2)):
            for name, inputs in prompts.items():
                for key, buffer in buffers.items():
                    buffer.copy_(inputs[key])
                if (step, name) == (3, "uncond"):
                    buffers["pooled_projections"].add_(1.0)
                forward(model, tiny, buffers, t, name)
        assert cache.stats().last.trace("cond") == "CChhh"
        assert cache.stats().last.trace("uncond") == "CChCC"
