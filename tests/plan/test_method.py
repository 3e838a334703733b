"""Plans on running pipelines: budgets, schedules, experts, interruptions, and a bare transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

import holdover
from holdover.plan.planner import search_profile
from holdover.profiles import MeasuredPlan
from snapshots import denoiser, differences, snapshot
from tiny.pipelines import PIPELINES, run

from .profiled import calibrated

FLUX = "FluxPipeline"


@pytest.fixture(scope="module")
def flux():
    tiny = PIPELINES[FLUX]
    pipe = tiny.build()
    return tiny, pipe, run(pipe, **tiny.call(steps=12))


def mean_square(a, b):
    return float((a.double() - b.double()).square().mean())


@pytest.mark.parametrize("predictor", ["auto", "hold", "newton", "least_squares"])
@pytest.mark.parametrize("quantity", ["output", "seam"])
def test_every_predictor_of_every_quantity_is_exact_with_all_steps_and_repeats_itself(flux, predictor, quantity):
    tiny, pipe, plain = flux
    settings = {"profile": calibrated(FLUX), "predictor": predictor, "quantity": quantity}
    with holdover.enable(pipe, "plan", **settings, budget=12) as cache:
        assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
        with cache.using(budget=5):
            first, second = run(pipe, **tiny.call(steps=12)), run(pipe, **tiny.call(steps=12))
            generation = cache.stats().last
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
    assert (generation.computed, generation.held) == ({"cond": 5}, {"cond": 7})


@pytest.mark.parametrize("budget", [1, 2, 5, 11, 12, 40, "2x", "4x", "1x"])
def test_the_budget_is_what_is_computed_in_every_branch(budget):
    tiny = PIPELINES["QwenImagePipeline"]
    pipe = tiny.build()
    expected = {"2x": 6, "4x": 3, "1x": 12}.get(budget, budget)
    with holdover.enable(pipe, "plan", profile=calibrated("QwenImagePipeline"), budget=budget) as cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
    assert set(generation.computed.values()) == {min(expected, 12)}
    assert generation.branches == ("cond", "uncond")
    assert generation.trace("cond") == generation.trace("uncond")


def test_the_default_is_a_third_of_the_steps(flux):
    tiny, pipe, _ = flux
    with holdover.enable(pipe, "plan", profile=calibrated(FLUX)) as cache:
        run(pipe, **tiny.call(steps=12))
        assert cache.stats().last.computed == {"cond": 4}


@pytest.mark.parametrize("settings", [{}, {"budget": 5}, {"budget": "1x"}])
def test_without_a_profile_a_model_is_refused_in_two_lines(flux, settings):
    _, pipe, _ = flux
    with pytest.raises(holdover.ProfileError) as refused:
        holdover.enable(pipe, "plan", **settings)
    first, second = str(refused.value).splitlines()
    assert "no profile of this FluxTransformer2DModel" in first
    assert "holdover.calibrate(pipe, prompts)" in first
    assert '"easy_cache"' in second
    assert 'profile="none"' in second
    holdover.enable(pipe, "none").disable()  # nothing was left on it


def test_whoever_means_it_gets_the_safest_schedule_and_one_warning(flux):
    tiny, pipe, plain = flux
    with pytest.warns(holdover.HoldoverWarning, match="not measured on this FluxTransformer2DModel") as caught:
        cache = holdover.enable(pipe, "plan", profile="none")
        with cache:
            cautious = run(pipe, **tiny.call(steps=12))
            assert cache.stats().last.trace("cond") == "CCCCCCChChCC"
        with holdover.enable(pipe, "plan", profile="none", budget=4):
            windowed = run(pipe, **tiny.call(steps=12))
    assert len(caught) == 2  # one for each enable
    assert caught[0].filename == __file__
    assert 0 < mean_square(cautious, plain) < mean_square(windowed, plain)


def test_a_measured_plan_is_better_than_newton_and_both_than_holding(flux):
    tiny, pipe, plain = flux
    errors = {}
    for predictor in ("auto", "newton", "hold"):
        with holdover.enable(pipe, "plan", profile=calibrated(FLUX), predictor=predictor, budget=5):
            errors[predictor] = mean_square(run(pipe, **tiny.call(steps=12)), plain)
    assert errors["auto"] < errors["newton"] < errors["hold"]


def test_a_plan_says_where_it_comes_from_and_what_it_expects(flux):
    tiny, pipe, _ = flux
    with holdover.enable(pipe, "plan", profile=calibrated(FLUX), budget=5) as cache:
        run(pipe, **tiny.call(steps=12))
        text = str(cache.stats())
    assert "profile calibrated-FluxPipeline" in text
    assert "plan: 5 of 12 steps computed (" in text
    with holdover.enable(pipe, "plan", schedule=(0, 5)) as cache:
        assert "no profile, so Newton's extrapolation; its quality here was not measured" in str(cache.stats())


def test_a_given_schedule_is_kept(flux):
    tiny, pipe, _ = flux
    with holdover.enable(pipe, "plan", schedule=[7, 0, 3], profile=calibrated(FLUX)) as cache:
        run(pipe, **tiny.call(steps=12))
        assert cache.stats().last.trace("cond") == "ChhChhhChhhh"
        with cache.using(schedule=[5]):
            run(pipe, **tiny.call(steps=12))
            assert cache.stats().last.trace("cond") == "ChhhhChhhhhh"


def test_a_schedule_beyond_the_last_step_is_an_error_and_the_pipeline_goes_on(flux):
    tiny, pipe, plain = flux
    with holdover.enable(pipe, "plan", schedule=[0, 12]) as cache:
        with pytest.raises(holdover.ConfigError, match="step 12, but the last step of this generation is 11"):
            run(pipe, **tiny.call(steps=12))
        with cache.off():
            assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
        run(pipe, **tiny.call(steps=13))
        assert cache.stats().last.trace("cond") == "ChhhhhhhhhhhC"


def test_other_budgets_and_off_for_single_requests(flux):
    tiny, pipe, plain = flux
    with holdover.enable(pipe, "plan", profile=calibrated(FLUX), budget=4) as cache:
        usual = run(pipe, **tiny.call(steps=12))
        with cache.using(budget=8):
            better = run(pipe, **tiny.call(steps=12))
            assert cache.stats().last.computed == {"cond": 8}
        with cache.off():
            assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
        assert torch.equal(run(pipe, **tiny.call(steps=12)), usual)
        with pytest.raises(holdover.ConfigError, match="budget"):
            cache.using(bugdet=3)
        with pytest.raises(holdover.ConfigError, match="one of budget, target, quality and schedule"):
            cache.using(target="psnr>=40")
    assert mean_square(better, plain) < mean_square(usual, plain)


@pytest.mark.filterwarnings("ignore:This plan was not measured")
@pytest.mark.parametrize("name", ["WanPipeline[2.2]", "WanImageToVideoPipeline[2.2]"])
@pytest.mark.parametrize("measured", [True, False])
def test_two_experts_share_the_budget_and_each_begins_computed(name, measured):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    profile = calibrated(name) if measured else "none"
    with holdover.enable(pipe, "plan", profile=profile, budget=6) as cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
        with cache.using(budget=1):
            run(pipe, **tiny.call(steps=12))
            least = cache.stats().last.computed
    first, second = generation.trace("transformer/cond"), generation.trace("transformer_2/cond")
    assert (len(first), len(second)) == (4, 8)
    assert first[0] == second[0] == "C"
    assert (first + second).count("C") == 6
    assert generation.trace("transformer/uncond") == first
    assert generation.trace("transformer_2/uncond") == second
    assert set(least.values()) == {1}


def test_image_to_image_plans_the_steps_that_run():
    tiny = PIPELINES["FluxImg2ImgPipeline"]
    pipe = tiny.build()
    with pytest.warns(holdover.HoldoverWarning, match="other weights"):
        cache = holdover.enable(pipe, "plan", budget=4, profile=calibrated(FLUX))
    with cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
    (branch,) = generation.branches
    assert [forward.step for forward in generation.forwards] == list(range(4, 12))
    assert generation.trace(branch)[0] == "C"
    assert generation.computed == {branch: 4}


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 28])
def test_other_step_counts_are_planned_from_the_same_profile(flux, steps):
    tiny, pipe, _ = flux
    plain = run(pipe, **tiny.call(steps=steps))
    with holdover.enable(pipe, "plan", profile=calibrated(FLUX), budget="2x") as cache:
        held = run(pipe, **tiny.call(steps=steps))
        assert cache.stats().last.computed == {"cond": max(1, steps // 2)}
        with cache.using(budget=steps):
            assert torch.equal(run(pipe, **tiny.call(steps=steps)), plain)
    assert torch.isfinite(held).all()


@pytest.mark.parametrize("scheduler", [DPMSolverMultistepScheduler, UniPCMultistepScheduler])
def test_another_scheduler_is_planned_from_the_same_profile(scheduler):
    tiny = PIPELINES[FLUX]
    pipe = tiny.build()
    shifting = {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
    pipe.scheduler = scheduler(prediction_type="flow_prediction", use_flow_sigmas=True, **shifting)
    plain = run(pipe, **tiny.call(steps=12))
    errors = {}
    for predictor in ("auto", "hold"):
        with holdover.enable(pipe, "plan", profile=calibrated(FLUX), predictor=predictor, budget=6) as cache:
            errors[predictor] = mean_square(run(pipe, **tiny.call(steps=12)), plain)
            assert cache.stats().last.computed == {"cond": 6}
    assert errors["auto"] < errors["hold"]


def test_planning_takes_no_random_numbers_from_the_generation():
    """A scheduler that samples noise is asked what it does; the noise of the image must be what it would have been."""
    tiny = PIPELINES["CogVideoXPipeline[5b]"]
    pipe = tiny.build()
    call = {name: value for name, value in tiny.call(steps=8).items() if name != "generator"}
    profile = calibrated("CogVideoXPipeline[5b]", 8)
    torch.manual_seed(5)
    plain = run(pipe, **call)
    with holdover.enable(pipe, "plan", profile=profile, budget=8):
        torch.manual_seed(5)
        assert torch.equal(run(pipe, **call), plain)


class StopHereError(Exception):
    """Raised by a test in the middle of a generation."""


@pytest.mark.parametrize("step", [0, 5, 11])
def test_after_an_interruption_the_next_image_is_exact(flux, step):
    tiny, pipe, _ = flux

    def stop(pipe, i, t, kwargs):
        if i == step:
            raise StopHereError
        return {}

    with holdover.enable(pipe, "plan", profile=calibrated(FLUX), budget=5):
        expected = run(pipe, **tiny.call(steps=12, seed=7))
    before = denoiser(pipe)
    with holdover.enable(pipe, "plan", profile=calibrated(FLUX), budget=5) as cache:
        with pytest.raises(StopHereError):
            run(pipe, **tiny.call(steps=12, seed=3), callback_on_step_end=stop)
        assert torch.equal(run(pipe, **tiny.call(steps=12, seed=7)), expected)
        assert cache.stats().last.computed == {"cond": 5}
    assert differences(before, denoiser(pipe)) == []


def test_disable_restores_the_very_same_objects():
    pipe = PIPELINES["WanPipeline[2.2]"].build()
    before = snapshot(pipe)
    holdover.enable(pipe, "plan", profile=calibrated("WanPipeline[2.2]"), budget=4).disable()
    assert differences(before, snapshot(pipe)) == []


def test_images_of_other_sizes_in_between(flux):
    tiny, pipe, _ = flux
    with holdover.enable(pipe, "plan", profile=calibrated(FLUX), budget=5) as cache:
        small, large = run(pipe, **tiny.call(steps=12)), run(pipe, **tiny.call(steps=12, size=1))
        assert small.shape != large.shape
        assert torch.equal(run(pipe, **tiny.call(steps=12)), small)
        assert torch.equal(run(pipe, **tiny.call(steps=12, size=1)), large)
        assert {g.computed["cond"] for g in cache.stats().generations} == {5}


def test_a_batch_that_shrinks_during_a_generation_is_computed():
    tiny = PIPELINES["StableDiffusion3Pipeline[cutoff]"]
    pipe = tiny.build()
    with holdover.enable(pipe, "plan", schedule=[0, 2, 10]) as cache:
        assert torch.isfinite(run(pipe, **tiny.call(steps=12))).all()
        forwards = cache.stats().last.forwards
    assert {v.step for v in forwards if v.computed} == {0, 2, 7, 10}


# A transformer without a pipeline.


def inputs_of(pipe, tiny, steps):
    """The arguments of every forward, as the pipeline passes them."""
    seen = []
    hook = pipe.transformer.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    run(pipe, **tiny.call(steps=steps))
    hook.remove()
    return [{**kwargs, "return_dict": False} for kwargs in seen]


def test_a_bare_transformer_must_be_told_the_number_of_steps(flux):
    tiny, pipe, _ = flux
    model, inputs = pipe.transformer, inputs_of(pipe, tiny, 6)
    with holdover.enable(model, "plan", profile=calibrated(FLUX), budget=3) as cache, torch.no_grad():
        with pytest.warns(holdover.HoldoverWarning, match=r"cache\.refresh\(transformer, num_inference_steps\)"):
            computed = [model(**kwargs)[0] for kwargs in inputs]
        assert cache.stats().last.trace("1") == "C" * 6
        for _ in range(2):
            cache.refresh(model, 6)
            for kwargs in inputs:
                model(**kwargs)
            assert cache.stats().last.computed_total == 3
            assert cache.stats().last.held_total == 3
    with torch.no_grad():
        assert all(torch.equal(model(**kwargs)[0], output) for kwargs, output in zip(inputs, computed, strict=True))


def test_steps_a_bare_transformer_was_not_told_of_are_computed(flux):
    tiny, pipe, _ = flux
    model, inputs = pipe.transformer, inputs_of(pipe, tiny, 8)
    with holdover.enable(model, "plan", schedule=[0, 3]) as cache, torch.no_grad():
        cache.refresh(model, 6)
        for kwargs in inputs:
            model(**kwargs)
        assert cache.stats().last.trace("1") == "ChhChhCC"


def test_what_is_returned_may_be_written_to(flux):
    tiny, pipe, _ = flux
    model, inputs = pipe.transformer, inputs_of(pipe, tiny, 6)

    def outputs(spoil):
        made = []
        cache.refresh(model, 6)
        for kwargs in inputs:
            output = model(**kwargs)[0]
            made.append(output.clone())
            if spoil:
                output.fill_(1e6)
        return made

    with holdover.enable(model, "plan", schedule=[0, 2]) as cache, torch.no_grad():
        expected = outputs(spoil=False)
        assert all(map(torch.equal, outputs(spoil=True), expected))
        with cache.using(schedule=[0], predictor="hold"):
            held = outputs(spoil=True)
    assert all(torch.equal(output, held[0]) for output in held)


def test_outputs_keep_their_type(flux):
    tiny, pipe, _ = flux
    model, inputs = pipe.transformer, inputs_of(pipe, tiny, 4)
    with holdover.enable(model, "plan", schedule=[0, 1]) as cache, torch.no_grad():
        cache.refresh(model, 4)
        made = [model(**{**kwargs, "return_dict": True}) for kwargs in inputs]
        assert cache.stats().last.held_total == 2
    assert len({type(output) for output in made}) == 1
    assert isinstance(made[-1], Mapping)
    assert made[-1].sample.dtype == made[0].sample.dtype


def test_a_seam_of_the_plan_replays(flux):
    tiny, pipe, plain = flux
    with holdover.enable(pipe, "plan", quantity="seam", schedule=list(range(12))) as cache:
        assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
        report = cache.reports()["transformer"]
    assert report.ok
    assert report.max_error < 1e-5


def test_the_timestep_is_changed_at_the_computed_steps_of_a_plan_that_has_factors_for_them(flux):
    tiny, pipe, _ = flux
    computed, profile, seen = (0, 3, 7), calibrated(FLUX), []
    facts = profile.facts
    weights = search_profile(profile).model.fit_weights(computed)
    values = tuple(value for _, held in sorted(weights.items()) for value in held.values)
    plan = MeasuredPlan(facts.noise, facts.scheduler, computed, values, "polished", 0.0, (), facts.guidance)
    factors = (1.0, 1.01, 0.9)
    told = profile.with_facts(schedules=(replace(plan, timestep_factors=factors),))
    handle = pipe.transformer.time_text_embed.register_forward_pre_hook(lambda _, args: seen.append(float(args[0])))
    try:
        images = {}
        with holdover.enable(pipe, "plan", profile=profile.with_facts(schedules=(plan,))) as cache:
            for name, settings in {
                "plain": {"budget": 3},
                "told": {"budget": 3, "profile": told},
                "newton": {"schedule": computed, "profile": told, "predictor": "newton"},
                "residuals": {"budget": 3, "profile": told, "quantity": "seam"},
            }.items():
                with cache.using(**settings):
                    run(pipe, **tiny.call(steps=12))
                    seen.clear()
                    images[name] = run(pipe, **tiny.call(steps=12)), tuple(seen)
    finally:
        handle.remove()
    plain = images["plain"][1]
    assert len(plain) == 3
    assert images["told"][1] == pytest.approx([t * f for t, f in zip(plain, factors, strict=True)], rel=1e-6)
    assert images["newton"][1] == plain
    assert set(plain) <= set(images["residuals"][1])
    assert not torch.equal(images["plain"][0], images["told"][0])
