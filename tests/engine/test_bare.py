"""A transformer without a pipeline, in a hand-written loop."""

from __future__ import annotations

import pytest
import torch

import holdover
from tiny.models import MODELS, with_timestep

NAME = "FluxTransformer2DModel"
MAG = {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5, "mag_max_skip_steps": 2, "num_inference_steps": 12}


@pytest.fixture
def flux():
    tiny = MODELS[NAME]
    with torch.no_grad():
        yield tiny, tiny.build()


def loop(tiny, model, steps=12, seed=0, batch=1, stop=None, context=None):
    """Denoise by Euler steps, as a user writes it."""
    inputs = tiny.inputs(batch=batch, seed=seed)
    latent = inputs["hidden_states"]
    for i in range(steps if stop is None else stop):
        now = with_timestep(tiny, {**inputs, "hidden_states": latent}, 1 - i / steps)
        if context is None:
            velocity = model(**now)[0]
        else:
            with model.cache_context(context, step_index=i, num_inference_steps=steps):
                velocity = model(**now)[0]
        latent = latent - velocity / steps
    return latent


def test_the_timestep_tells_the_step(flux):
    tiny, model = flux
    plain = loop(tiny, model)
    with holdover.enable(model, "mag_cache", **{**MAG, "mag_threshold": 0.0}):
        assert torch.equal(loop(tiny, model), plain)
    with holdover.enable(model, "mag_cache", **MAG) as cache:
        first, second = loop(tiny, model), loop(tiny, model)
        assert [g.trace("1") for g in cache.stats().generations] == ["ChhChhChhChh"] * 2
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)


def test_cache_context_tells_the_step_without_a_read(flux):
    tiny, model = flux
    with holdover.enable(model, "mag_cache", **MAG) as cache:
        loop(tiny, model, context="cond")
        loop(tiny, model, context="cond")
        assert [g.trace("cond") for g in cache.stats().generations] == ["ChhChhChhChh"] * 2


def test_an_aborted_loop_does_not_reach_the_next(flux):
    tiny, model = flux
    with holdover.enable(model, "mag_cache", **MAG):
        expected = loop(tiny, model, seed=5)
    for stop in (1, 2, 5, 11):
        with holdover.enable(model, "mag_cache", **MAG):
            loop(tiny, model, seed=1, stop=stop)
            assert torch.equal(loop(tiny, model, seed=5), expected)


def test_refresh_announces_the_number_of_steps(flux):
    tiny, model = flux
    with holdover.enable(model, "mag_cache", **{**MAG, "mag_retention_ratio": 0.25}) as cache:
        cache.refresh(model, 8)
        loop(tiny, model, steps=8)
        assert cache.stats().last.steps == 8
        assert cache.stats().last.trace("1") == "CChhChhC"
        cache.refresh(model, 12)
        loop(tiny, model, steps=12)
        assert cache.stats().last.trace("1") == "CCChhChhChhC"


def test_more_steps_than_announced_are_computed(flux):
    tiny, model = flux
    with holdover.enable(model, "mag_cache", **{**MAG, "num_inference_steps": 6, "mag_ratios": [1.01] * 6}) as cache:
        loop(tiny, model, steps=9)
        forwards = cache.stats().last.forwards
    assert [v.computed for v in forwards] == [True, False, False, True, False, False, True, True, True]
    assert forwards[-1].reason == "more steps than were announced"


def test_two_branches_are_told_apart_by_their_conditioning(flux):
    tiny, model = flux
    cond, uncond = tiny.inputs(seed=0), tiny.inputs(seed=9)

    def guided(order):
        latent = cond["hidden_states"]
        for i in range(12):
            outputs = {}
            for name in order(i):
                words = cond if name == "cond" else uncond
                now = with_timestep(tiny, {**words, "hidden_states": latent}, 1 - i / 12)
                outputs[name] = model(**now)[0]
            both = outputs["cond"] + 2.0 * (outputs["cond"] - outputs.get("uncond", outputs["cond"]))
            latent = latent - both / 12
        return latent

    orders = {
        "cond first": lambda i: ("cond", "uncond"),
        "uncond first": lambda i: ("uncond", "cond"),
        "interval": lambda i: ("cond", "uncond") if 3 <= i < 9 else ("cond",),
        "order changes": lambda i: ("cond", "uncond") if i % 2 else ("uncond", "cond"),
    }
    for name, order in orders.items():
        plain = guided(order)
        with holdover.enable(model, "mag_cache", **{**MAG, "mag_threshold": 0.0}) as cache:
            assert torch.equal(guided(order), plain), name
            assert len(cache.stats().last.branches) == 2, name
    with holdover.enable(model, "mag_cache", **MAG):
        first, second = guided(orders["cond first"]), guided(orders["uncond first"])
    assert torch.equal(first, second)


def test_conditioning_rebuilt_at_every_step_is_recognised_by_its_numbers(flux):
    tiny, model = flux
    inputs = tiny.inputs()
    with holdover.enable(model, "mag_cache", **MAG) as cache:
        for i in range(12):
            now = with_timestep(tiny, inputs, 1 - i / 12)
            rebuilt = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in now.items()}
            model(**rebuilt)
        assert cache.stats().last.trace("1") == "ChhChhChhChh"


def test_a_buffer_that_is_written_over_is_another_branch_each_time(flux):
    """A static buffer that gets cond and uncond in turn must not make the two one branch."""
    tiny, model = flux
    cond, uncond = tiny.inputs(seed=0), tiny.inputs(seed=9)
    buffers = {k: cond[k].clone() for k in ("encoder_hidden_states", "pooled_projections")}

    def run_both():
        outputs = []
        for i in range(4):
            for words in (cond, uncond):
                for key, buffer in buffers.items():
                    buffer.copy_(words[key])
                now = with_timestep(tiny, {**cond, **buffers}, 1 - i / 4)
                outputs.append(model(**now)[0])
        return outputs

    with pytest.warns(holdover.HoldoverWarning, match="cache_context"), holdover.enable(model, "mag_cache", **MAG):
        seen = run_both()
    for computed, plain in zip(seen, run_both(), strict=True):
        assert torch.equal(computed, plain)


def test_a_conditioning_that_changes_at_every_step_is_said_to_be_inactive(flux):
    tiny, model = flux
    inputs = tiny.inputs()
    with pytest.warns(holdover.HoldoverWarning, match="cache_context"), holdover.enable(model, "mag_cache", **MAG):
        for i in range(6):
            words = {"encoder_hidden_states": inputs["encoder_hidden_states"] * (1 + i)}
            model(**with_timestep(tiny, {**inputs, **words}, 1 - i / 6))


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batch_sizes(flux, batch):
    tiny, model = flux
    plain = loop(tiny, model, batch=batch)
    with holdover.enable(model, "mag_cache", **{**MAG, "mag_threshold": 0.0}):
        assert torch.equal(loop(tiny, model, batch=batch), plain)
    with holdover.enable(model, "mag_cache", **MAG):
        assert torch.isfinite(loop(tiny, model, batch=batch)).all()


def test_dtype_and_device_of_what_is_held_are_the_models(flux):
    tiny, model = flux
    model = model.to(torch.bfloat16)
    inputs = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in tiny.inputs().items()}
    with holdover.enable(model, "mag_cache", **MAG) as cache:
        for i in range(12):
            output = model(**with_timestep(tiny, inputs, 1 - i / 12))[0]
        assert output.dtype == torch.bfloat16
        assert cache.stats().last.trace("1") == "ChhChhChhChh"
        assert cache.reports()["transformer"].ok


def test_single_block_models_hold():
    for name in ("FluxTransformer2DModel[single_block]", "FluxTransformer2DModel[one_double]"):
        tiny = MODELS[name]
        model = tiny.build()
        with torch.no_grad(), holdover.enable(model, "mag_cache", **MAG) as cache:
            loop(tiny, model)
            assert cache.stats().last.trace("1") == "ChhChhChhChh"
            assert cache.reports()["transformer"].max_error < 1e-5
