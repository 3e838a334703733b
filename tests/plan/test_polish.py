"""Plans improved by trials on the model: never worse on the prompts that judge, and the ones that run."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from diffusers import UniPCMultistepScheduler

import holdover
from holdover.plan.calls import Caller
from holdover.plan.planner import search_profile
from holdover.plan.tune import Trials
from holdover.profiles import Profile
from tiny.prompted import prompted_flux, prompted_wan

from .tuned import CALIBRATION, HELD_BACK, STEPS, SURE, generate, measured, pipeline, tuned


def test_polishing_does_not_change_what_is_certified():
    """A certificate is for the weights that were tried, too; other weights on the same schedule are another plan."""
    found = tuned("psnr>=45")
    before = certified_image(found.profile)
    polished = holdover.polish(
        pipeline(), found.profile, len(found.certificate.computed), CALIBRATION, trials=1, iterations=2, progress=False
    )
    with holdover.enable(pipeline(), "plan", profile=polished, target="psnr>=45") as cache:
        after = generate()
        assert torch.equal(after, before) or "certified" not in str(cache.stats())


def certified_image(profile):
    with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=45"):
        return generate()


def test_polishing_with_a_multistep_scheduler_is_never_worse_either():
    """The weights tried must be those for the scheduler that runs, not for Euler."""
    pipe = prompted_flux()
    shifting = {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
    pipe.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, **shifting)
    profile = holdover.calibrate(pipe, CALIBRATION, STEPS, effort="quick", progress=False)
    trials = Trials(Caller(pipe, STEPS, profile.facts.guidance), CALIBRATION)
    trials.generate_references()
    start = search_profile(profile).frontier[3].computed
    before = trials.run(profile, "psnr", start).values
    polished = holdover.polish(pipe, profile, 3, CALIBRATION, trials=20, iterations=2, progress=False)
    (schedule,) = polished.facts.schedules
    after = trials.run(polished, "psnr", schedule.computed).values
    half = len(CALIBRATION) // 2  # the second half judges
    assert score(after[half:]) >= score(before[half:]) - 1e-6


def score(values):
    return 0.5 * sum(values) / len(values) + 0.5 * min(values)


def mean_quality(profile, budget, prompts, seed):
    """The mean PSNR of a budget as `enable` would run it."""
    with holdover.enable(pipeline(), "plan", profile=profile, budget=budget) as cache:
        generate()
        computed = {v.step for v in cache.stats().last.forwards if v.computed}
    trials = Trials(Caller(pipeline(), STEPS, profile.facts.guidance), prompts, seed, batch_size=2)
    trials.generate_references()
    values = trials.run(profile, "psnr", tuple(sorted(computed))).values
    return score(values)


@pytest.mark.parametrize("budget", [2, 3])
def test_a_polished_plan_is_never_worse_on_the_prompts_that_judge(budget):
    prompts = [*CALIBRATION, "a yellow bus", "two clouds"]
    polished = holdover.polish(
        pipeline(), measured(), budget, prompts, trials=8, iterations=2, batch_size=2, progress=False
    )
    (schedule,) = polished.facts.schedules
    assert len(schedule.computed) == budget
    assert schedule.computed[0] == 0
    before = mean_quality(measured(), budget, prompts[2:], seed=2)
    assert mean_quality(polished, budget, prompts[2:], seed=2) >= before - 1e-6
    with holdover.enable(pipeline(), "plan", profile=polished, budget=budget) as cache:
        generate()
        assert "polished" in str(cache.stats())


def test_a_plan_with_nothing_held_is_polished_and_saved_too(tmp_path):
    polished = holdover.polish(pipeline(), measured(), STEPS, CALIBRATION[:2], trials=1, iterations=2, progress=False)
    assert Profile.load(polished.save(tmp_path / "all.safetensors")) == polished


def test_polishing_needs_prompts_to_fit_to_and_prompts_to_judge():
    with pytest.raises(holdover.ConfigError, match="two prompts at least"):
        holdover.polish(pipeline(), measured(), 3, CALIBRATION[:1], progress=False)


@pytest.mark.parametrize("budget", [0, STEPS + 1])
def test_a_budget_that_cannot_be_polished(budget):
    with pytest.raises(holdover.ConfigError, match="1 to 8 computed steps"):
        holdover.polish(pipeline(), measured(), budget, CALIBRATION, progress=False)


class TestTwoExperts:
    """A video model with two experts, each of which begins with a computed step."""

    STEPS = 8

    @staticmethod
    @cache
    def video():
        return prompted_wan()

    @staticmethod
    @cache
    def profile() -> Profile:
        return holdover.calibrate(
            TestTwoExperts.video(),
            CALIBRATION,
            TestTwoExperts.STEPS,
            effort="quick",
            progress=False,
            height=16,
            width=16,
        )

    def stats(self, profile: Profile, **settings):
        """The stats of one video under a plan."""
        with holdover.enable(self.video(), "plan", profile=profile, **settings) as cached:
            self.video()("a cat", num_inference_steps=self.STEPS, height=16, width=16, output_type="pt")
            return cached.stats()

    def computed(self, profile: Profile, **settings) -> tuple[int, ...]:
        return tuple(sorted({v.step for v in self.stats(profile, **settings).last.forwards if v.computed}))

    def test_what_an_error_means_for_a_video_and_where_experts_begin_is_measured(self):
        facts = self.profile().facts
        assert facts.psnr_offset is not None
        assert len(facts.noise) == self.STEPS
        assert facts.starts == (0, 3)
        assert list(search_profile(self.profile()).frontier) == list(range(2, self.STEPS + 1))

    @pytest.mark.parametrize("budget", [2, 4])
    def test_a_polished_plan_is_the_one_that_runs(self, budget):
        polished = holdover.polish(
            self.video(), self.profile(), budget, CALIBRATION, trials=12, iterations=2, progress=False
        )
        (schedule,) = polished.facts.schedules
        assert {0, 3} <= set(schedule.computed)
        assert self.computed(polished, budget=budget) == schedule.computed
        assert "polished" in str(self.stats(polished, budget=budget))

    def test_a_certified_plan_is_the_one_that_runs(self):
        found = holdover.tune(self.video(), self.profile(), HELD_BACK, "psnr>=40", **SURE)
        assert found.certificate is not None
        assert all(isinstance(value, float) for tried in found.tried for value in tried.values)
        assert self.computed(found.profile, target="psnr>=40") == found.certificate.computed
        assert "certified" in str(self.stats(found.profile, target="psnr>=40"))

    def test_a_budget_without_a_step_for_each_cannot_be_polished(self):
        with pytest.raises(holdover.ConfigError, match="2 to 8 computed steps, not 1"):
            holdover.polish(self.video(), self.profile(), 1, CALIBRATION, progress=False)
