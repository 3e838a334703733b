"""Plans certified for a target on held-back prompts, what that proves, and that it proves no more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

import holdover
from holdover.plan.planner import search_profile
from holdover.plan.search import neighbors
from holdover.plan.tune import allowed_misses, fastest_passing, fewest_prompts, p_value
from holdover.profiles import Profile
from tiny.pipelines import PIPELINES
from tiny.pipelines_image import quiet
from tiny.prompted import prompted_flux

from .profiled import keywords
from .tuned import CALIBRATION, HELD_BACK, STEPS, SURE, generate, measured, pipeline, tuned

relaxed = settings(deadline=None, max_examples=60)


def test_a_certificate_is_stored_and_used():
    found = tuned("psnr>=45")
    certificate = found.certificate
    assert certificate.prompts == 4
    assert certificate.below == 0
    assert (certificate.share, certificate.confidence, certificate.target) == (0.5, 0.9, "psnr>=45")
    assert certificate.noise == measured().facts.noise
    assert certificate in found.profile.facts.certificates
    assert "4 prompts tried, 0 below" in str(found)
    with holdover.enable(pipeline(), "plan", profile=found.profile, target="psnr>=45") as cache:
        generate()
        generation = cache.stats().last
        assert "certified for psnr>=45" in str(cache.stats())
    for branch in generation.branches:
        forwards = generation.of_branch(branch)
        assert tuple(v.step for v in forwards if v.computed) == certificate.computed


def test_candidates_are_tried_from_slow_to_fast_until_the_first_failure():
    found = tuned("psnr>=45")
    counts = [len(tried.computed) for tried in found.tried]
    assert counts == sorted(set(counts), reverse=True)
    passed = [tried.passed for tried in found.tried]
    assert passed == sorted(passed, reverse=True)
    best = [tried for tried in found.tried if tried.passed][-1]
    assert best.computed == found.certificate.computed
    assert all(value >= 45 for value in best.values)
    assert allowed_misses(4, 0.5, 0.9) == 0


def test_a_target_that_nothing_meets_is_not_certified():
    found = tuned("psnr>=95")
    assert found.certificate is None
    assert found.profile == measured()
    assert "no plan could be certified" in str(found)
    assert len(found.tried) == 1


def test_a_certificate_for_a_higher_target_holds_for_a_lower_one_and_not_the_other_way_round():
    profile = tuned("psnr>=45").profile
    with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=41") as cache:
        generate()
        assert "certified for psnr>=45" in str(cache.stats())
        with cache.using(target="psnr>=46"):
            generate()
        assert "certified for psnr>=46" not in str(cache.stats())


def test_no_fewer_steps_are_expected_to_be_enough_than_are_certified_for_a_lower_target():
    found = tuned("psnr>=45")
    counts = []
    for certificates in ((), (replace(found.certificate, target="psnr>=10"),)):
        profile = found.profile.with_facts(certificates=certificates)
        with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=12") as cache:
            generate()
            counts.append(max(cache.stats().last.computed.values()))
    assert counts[0] < counts[1] == len(found.certificate.computed)


def test_a_certificate_is_for_the_plan_that_was_tried_only():
    """With another predictor, or residuals instead of outputs, the images are not those that were tried."""
    profile = tuned("psnr>=45").profile
    for other in ({"predictor": "hold"}, {"quantity": "seam"}):
        with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=45", **other) as cache:
            generate()
            assert "certified" not in str(cache.stats())


def test_a_certified_plan_is_stored_with_its_weights():
    """So it stays the plan that was tried, in later versions of the planner and on other processors."""
    found = tuned("psnr>=45")
    (stored,) = found.profile.facts.schedules
    assert (stored.computed, stored.origin) == (found.certificate.computed, "certified")
    assert stored.psnr == pytest.approx(np.mean([one for one in found.tried if one.passed][-1].values))
    other_planner = replace(found.profile.facts.options, corrected_share=0.3)
    for profile in (found.profile, found.profile.with_facts(options=other_planner)):
        with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=45") as cache:
            image = generate()
            assert "certified for psnr>=45" in str(cache.stats())
        with holdover.enable(pipeline(), "plan", profile=profile, budget=len(stored.computed)):
            assert torch.equal(generate(), image)


def test_a_plan_that_was_tried_before_is_the_candidate_of_its_budget():
    profile, planned = measured(), tuned("psnr>=45").tried[0].computed
    moved = next(iter(neighbors(planned, STEPS, (0,))))
    weights = sorted(search_profile(profile).model.fit_weights(moved).items())
    values = tuple(value for _, held in weights for value in held.values)
    known = replace(tuned("psnr>=45").profile.facts.schedules[0], computed=moved, weights=values, origin="polished")
    found = holdover.tune(pipeline(), profile.with_plan(known), HELD_BACK, "psnr>=45", batch_size=2, **SURE)
    assert found.tried[0].computed == moved != planned
    assert found.profile.facts.schedules[0] == known  # nothing better is known of its budget


def test_ssim_needs_a_certificate_and_gets_one():
    with holdover.enable(pipeline(), "plan", profile=measured(), target="ssim>=0.99"):
        with pytest.raises(holdover.ConfigError, match=r"holdover\.tune"):
            generate()
    found = tuned("ssim>=0.99")
    assert found.certificate is not None
    with holdover.enable(pipeline(), "plan", profile=found.profile, target="ssim>=0.99") as cache:
        generate()
        assert "certified for ssim>=0.99" in str(cache.stats())


def test_psnr_without_a_certificate_is_what_is_expected():
    with holdover.enable(pipeline(), "plan", profile=measured(), target="psnr>=30") as cache:
        generate()
        few = cache.stats().last.computed_total
        with cache.using(target="psnr>=55"):
            generate()
            assert cache.stats().last.computed_total > few


def test_a_target_without_a_profile_says_how_to_get_one():
    for wanted in ({"target": "psnr>=40"}, {"predictor": "least_squares", "budget": 3}):
        with pytest.raises(holdover.ConfigError, match=r"holdover\.calibrate"):
            holdover.enable(pipeline(), "plan", **wanted)


def test_a_new_certificate_replaces_the_old_one():
    again = holdover.tune(pipeline(), tuned("psnr>=45").profile, HELD_BACK, "psnr>=45", batch_size=2, **SURE)
    assert len(again.profile.facts.certificates) == 1
    assert again.certificate == tuned("psnr>=45").certificate


def test_a_certificate_is_for_the_conditions_it_was_tested_under():
    found = holdover.tune(pipeline(), measured(), HELD_BACK, "psnr>=35", batch_size=2, guidance_scale=7.0, **SURE)
    assert measured().facts.guidance == 3.5
    assert found.certificate.guidance == 7.0
    said = {}
    for guidance in (3.5, 7.0):
        with holdover.enable(pipeline(), "plan", profile=found.profile, target="psnr>=35") as cache:
            pipeline()("yellow car", num_inference_steps=STEPS, guidance_scale=guidance, output_type="latent")
            (said[guidance],) = cache.stats().last.notes
    assert "certified for psnr>=35" in said[7.0]
    assert "certified for" not in said[3.5]


def test_nothing_is_certified_where_other_branches_run_than_were_tested():
    with holdover.enable(pipeline(), "plan", profile=tuned("psnr>=45").profile, target="psnr>=45") as cache:
        generate()
        assert "certified for psnr>=45" in cache.stats().last.notes[0]
        call = {"true_cfg_scale": 4.0, "negative_prompt": "bad", "output_type": "latent"}
        pipeline()("yellow car", num_inference_steps=STEPS, **call)
        (note,) = cache.stats().last.notes
        assert len(cache.stats().last.branches) == 2
        assert "not known, because other branches run" in note
        assert "certified for" not in note
        generate()
        assert "certified for psnr>=45" in cache.stats().last.notes[0]


GUIDED = {"negative_prompt": "bad"}


@cache
def guided() -> Profile:
    """A profile measured with two branches, mixed with a scale that the cache does not see."""
    call = GUIDED | {"true_cfg_scale": 4.0}
    return holdover.calibrate(pipeline(), CALIBRATION[:2], STEPS, effort="quick", progress=False, **call)


def test_nothing_is_promised_where_branches_are_mixed_with_other_weights():
    said = {}
    with holdover.enable(pipeline(), "plan", profile=guided(), budget=4) as cache:
        for scale in (4.0, 15.0, 4.5, 4.0):
            pipeline()("yellow car", num_inference_steps=STEPS, true_cfg_scale=scale, **GUIDED)
            (said[scale],) = cache.stats().last.notes
            assert len(cache.stats().last.branches) == 2
    assert "expected to keep" in said[4.0]
    for scale in (4.5, 15.0):
        assert "not known, because the branches are mixed with other weights" in said[scale]


@pytest.mark.parametrize("name", ["WanPipeline[2.2]", "QwenImagePipeline", "LongCatImagePipeline", "Lumina2Pipeline"])
def test_guidance_as_it_was_measured_is_told_from_another_one(name):
    """Wan has a scale for its second expert; the others rescale what they mix, or leave a branch out in some steps."""
    pipe, call, said = PIPELINES[name].build(), keywords(PIPELINES[name]), []
    with quiet():
        profile = holdover.calibrate(pipe, [call], STEPS, effort="quick", progress=False)
        with holdover.enable(pipe, "plan", profile=profile, budget=4) as cache:
            for other in ({}, {"guidance_scale_2": 15.0} if name.startswith("Wan") else {}):
                pipe(**call, **other, num_inference_steps=STEPS)
                said.append("not known" in cache.stats().last.notes[0])
    assert said == [False, name.startswith("Wan")]


@pytest.mark.parametrize("name", ["PixArtSigmaPipeline", "QwenImagePipeline"])
def test_a_guidance_scale_that_the_pipeline_does_not_tell_is_seen_in_what_the_scheduler_gets(name):
    """PixArt has both branches in one batch, and Qwen-Image rescales norms: neither has a mix for each branch."""
    tiny, said = PIPELINES[name], []
    pipe, scale = tiny.build(), "true_cfg_scale" if name.startswith("Qwen") else "guidance_scale"
    with quiet():
        profile = holdover.calibrate(pipe, [keywords(tiny)] * 2, STEPS, effort="quick", progress=False)
        with holdover.enable(pipe, "plan", profile=profile, budget=4) as cache:
            for call in (tiny.call(), tiny.call(seed=3, size=1), tiny.call() | {scale: 9.0}, tiny.call(guidance=False)):
                pipe(**call | {"num_inference_steps": STEPS})
                said.append(cache.stats().last.notes[0])
    assert profile.facts.guidance is None
    assert profile.facts.branches == ()
    assert ["not known" in note for note in said] == [False, False, True, True]
    assert "mixed with other weights" in said[2]
    assert "other branches run" in said[3]


def test_prompts_that_plans_were_fitted_to_certify_nothing():
    with pytest.raises(holdover.ConfigError, match="1 of these 5 prompts were used to measure"):
        holdover.tune(pipeline(), measured(), [*HELD_BACK, CALIBRATION[0]], **SURE)
    polished = holdover.polish(pipeline(), measured(), 3, HELD_BACK[:2], trials=1, iterations=0, progress=False)
    with pytest.raises(holdover.ConfigError, match="2 of these 4 prompts"):
        holdover.tune(pipeline(), polished, HELD_BACK, **SURE)


def test_a_certificate_is_refused_for_branches_mixed_with_other_weights():
    with pytest.raises(holdover.ConfigError, match="true_cfg_scale"):
        holdover.tune(pipeline(), guided(), HELD_BACK, "psnr>=10", true_cfg_scale=9.0, **SURE)
    found = holdover.tune(pipeline(), guided(), HELD_BACK, "psnr>=10", **SURE)
    assert found.certificate is not None


def test_trials_are_of_the_weights_that_were_measured(tmp_path):
    other = prompted_flux()
    with torch.no_grad():
        other.transformer.proj_out.weight.mul_(0.5)
    with pytest.raises(holdover.ProfileError, match="measured on other weights"):
        holdover.tune(other, measured(), HELD_BACK, **SURE)
    with pytest.raises(holdover.ProfileError, match="measured on other weights"):
        holdover.polish(other, measured(), 3, HELD_BACK, progress=False)
    with pytest.raises(holdover.ConfigError, match="two prompts at least"):
        holdover.polish(pipeline(), measured(), 3, "red apple", progress=False)
    with pytest.raises(holdover.ProfileError, match="Trials need a profile"):
        holdover.tune(pipeline(), "none", HELD_BACK, **SURE)
    path = measured().save(tmp_path / "measured.safetensors")
    with pytest.raises(holdover.ConfigError, match="held-back prompts cannot show"):
        holdover.tune(pipeline(), path, HELD_BACK, progress=False)


def test_a_tuned_profile_is_saved_and_loaded(tmp_path):
    profile = tuned("psnr>=45").profile
    assert Profile.load(profile.save(tmp_path / "tuned.safetensors")) == profile


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"share": 0.95, "confidence": 0.95}, "4 held-back prompts cannot show .* at least 59 are needed"),
        ({"share": 1.0}, "share must lie between 0 and 1"),
        ({"confidence": 0.0}, "confidence must lie between 0 and 1"),
        ({"target": "lips>=3"}, "no metric 'lips'"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_arguments_are_errors(changes, said):
    call = {**SURE, "target": "psnr>=45", **changes}
    with pytest.raises(holdover.ConfigError, match=said):
        holdover.tune(pipeline(), measured(), HELD_BACK, **call)


def test_the_frontier_of_a_profile_has_every_budget():
    assert list(search_profile(measured()).frontier) == list(range(1, STEPS + 1))


# What a trial on held-back prompts proves.


@relaxed
@given(tried=st.integers(1, 300), share=st.floats(0.01, 0.99), data=st.data())
def test_p_values_are_binomial(tried, share, data):
    below = data.draw(st.integers(0, tried))
    assert p_value(below, tried, share) == pytest.approx(binom.cdf(below, tried, 1 - share), rel=1e-6, abs=1e-12)


def test_sixty_prompts_without_a_violation_certify_95_of_100_and_58_do_not():
    assert allowed_misses(60, 0.95, 0.95) == 0
    assert allowed_misses(58, 0.95, 0.95) is None
    assert fewest_prompts(0.95, 0.95) == 59
    assert p_value(0, 60, 0.95) < 0.05 < p_value(1, 60, 0.95)


@relaxed
@given(tried=st.integers(1, 200), share=st.floats(0.3, 0.97), confidence=st.floats(0.3, 0.97))
def test_as_many_may_miss_as_the_p_value_allows(tried, share, confidence):
    most = allowed_misses(tried, share, confidence)
    if most is None:
        assert p_value(0, tried, share) > 1 - confidence
        assert tried < fewest_prompts(share, confidence)
    else:
        assert p_value(most, tried, share) <= 1 - confidence
        assert most == tried or p_value(most + 1, tried, share) > 1 - confidence


def test_the_sequence_stops_at_the_first_failure():
    tried = []

    def passes(candidate):
        tried.append(candidate)
        return candidate != "c"

    assert fastest_passing("abcde", passes) == "b"
    assert tried == ["a", "b", "c"]
    assert fastest_passing("c", passes) is None
    assert fastest_passing("ab", passes) == "b"
    assert fastest_passing("", passes) is None


@pytest.mark.parametrize(("share", "confidence", "prompts"), [(0.95, 0.95, 60), (0.9, 0.9, 40), (0.8, 0.95, 30)])
def test_certificates_are_wrong_no_more_often_than_promised(share, confidence, prompts):
    """Random prompts from a population in which each candidate's true share is known, many times over.

    The qualities of one prompt under all candidates are correlated, as they are in images.
    """
    random = np.random.default_rng(0)
    population, target, rounds = 4000, 40.0, 2000
    hardness = random.normal(scale=3.0, size=population)
    levels = np.linspace(52.0, 41.0, 9)  # mean quality, from slow to fast
    quality = levels[:, None] - hardness + random.normal(scale=1.5, size=(len(levels), population))
    honest = (quality >= target).mean(axis=1) >= share
    assert honest[0]
    assert not honest[-1]
    most = allowed_misses(prompts, share, confidence)
    wrong = certified = 0
    for _ in range(rounds):
        sample = random.choice(population, prompts)
        below = (quality[:, sample] < target).sum(axis=1)
        best = fastest_passing(range(len(levels)), lambda candidate, below=below: below[candidate] <= most)
        certified += best is not None
        wrong += best is not None and not honest[best]
    promised = 1 - confidence
    assert wrong / rounds <= promised + 3 * np.sqrt(promised * (1 - promised) / rounds)
    assert certified > rounds / 2
