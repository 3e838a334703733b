"""Modular pipelines: the guider names the branches, also those in which it skips layers or perturbs attention."""

from __future__ import annotations

from importlib.util import find_spec

import diffusers as d
import diffusers.guiders as g
import pytest
import torch

import holdover
from snapshots import differences, snapshot
from tiny.modular import GUIDERS, build, run

STEPS = 5
NOTHING = {"mag_ratios": [1.01] * STEPS, "mag_threshold": 0.0}
HOLD = {"mag_threshold": 0.5, "mag_max_skip_steps": 2}


@pytest.mark.parametrize("name", GUIDERS)
def test_guider(name):
    """Nothing held is bit-identical, held steps are held in each of the guider's passes, and undo leaves nothing."""
    if name == "frequency decoupled" and find_spec("kornia") is None:
        pytest.skip("needs kornia")
    family, make, passes = GUIDERS[name]
    pipe = build(family, make())
    plain, before = run(pipe, family, STEPS), snapshot(pipe.transformer)
    with holdover.enable(pipe, "mag_cache", **NOTHING) as cache:
        assert torch.equal(run(pipe, family, STEPS), plain)
        with cache.using(**HOLD):
            held = run(pipe, family, STEPS)
        generation, reports = cache.stats().last, list(cache.reports().values())
    assert torch.isfinite(held).all()
    assert not torch.equal(held, plain)
    assert all(report.ok and report.max_error < 1e-5 for report in reports)
    assert {branch: len(generation.of_branch(branch)) for branch in generation.branches} == passes
    for branch, count in passes.items():
        assert generation.trace(branch) == "ChhChh"[:count]
    assert differences(before, snapshot(pipe.transformer)) == []
    assert not {"prepare_models", "cleanup_models", "prepare_inputs"} & vars(pipe.guider).keys()
    assert torch.equal(run(pipe, family, STEPS), plain)


@pytest.mark.parametrize("name", ["flux", "wan22", "qwen"])
def test_preset(name):
    """Presets with their own guiders: none with FLUX, one for each expert with Wan 2.2."""
    pipe = build(name)
    plain = run(pipe, name, steps=8)
    with holdover.enable(pipe, "easy_cache", threshold=0.0, warmup_steps=1) as cache:
        assert torch.equal(run(pipe, name, steps=8), plain)
        with cache.using(threshold=10.0):
            run(pipe, name, steps=8)
        generation = cache.stats().last
    names = [component for component in pipe.components if component.startswith("transformer")]
    passes = ["1"] if name == "flux" else ["pred_cond", "pred_uncond"]
    expected = passes if len(names) == 1 else [f"{model}/{branch}" for model in names for branch in passes]
    assert list(generation.branches) == expected
    assert generation.held_total > 0


def test_guider_is_replaced_between_generations():
    """The new guider names the branches from its first step on; the old one is what it was."""
    pipe = build("wan", g.ClassifierFreeGuidance(4.0))
    first, (_, make, passes) = pipe.guider, GUIDERS["skip layers"]
    other = make()
    plain = [run(pipe, "wan", STEPS)]
    pipe.update_components(guider=other)
    plain.append(run(pipe, "wan", STEPS))
    with holdover.enable(pipe, "mag_cache", **NOTHING) as cache:
        pipe.guider = first
        assert torch.equal(run(pipe, "wan", STEPS), plain[0])
        assert set(cache.stats().last.branches) == {"pred_cond", "pred_uncond"}
        pipe.update_components(guider=other, scheduler=d.UniPCMultistepScheduler.from_config(pipe.scheduler.config))
        assert "prepare_models" in vars(first)
        assert torch.equal(run(pipe, "wan", STEPS), plain[1])
        assert "prepare_models" not in vars(first)
        assert torch.equal(run(pipe, "wan", STEPS), plain[1])
        assert set(cache.stats().last.branches) == set(passes)


@pytest.mark.parametrize("inside", [True, False])
def test_exception_in_a_pass_that_skips_layers(inside):
    """The next generation is like the first: diffusers leaves the layers skipped, the cache ends the pass."""
    _, make, _ = GUIDERS["skip layers"]
    pipe = build("wan", make())
    plain = run(pipe, "wan", STEPS)
    with holdover.enable(pipe, "mag_cache", **NOTHING) as cache:
        for settings in ({}, HOLD):
            with cache.using(**settings):
                expected = run(pipe, "wan", STEPS)
                layer, calls = pipe.transformer.proj_out if inside else pipe.scheduler, []
                name = "forward" if inside else "step"
                plain_method = getattr(layer, name)

                def stop(*args, plain_method=plain_method, calls=calls, **kwargs):
                    calls.append(1)
                    if len(calls) == 3:
                        raise KeyboardInterrupt
                    return plain_method(*args, **kwargs)

                vars(layer)[name], kept = stop, vars(layer).get(name)
                with pytest.raises(KeyboardInterrupt):
                    run(pipe, "wan", STEPS)
                vars(layer).pop(name)
                vars(layer).update({} if kept is None else {name: kept})
                assert torch.equal(run(pipe, "wan", STEPS), expected)
    assert torch.equal(run(pipe, "wan", STEPS), plain)


def test_a_pass_is_ended_when_the_cache_is_disabled():
    """Also where the exception ends the `with` block: the layers that it skipped run again."""
    _, make, _ = GUIDERS["skip layers"]
    pipe = build("wan", g.ClassifierFreeGuidance(4.0))
    plain, calls = run(pipe, "wan", STEPS), []
    pipe.update_components(guider=make())

    def stop(*_):
        calls.append(None)
        if len(calls) == 5:  # the first pass without the layers
            raise KeyboardInterrupt

    hook = pipe.transformer.proj_out.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), holdover.enable(pipe, "none"):
        run(pipe, "wan", STEPS)
    hook.remove()
    pipe.update_components(guider=g.ClassifierFreeGuidance(4.0))
    assert torch.equal(run(pipe, "wan", STEPS), plain)


def test_a_transformer_compiled_after_enable_keeps_the_names_of_its_passes():
    pipe = build("wan", g.ClassifierFreeGuidance(4.0))
    plain = run(pipe, "wan", STEPS)
    with holdover.enable(pipe, "mag_cache", **NOTHING) as cache:
        original, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, backend="eager")
        assert torch.equal(run(pipe, "wan", STEPS), plain)
        assert list(cache.stats().last.branches) == ["pred_cond", "pred_uncond"]
        pipe.transformer = original


def test_refusals():
    for target, message in (
        (d.StableDiffusionXLAutoBlocks().init_pipeline(), "Its denoiser is a UNet"),
        (d.WanBlocks(), "init_pipeline"),
        (d.WanBlocks().init_pipeline(), "load_components"),
    ):
        with pytest.raises(holdover.EnableError, match=message):
            holdover.enable(target, "mag_cache", **NOTHING)
