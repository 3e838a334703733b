"""One pass over a few generations measures everything, costs little more than they do, and leaves no trace."""

from __future__ import annotations

import logging
from datetime import date

import numpy as np
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, UniPCMultistepScheduler

import holdover
from holdover.plan.calls import hash_prompts
from holdover.profiles import find
from holdover.selector import config_class
from holdover.teacache import estimate_coefficients
from snapshots import denoiser, differences
from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import quiet
from tiny.prompted import prompted_flux, prompted_wan

from .profiled import calibrated, keywords

FLUX = "FluxPipeline"


def measure(pipe, prompts, steps=12, **settings):
    with quiet():
        return holdover.calibrate(pipe, prompts, steps, **{"progress": False, "effort": "quick", **settings})


@pytest.fixture
def flux():
    tiny = PIPELINES[FLUX]
    return tiny, tiny.build()


@pytest.mark.parametrize(
    "name",
    [
        FLUX,
        "QwenImagePipeline",
        "StableDiffusion3Pipeline",
        "SanaPipeline",
        "WanPipeline[2.2]",
        "LTXPipeline",
        "CogVideoXPipeline",
        "MochiPipeline",
        "StableAudioPipeline",
    ],
)
def test_every_kind_of_pipeline_can_be_measured_and_planned(name):
    tiny = PIPELINES[name]
    profile = calibrated(name)
    size = 12 * len(profile.facts.mix)
    assert profile.grams.shape == (2, size, size)
    assert profile.growth.shape == (2, 13)
    assert np.allclose(profile.grams, profile.grams.transpose(0, 2, 1))
    assert np.linalg.eigvalsh(profile.grams).min() > -1e-6 * profile.grams.max()
    assert not profile.growth[:, 0].any()
    pipe = tiny.build()
    with holdover.enable(pipe, "plan", profile=profile, budget=6) as cache:
        assert torch.isfinite(run(pipe, **tiny.call(steps=12))).all()
        assert set(cache.stats().last.computed.values()) <= {1, 2, 3, 4, 5, 6}


def test_the_inner_products_are_those_of_the_guided_outputs(flux):
    tiny, pipe = flux
    seen = []
    profile = measure(pipe, [keywords(tiny)], 8, seed=3)
    hook = pipe.transformer.register_forward_hook(lambda m, a, out: seen.append(out[0].double().flatten()))
    run(pipe, **tiny.call(steps=8, seed=3))
    hook.remove()
    stacked = torch.stack(seen)
    expected = stacked @ stacked.T / stacked.shape[1]
    assert profile.grams[0] == pytest.approx(expected.numpy(), rel=1e-9)


def test_provenance_is_recorded(flux):
    tiny, pipe = flux
    prompts = [keywords(tiny), keywords(tiny)]
    facts = measure(pipe, prompts, 8, guidance_scale=2.5, name="mine", height=64).facts
    assert (facts.name, facts.pipeline, facts.scheduler) == ("mine", FLUX, "FlowMatchEulerDiscreteScheduler")
    assert len(facts.noise) == 8
    assert facts.noise[0] == 1.0
    ((name, model),) = facts.models
    assert (name, model.transformer_class, model.dtype) == ("transformer", "FluxTransformer2DModel", "float32")
    assert (facts.prompts, facts.prompts_hash) == (2, hash_prompts(prompts))
    assert facts.date == date.today().isoformat()
    assert dict(facts.versions)["torch"] == torch.__version__
    assert set(dict(facts.versions)) == {"holdover", "torch", "diffusers", "transformers"}
    assert facts.guidance == 2.5
    assert dict(facts.call) == {"height": 64}


@pytest.mark.parametrize("seams", [False, True])
def test_a_pipeline_that_does_not_run_all_steps_is_refused(seams):
    tiny = PIPELINES["FluxImg2ImgPipeline"]
    with pytest.raises(
        holdover.HoldoverError, match="makes 8 of the 12 steps of its scheduler: calibrate it from noise"
    ):
        measure(tiny.build(), [keywords(tiny)], seams=seams)


def test_guidance_that_changes_during_a_generation_is_recorded_as_it_starts():
    """A generation is identified by its settings at the start, so that trials for it are found again."""
    tiny = PIPELINES["CogVideoXPipeline[5b]"]
    pipe = tiny.build()
    facts = measure(pipe, [keywords(tiny)]).facts
    assert facts.guidance == tiny.call()["guidance_scale"]
    assert facts.guidance != pipe.guidance_scale


def test_a_pipeline_that_passes_keywords_on_gets_them_all():
    """Its own `__call__` names few keywords: the number of steps is for its base class."""
    assert len(measure(prompted_wan(), ["a dog"], 9, height=16, width=16).facts.noise) == 9


def test_the_same_seed_gives_the_same_profile_and_another_one_another(flux):
    tiny, pipe = flux
    first, second = (measure(pipe, [keywords(tiny)] * 2, 8) for _ in range(2))
    other = measure(pipe, [keywords(tiny)] * 2, 8, seed=9)
    assert first == second
    assert first.digest == second.digest
    assert first != other


@pytest.mark.parametrize("seams", [False, True])
def test_where_trajectories_are_kept_does_not_matter(flux, seams):
    tiny, pipe = flux
    profiles = [measure(pipe, [keywords(tiny)], 8, store=store, seams=seams) for store in ("device", "cpu", "disk")]
    assert len(set(profiles)) == 1


def test_prompts_may_run_in_one_batch():
    pipe = prompted_flux()
    prompts = ["red apple", "a blue dog on the beach"]
    one, two = (
        holdover.calibrate(pipe, prompts, 8, batch_size=size, effort="quick", progress=False) for size in (1, 2)
    )
    assert one.grams == pytest.approx(two.grams, rel=1e-3)
    assert one.growth == pytest.approx(two.growth, abs=0.05)
    assert one.facts.psnr_offset == pytest.approx(two.facts.psnr_offset, abs=0.1)
    assert one.facts.models == two.facts.models


def test_residuals_are_measured_on_request():
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    assert calibrated("WanPipeline[2.2]").seams == {}
    profile = measure(pipe, [keywords(tiny)] * 2, 12, seams=True)
    assert {name: seam.shape for name, seam in profile.seams.items()} == {
        "transformer": (2, 12, 12),
        "transformer_2": (2, 12, 12),
    }
    assert not profile.seams["transformer"][:, 4:].any()
    assert (np.diagonal(profile.seams["transformer_2"], axis1=1, axis2=2)[:, 4:] > 0).all()
    with holdover.enable(pipe, "plan", profile=profile, quantity="seam", budget=6) as cache:
        assert torch.isfinite(run(pipe, **tiny.call(steps=12))).all()
        assert cache.stats().last.held_total > 0


def test_magcache_ratios_are_those_of_its_own_calibration(flux):
    tiny, pipe = flux
    profile = measure(pipe, [keywords(tiny)] * 2, 8)
    with holdover.enable(pipe, "mag_cache", calibrate=True) as cache:
        for seed in range(2):
            run(pipe, **tiny.call(steps=8, seed=seed))
        own = cache.calibration()
    assert dict(profile.facts.mag_cache)["transformer"] == own


def test_teacache_coefficients_are_those_of_its_own_estimate():
    tiny = PIPELINES["QwenImagePipeline"]
    pipe = tiny.build()
    profile = measure(pipe, [keywords(tiny)] * 2, 8)
    with quiet():
        own = estimate_coefficients(pipe, [tiny.call(steps=8, seed=seed) for seed in range(2)])
    assert dict(profile.facts.tea_cache)["transformer"] == own
    assert {branch for branch, _ in own.fits} == {"", "cond", "uncond"}


@pytest.mark.parametrize("method", ["mag_cache", "tea_cache", "plan"])
def test_every_method_takes_the_profile_or_its_file(method, tmp_path):
    tiny = PIPELINES["QwenImagePipeline"]
    pipe, profile = tiny.build(), calibrated("QwenImagePipeline")
    path = profile.save(tmp_path / "qwen.safetensors")
    images, notes = [], []
    for given in (profile, str(path)):
        with holdover.enable(pipe, method, profile=given) as cache:
            images.append(run(pipe, **tiny.call(steps=12)))
            notes.append(cache.stats().notes)
            assert cache.stats().held > 0
    assert torch.equal(*images)
    assert notes[0] == notes[1]
    assert config_class(method)(profile=profile).as_dict()["profile"] == profile.name


@pytest.mark.parametrize("method", ["mag_cache", "tea_cache", "plan"])
def test_a_profile_of_another_model_is_refused(method):
    with pytest.raises(holdover.ProfileError, match=r"calibrated-QwenImagePipeline.*FluxTransformer2DModel"):
        holdover.enable(PIPELINES[FLUX].build(), method, profile=calibrated("QwenImagePipeline"))


def test_each_expert_gets_the_constants_measured_on_it():
    pipe, profile = PIPELINES["WanPipeline[2.2]"].build(), calibrated("WanPipeline[2.2]")
    for name, ratios in profile.facts.mag_cache:
        assert find("mag_cache", getattr(pipe, name), pipe, profile) == ratios
    assert len({ratios for _, ratios in profile.facts.mag_cache}) == 2


def test_four_generations_cost_little_more_than_they_do(flux):
    """At most a fifth more for the probes, plus what tracing and checking the model takes once."""
    tiny, pipe = flux
    forwards = []
    hook = pipe.transformer.proj_out.register_forward_hook(lambda *_: forwards.append(1))
    measure(pipe, [keywords(tiny)] * 4, 50)
    hook.remove()
    once = 3  # the forward that is traced, replayed, and repeated for the probe
    assert 200 < len(forwards) <= 240 + once


def test_the_pipeline_is_what_it_was(flux):
    tiny, pipe = flux
    pipe.set_progress_bar_config(desc="mine", disable=True)
    plain = run(pipe, **tiny.call(steps=8))
    before, bars = denoiser(pipe), pipe._progress_bar_config
    measure(pipe, [keywords(tiny)], 8)
    assert differences(before, denoiser(pipe)) == []
    assert pipe._progress_bar_config is bars
    assert torch.equal(run(pipe, **tiny.call(steps=8)), plain)


class StopHereError(Exception):
    """Raised by a test in the middle of a calibration."""


@pytest.mark.parametrize("generation", [1, 2])
def test_the_pipeline_is_what_it_was_after_an_exception(flux, generation):
    tiny, pipe = flux
    plain = run(pipe, **tiny.call(steps=8))
    del pipe._progress_bar_config
    before, seen = denoiser(pipe), []

    def stop(pipe, i, t, kwargs):
        seen.append(i)
        if seen.count(3) == generation:
            raise StopHereError
        return {}

    with pytest.raises(StopHereError):
        measure(pipe, [keywords(tiny)], 8, callback_on_step_end=stop)
    assert differences(before, denoiser(pipe)) == []
    assert "_progress_bar_config" not in vars(pipe)
    assert torch.equal(run(pipe, **tiny.call(steps=8)), plain)


@pytest.mark.parametrize("progress", [True, False])
def test_memory_is_stated_before_it_is_used(flux, progress, capsys, caplog):
    tiny, pipe = flux
    caplog.set_level(logging.INFO, logger="holdover")
    measure(pipe, [keywords(tiny)] * 2, 8, store="cpu", progress=progress)
    said = capsys.readouterr().out if progress else caplog.text
    assert said.count("keeping up to 45 latents of 0.0 MB: 0 MB, store='cpu'") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [1, 2]}, "the keywords of one call of the pipeline, not 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 2}, "use batch_size=1"),
        ({"store": "tape"}, "'device', on the 'cpu' or on 'disk', not on 'tape'"),
        ({"num_inference_steps": 0}, "num_inference_steps must be a whole number"),
        ({"num_inference_steps": 2.5}, "num_inference_steps must be a whole number"),
        ({"num_inference_steps": True}, "num_inference_steps must be a whole number"),
        ({"budgets": []}, "budgets is a list"),
        ({"budgets": 4}, "budgets is a list"),
        ({"budgets": "3x"}, r"budgets is a list .* not '3x'"),
        ({"budgets": [2.5]}, "not 2.5"),
        ({"budgets": [True]}, "not True"),
        ({"budgets": [0]}, "1 to 8 computed steps, not 0"),
        ({"budgets": [9]}, "1 to 8 computed steps, not 9"),
    ],
)
def test_wrong_arguments_are_errors_before_anything_runs(flux, settings, said):
    tiny, pipe = flux
    forwards = []
    pipe.transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    call = {"prompts": [keywords(tiny)] * 2, "num_inference_steps": 8, "progress": False, **settings}
    with pytest.raises(holdover.ConfigError, match=said):
        holdover.calibrate(pipe, **call)
    assert not forwards


def test_a_bare_transformer_cannot_be_measured(flux):
    _, pipe = flux
    with pytest.raises(holdover.ConfigError, match="needs a pipeline with a scheduler; FluxTransformer2DModel"):
        holdover.calibrate(pipe.transformer, ["a"])


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_models_of_few_steps_can_be_measured_too(flux, steps):
    tiny, pipe = flux
    profile = measure(pipe, [keywords(tiny)], steps)
    assert profile.grams.shape == (1, steps, steps)
    with holdover.enable(pipe, "plan", profile=profile, budget=steps):
        assert torch.isfinite(run(pipe, **tiny.call(steps=steps))).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FluxImg2ImgPipeline", "makes 8 of the 12 steps of its scheduler: calibrate it from noise"),
        ("CosmosTextToWorldPipeline", "steps its scheduler 23 times in 12 steps, .* Use easy_cache, mag_cache or tea"),
    ],
)
def test_a_pipeline_that_does_not_make_each_step_once_is_refused_with_what_to_do(name, message):
    tiny = PIPELINES[name]
    with pytest.raises(holdover.HoldoverError, match=message):
        measure(tiny.build(), [keywords(tiny)], 12)


@pytest.mark.parametrize("scheduler", ["heun", "unipc"])
def test_other_schedulers_are_measured(scheduler):
    tiny = PIPELINES["SanaPipeline"]
    pipe = tiny.build()
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    pipe.scheduler = FlowMatchHeunDiscreteScheduler() if scheduler == "heun" else UniPCMultistepScheduler(**flow)
    profile = measure(pipe, [keywords(tiny)], 8)
    assert np.isfinite(profile.growth).all()
    # Where nothing amplifies errors, the real error is the simulated one within a factor of a hundred.
    assert np.abs(profile.growth[:, -1]).max() < np.log(100)
