"""Mistakes of other caches, each of which is a test here."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import FluxPipeline

import holdover
from constant_free import HOLD
from holdover.models.inputs import iter_tensors
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

MAG = {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5, "mag_max_skip_steps": 2, "num_inference_steps": 12}


def first(output):
    return next(iter_tensors(output))


@pytest.mark.parametrize("name", ["Flux2Pipeline", "Flux2KleinPipeline"])
def test_flux2_held_step_is_not_a_bypass_of_the_transformer(name):
    """Its blocks take image and text separately and return them joined; the residual must not be dropped."""
    tiny = PIPELINES[name]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=12))
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_max_skip_steps": 1}) as cache:
        held = run(pipe, **tiny.call(steps=12))
        (report,) = cache.reports().values()
        held_steps = cache.stats().held
    assert held_steps > 0
    assert report.max_error < 1e-5
    zeroed = tiny.build()
    for block in (*zeroed.transformer.transformer_blocks, *zeroed.transformer.single_transformer_blocks):
        for parameter in block.parameters():
            parameter.data.zero_()
    bypass = run(zeroed, **tiny.call(steps=12))
    assert (held - plain).norm() < 0.5 * (bypass - plain).norm()


@pytest.mark.parametrize(
    ("branches", "method", "settings"),
    [*((n, "mag_cache", MAG) for n in (1, 2, 3)), *((3, method, HOLD[method]) for method in HOLD)],
)
def test_branches_never_share_a_state(branches, method, settings):
    """One model with one cache does for each branch what a copy of the model with a separate cache does."""
    tiny = MODELS["FluxTransformer2DModel"]
    words = [tiny.inputs(seed=seed) for seed in range(branches)]
    model = tiny.build()
    copies = [copy.deepcopy(model) for _ in words]

    def guided(models):
        latent = words[0]["hidden_states"]
        for i in range(12):
            outputs = []
            for each, inputs in zip(models, words, strict=True):
                now = with_timestep(tiny, {**inputs, "hidden_states": latent}, 1 - i / 12)
                outputs.append(first(each(**now)))
            latent = latent - sum((-1) ** j * (2 - j) * output for j, output in enumerate(outputs)) / 12
        return latent

    with torch.no_grad():
        caches = [holdover.enable(each, method, **settings) for each in copies]
        for cache, each in zip(caches, copies, strict=True):
            cache.refresh(each, 12)
        apart = guided(copies)
        for cache in caches:
            cache.disable()
        with holdover.enable(model, method, **settings) as cache:
            cache.refresh(model, 12)
            together = guided([model] * branches)
            assert cache.stats().held > 0
            assert len(cache.stats().last.branches) == branches
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", ["ChromaPipeline", "Lumina2Pipeline", "LongCatImagePipeline", "Flux2KleinPipeline"])
def test_guidance_is_not_cancelled(name):
    """Held guidance stays close to computed guidance, and far from no guidance."""
    tiny = PIPELINES[name]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=12))
    unguided = run(pipe, **tiny.call(steps=12, guidance=False))
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_max_skip_steps": 1}) as cache:
        held = run(pipe, **tiny.call(steps=12))
        assert len(cache.stats().last.branches) == 2
    assert (held - plain).norm() < (held - unguided).norm()


REPLAYED = [
    "FluxTransformer2DModel[controlnet]",
    "FluxTransformer2DModel[controlnet_full]",
    "QwenImageTransformer2DModel[controlnet]",
    "SD3Transformer2DModel[controlnet]",
    "SanaTransformer2DModel[controlnet]",
    "WanVACETransformer3DModel",
    "WanVACETransformer3DModel[scales]",
]


@pytest.mark.parametrize("name", REPLAYED)
def test_controlnet_and_vace_hints_are_not_counted_twice(name):
    tiny = MODELS[name]
    model = tiny.build()
    inputs = with_timestep(tiny, tiny.inputs(), 1.0)
    with torch.no_grad():
        plain = first(model(**inputs))
        with holdover.enable(model, "mag_cache", **MAG) as cache:
            outputs = []
            for step in range(3):
                with model.cache_context("cond", step_index=step):
                    outputs.append(first(model(**inputs)))
            assert cache.stats().last.trace("cond") == "Chh"
            (report,) = cache.reports().values()
            assert report.max_error < 1e-5
    assert torch.equal(outputs[0], plain)
    for held in outputs[1:]:
        assert torch.allclose(held, plain, rtol=1e-4, atol=1e-5)


def test_controlnet_that_ends_during_a_generation():
    """Without the ControlNet's residuals the forward takes another path, for which nothing is held yet."""
    tiny = MODELS["FluxTransformer2DModel[controlnet]"]
    model = tiny.build()
    inputs = tiny.inputs()
    without = {k: v for k, v in inputs.items() if "controlnet" not in k}
    with torch.no_grad(), holdover.enable(model, "mag_cache", **MAG) as cache:
        for i in range(12):
            model(**with_timestep(tiny, inputs if i < 7 else without, 1 - i / 12))
        forwards = cache.stats().last.forwards
    assert forwards[7].computed
    assert "another shape" in forwards[7].reason
    assert not forwards[8].computed


def test_step_count_is_not_frozen_at_enable():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", num_inference_steps=28) as cache:
        run(pipe, **tiny.call(steps=50))
        assert [v.step for v in cache.stats().last.forwards] == list(range(50))
        cache.refresh(pipe, 28)
        run(pipe, **tiny.call(steps=50))
        assert [v.step for v in cache.stats().last.forwards] == list(range(50))


def test_request_2_does_not_start_with_request_1s_residual():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_retention_ratio": 0.0}) as cache:
        run(pipe, **tiny.call(steps=12, seed=1))
        second = run(pipe, **tiny.call(steps=12, seed=2))
        assert cache.stats().last.forwards[0].computed
    fresh = tiny.build()
    with holdover.enable(fresh, "mag_cache", **{**MAG, "mag_retention_ratio": 0.0}):
        assert torch.equal(second, run(fresh, **tiny.call(steps=12, seed=2)))


@pytest.mark.parametrize("change", ["batch", "resolution"])
def test_batch_or_resolution_change_during_a_run_is_computed_not_broadcast(change):
    tiny = MODELS["FluxTransformer2DModel"]
    model = tiny.build()
    before = tiny.inputs(batch=2)
    after = tiny.inputs(batch=1) if change == "batch" else tiny.inputs(batch=2, size=1)
    with torch.no_grad():
        expected = first(model(**with_timestep(tiny, after, 0.9)))
        with holdover.enable(model, "mag_cache", **MAG) as cache:
            with model.cache_context("cond", step_index=0):
                model(**with_timestep(tiny, before, 1.0))
            with model.cache_context("cond", step_index=1):
                output = first(model(**with_timestep(tiny, after, 0.9)))
            assert cache.stats().last.trace("cond") == "CC"
    assert torch.equal(output, expected)


def test_polynomial_that_can_never_hold_is_a_warning_at_enable():
    pipe = PIPELINES["StableAudioPipeline"].build()
    with pytest.warns(holdover.HoldoverWarning, match="can never hold"):
        holdover.enable(pipe, "tea_cache", rel_l1_thresh=0.2).disable()
    flux = PIPELINES["FluxPipeline"].build()
    with pytest.warns(holdover.HoldoverWarning, match=r"at least 0\.18"):
        holdover.enable(flux, "tea_cache", rel_l1_thresh=0.15).disable()


def test_second_expert_is_cached_whatever_the_config_says():
    tiny = PIPELINES["WanPipeline[2.2]"]
    for boundary in (0.9, 0.5):
        pipe = tiny.build()
        pipe.register_to_config(boundary_ratio=boundary)
        with holdover.enable(pipe, "mag_cache", **MAG) as cache:
            run(pipe, **tiny.call(steps=12))
            held = cache.stats().last.held
        assert held["transformer_2/cond"] > 0
        assert held["transformer_2/uncond"] > 0


def test_disabling_one_of_two_pipelines_leaves_the_other():
    tiny = PIPELINES["FluxPipeline"]
    one, two = tiny.build(), tiny.build()
    caches = [holdover.enable(pipe, "mag_cache", **MAG) for pipe in (one, two)]
    expected = run(two, **tiny.call(steps=12))
    caches[0].disable()
    assert torch.equal(run(two, **tiny.call(steps=12)), expected)
    assert torch.equal(run(one, **tiny.call(steps=12)), run(tiny.build(), **tiny.call(steps=12)))
    caches[1].disable()
    assert "__call__" in vars(FluxPipeline)


def test_reenabling_with_other_settings_takes_effect():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    traces = []
    for skips in (1, 3):
        with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_max_skip_steps": skips}) as cache:
            run(pipe, **tiny.call(steps=12))
            traces.append(cache.stats().last.trace("cond"))
    assert traces == ["ChChChChChCh", "ChhhChhhChhh"]


@pytest.mark.parametrize(
    ("method", "typo", "meant"),
    [
        ("mag_cache", "mag_treshold", "mag_threshold"),
        ("tea_cache", "rel_l1_tresh", "rel_l1_thresh"),
        ("mag_cache", "max_skip_steps", "mag_max_skip_steps"),
        ("cache_dit", "enable_taylorser", "enable_taylorseer"),
        ("cache_dit", "max_warmup_step", "max_warmup_steps"),
    ],
)
def test_typos_in_settings_are_errors_that_name_the_right_one(method, typo, meant):
    pipe = PIPELINES["FluxPipeline"].build()
    with pytest.raises(holdover.ConfigError, match=meant):
        holdover.enable(pipe, method, **{typo: 1})
    with pytest.raises(holdover.ConfigError, match="tea_cache"):
        holdover.enable(pipe, "teacache")


def test_other_hooks_on_the_transformer_survive_enable_and_disable():
    """Hooks of other code, registered before or after, stay."""
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    seen = []
    before = pipe.transformer.register_forward_hook(lambda *_: seen.append("before"))
    cache = holdover.enable(pipe, "mag_cache", **MAG)
    after = pipe.transformer.register_forward_hook(lambda *_: seen.append("after"))
    run(pipe, **tiny.call(steps=4))
    cache.disable()
    seen.clear()
    run(pipe, **tiny.call(steps=4))
    assert seen == ["before", "after"] * 4
    before.remove()
    after.remove()


def test_ratios_of_another_length_belong_to_that_many_steps():
    """A list of 28 ratios is stretched over a run of 50 steps, not read past its end."""
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    ratios = [1.0] + [1.2] * 4 + [1.001] * 23
    with holdover.enable(pipe, "mag_cache", mag_ratios=ratios, mag_retention_ratio=0.0, mag_threshold=0.1) as cache:
        run(pipe, **tiny.call(steps=50))
        trace = cache.stats().last.trace("cond")
    assert "h" not in trace[1:6]
    assert trace[10:].count("h") > 25


# cache-dit, with the library's own blocks and contexts

DIT = {"residual_diff_threshold": 1.0, "max_warmup_steps": 1, "max_continuous_cached_steps": 2}
MASKED = {"scm_steps_mask_policy": "ultra", "scm_steps_policy": "static"}


def test_scm_masks_do_not_drift_over_requests_nor_stick_to_the_next():
    """The library's own refresh is one step late: CssC runs as CssC, sCss, CsCs, sCsC over four images."""
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", **MASKED) as cache:
        traces = []
        for steps in (4, 4, 4, 4, 8, 4):
            run(pipe, **tiny.call(steps=steps))
            traces.append(cache.stats().last.trace("cond"))
        with cache.using(scm_steps_mask_policy=None, **DIT):
            run(pipe, **tiny.call(steps=8))
            traces.append(cache.stats().last.trace("cond"))
    assert traces == ["CChC"] * 4 + ["CChhChhC", "CChC", "ChhChhCh"]


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_cache_dit_identifies_branches_without_counting(branches):
    """Also with one branch, with three, and with one that is left out at some steps."""
    tiny = MODELS["FluxTransformer2DModel"]
    words = [tiny.inputs(seed=seed) for seed in range(branches)]
    model = tiny.build()
    with torch.no_grad(), holdover.enable(model, "cache_dit", **DIT) as cache:
        for i in range(9):
            for j, inputs in enumerate(words):
                if j == 0 or i not in (4, 5):
                    model(**with_timestep(tiny, inputs, 1 - i / 9))
        generation = cache.stats().last
    assert generation.trace("1") == "ChhChhChh"
    assert {generation.trace(branch) for branch in generation.branches[1:]} <= {"ChhChhC"}
    assert len(generation.branches) == branches


@pytest.mark.parametrize("name", [name for name in REPLAYED if "controlnet" in name])
def test_cache_dit_refuses_controlnet_and_leaves_the_model_as_it_was(name):
    tiny = MODELS[name]
    model = tiny.build()
    with torch.no_grad():
        plain = first(model(**tiny.inputs()))
        with holdover.enable(model, "cache_dit"):
            with pytest.raises(holdover.UnsupportedModelError, match=type(model).__name__):
                model(**tiny.inputs())
        assert torch.equal(first(model(**tiny.inputs())), plain)


def test_cache_dit_leaves_the_pipelines_class_alone():
    tiny = PIPELINES["FluxPipeline"]
    one, two = tiny.build(), tiny.build()
    before = dict(vars(FluxPipeline))
    plain = run(two, **tiny.call(steps=6))
    cache = holdover.enable(one, "cache_dit", **DIT)
    assert torch.equal(run(two, **tiny.call(steps=6)), plain)
    cache.disable()
    assert torch.equal(run(one, **tiny.call(steps=6)), run(two, **tiny.call(steps=6)))
    assert dict(vars(FluxPipeline)) == before


def test_cache_dit_enabled_again_with_other_settings_takes_effect():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    traces = []
    for warm_up in (1, 4):
        with holdover.enable(pipe, "cache_dit", **{**DIT, "max_warmup_steps": warm_up}) as cache:
            run(pipe, **tiny.call(steps=6))
            traces.append(cache.stats().last.trace("cond"))
    assert traces == ["ChhChh", "CCCChh"]


def test_cache_dit_request_2_does_not_start_with_request_1s_residual():
    tiny = PIPELINES["FluxPipeline"]
    pipe, fresh = tiny.build(), tiny.build()
    with holdover.enable(pipe, "cache_dit", **DIT), holdover.enable(fresh, "cache_dit", **DIT):
        run(pipe, **tiny.call(steps=5, seed=1))
        assert torch.equal(run(pipe, **tiny.call(steps=6, seed=2)), run(fresh, **tiny.call(steps=6, seed=2)))
