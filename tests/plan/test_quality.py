"""A quality by name: the target it stands for, the plan it is resolved to, and targets of a profile's own."""

from __future__ import annotations

import pytest

import holdover
from holdover import ConfigError, PlanConfig
from holdover.plan.config import QUALITY_TARGETS
from holdover.profiles import Profile

from .tuned import HELD_BACK, STEPS, SURE, generate, measured, pipeline, tuned


def planned(profile: Profile, **wanted: str | int) -> tuple[tuple[int, ...], str]:
    """The computed steps of a generation, and what its notes say."""
    with holdover.enable(pipeline(), "plan", profile=profile, **wanted) as cache:
        generate()
        last = cache.stats().last
    assert last is not None
    (note,) = last.notes
    return tuple(forward.step for forward in last.of_branch(last.branches[0]) if forward.computed), note


@pytest.mark.parametrize("quality", QUALITY_TARGETS)
def test_a_quality_is_the_plan_of_its_target(quality: str) -> None:
    computed, note = planned(measured(), quality=quality)
    assert computed == planned(measured(), target=QUALITY_TARGETS[quality])[0]
    assert f"quality {quality} is {QUALITY_TARGETS[quality]}: expected, not certified" in note
    assert f'holdover.tune(pipe, profile, quality="{quality}") certifies it' in note


def test_a_higher_quality_computes_more_steps() -> None:
    counts = [len(planned(measured(), quality=quality)[0]) for quality in QUALITY_TARGETS]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_nothing_is_expected_of_far_more_steps_than_were_measured() -> None:
    for steps, is_known in ((3 * STEPS, True), (3 * STEPS + 1, False)):
        with holdover.enable(pipeline(), "plan", profile=measured(), budget=6) as cache:
            generate(steps=steps)
            (note,) = cache.stats().last.notes
        assert ("expected to keep" in note) == is_known
        assert ("not known, because the profile was measured with 8 steps" in note) == (not is_known)
    with (
        holdover.enable(pipeline(), "plan", profile=measured(), quality="high"),
        pytest.raises(ConfigError, match="measured with 8 steps, so psnr>=40 is not known of 25: calibrate with"),
    ):
        generate(steps=3 * STEPS + 1)


def test_nothing_is_expected_under_a_scheduler_that_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    random = type(pipeline().scheduler).from_config(pipeline().scheduler.config, stochastic_sampling=True)
    monkeypatch.setattr(pipeline(), "scheduler", random)
    computed, note = planned(measured(), budget=3)
    assert len(computed) == 3
    assert note.endswith("not known, because FlowMatchEulerDiscreteScheduler is random or not linear")
    with pytest.raises(ConfigError, match=r"Nothing is certified for psnr>=40 here: run holdover\.tune"):
        planned(measured(), quality="high")


def test_the_certified_plan_is_used_where_there_is_one() -> None:
    found = tuned("psnr>=45")
    assert found.certificate is not None
    computed, note = planned(found.profile, quality="high")
    assert computed == found.certificate.computed
    assert "quality high is psnr>=40: certified for psnr>=45" in note
    assert "expected, not certified" in planned(found.profile, quality="lossless")[1]


def test_a_profile_may_have_a_target_of_its_own() -> None:
    own = measured().with_quality("draft", "PSNR >= 50 dB")
    assert own.facts.qualities == (("draft", "psnr>=50"),)
    assert (own.target_of("draft"), own.target_of("high")) == ("psnr>=50", "psnr>=40")
    computed, note = planned(own, quality="draft")
    assert computed == planned(measured(), quality="lossless")[0] != planned(measured(), quality="draft")[0]
    assert "quality draft is psnr>=50" in note
    assert own.with_quality("draft", "psnr>=31").target_of("draft") == "psnr>=31"


def test_tune_certifies_the_target_of_a_quality() -> None:
    own = measured().with_quality("balanced", "psnr>=45")
    found = holdover.tune(pipeline(), own, HELD_BACK, quality="balanced", batch_size=2, **SURE)
    assert found.certificate == tuned("psnr>=45").certificate
    assert found.target == "psnr>=45"
    computed, note = planned(found.profile, quality="balanced")
    assert computed == found.certificate.computed
    assert "quality balanced is psnr>=45: certified for psnr>=45" in note


def test_tune_with_both_sets_the_target_of_the_quality() -> None:
    found = holdover.tune(pipeline(), measured(), HELD_BACK, "psnr>=45", quality="high", batch_size=2, **SURE)
    assert found.profile.target_of("high") == found.certificate.target == "psnr>=45"
    assert "quality high is psnr>=45: certified" in planned(found.profile, quality="high")[1]
    failed = holdover.tune(pipeline(), measured(), HELD_BACK, "psnr>=95", quality="high", batch_size=2, **SURE)
    assert failed.certificate is None
    assert failed.profile.target_of("high") == "psnr>=95"


def test_tune_with_neither_certifies_40_db() -> None:
    found = holdover.tune(pipeline(), measured(), HELD_BACK, batch_size=2, **SURE)
    assert (found.target, found.certificate.target) == ("psnr>=40", "psnr>=40")
    assert found.profile.facts.qualities == ()


def test_ssim_needs_a_certificate() -> None:
    own = measured().with_quality("high", "ssim>=0.99")
    with pytest.raises(ConfigError, match=r'certified for ssim>=0\.99 here: run holdover\.tune\(.*, quality="high"\)'):
        planned(own, quality="high")
    found = tuned("ssim>=0.99").profile.with_quality("high", "ssim>=0.99")
    assert "quality high is ssim>=0.99: certified for ssim>=0.99" in planned(found, quality="high")[1]


def test_a_generation_may_have_another_quality() -> None:
    with holdover.enable(pipeline(), "plan", profile=measured(), quality="draft") as cache:
        generate()
        with cache.using(quality="lossless"):
            generate()
        first, second = cache.stats().generations
    assert second.computed_total > first.computed_total
    assert ("quality draft" in first.notes[0], "quality lossless" in second.notes[0]) == (True, True)


def test_without_a_profile_it_says_how_to_make_one() -> None:
    for settings in ({}, {"profile": "none"}):
        with pytest.raises(ConfigError, match=r'quality="high" needs a profile .*holdover\.calibrate\(pipe, prompts\)'):
            holdover.enable(pipeline(), "plan", quality="high", **settings)


@pytest.mark.parametrize("other", [{"budget": 4}, {"target": "psnr>=40"}, {"schedule": [0, 2]}])
def test_it_is_the_only_wish(other: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="one of budget, target, quality and schedule, not "):
        PlanConfig(quality="high", **other)


def test_a_name_with_a_typo_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"PlanConfig\.quality must be one of .*, not 'hihg'\. Did you mean 'high'\?"):
        holdover.enable(pipeline(), "plan", quality="hihg")
    for wrong in (
        lambda: measured().with_quality("balancd", "psnr>=30"),
        lambda: measured().target_of("balancd"),
        lambda: holdover.tune(pipeline(), measured(), HELD_BACK, quality="balancd", **SURE),
    ):
        with pytest.raises(ConfigError, match=r"no quality 'balancd'\. Did you mean 'balanced'\?"):
            wrong()
    with pytest.raises(ConfigError, match="A target looks like"):
        measured().with_quality("high", "good")
