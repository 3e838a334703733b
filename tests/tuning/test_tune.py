"""Plans tried on a model that takes prompts and makes pictures: polished, certified, and used."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from diffusers import UniPCMultistepScheduler

import holdover
from holdover.calibration.calls import Caller
from holdover.profiles import Profile
from holdover.tuning.certify import allowed
from holdover.tuning.refit import FITTED_BELOW, Refit
from holdover.tuning.setting import planner_for
from holdover.tuning.trials import Trials
from tiny.prompted import prompted_flux, prompted_wan

STEPS = 8
CALIBRATION = ["red apple", "a blue dog"]
HELD_BACK = ["yellow car", "a green tree", "a house", "a pink flower"]
SURE = {"share": 0.5, "confidence": 0.9, "progress": False}


@cache
def pipeline():
    return prompted_flux()


@cache
def measured() -> Profile:
    return holdover.calibrate(pipeline(), CALIBRATION, STEPS, batch_size=2, progress=False)


@cache
def tuned(target: str):
    return holdover.tune(pipeline(), measured(), HELD_BACK, target, batch_size=2, **SURE)


def picture(prompt="yellow car", seed=7):
    return pipeline()(
        prompt, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(seed), output_type="pt"
    ).images


def test_a_certificate_is_stored_and_used():
    found = tuned("psnr>=45")
    certificate = found.certificate
    assert certificate.prompts == 4
    assert certificate.below == 0
    assert (certificate.share, certificate.confidence, certificate.target) == (0.5, 0.9, "psnr>=45")
    assert certificate.noise == measured().facts.noise
    assert certificate in found.profile.facts.certificates
    assert "4 prompts tried, 0 below" in str(found)
    with holdover.enable(pipeline(), "plan", profile=found.profile, target="psnr>=45", guard=False) as cache:
        picture()
        generation = cache.stats().last
        assert "certified for psnr>=45" in str(cache.stats())
    for branch in generation.branches:
        visits = generation.of_branch(branch)
        assert tuple(v.step for v in visits if v.computed) == certificate.computed


def test_what_was_tried_is_told_from_slow_to_fast_and_ends_at_the_first_failure():
    found = tuned("psnr>=45")
    counts = [len(tried.computed) for tried in found.tried]
    assert counts == sorted(set(counts), reverse=True)
    passed = [tried.passed for tried in found.tried]
    assert passed == sorted(passed, reverse=True)
    best = [tried for tried in found.tried if tried.passed][-1]
    assert best.computed == found.certificate.computed
    assert all(value >= 45 for value in best.values)
    assert allowed(4, 0.5, 0.9) == 0


def test_a_target_that_nothing_meets_is_not_certified():
    found = tuned("psnr>=95")
    assert found.certificate is None
    assert found.profile == measured()
    assert "no plan could be certified" in str(found)
    assert len(found.tried) == 1


def test_a_certificate_for_more_serves_for_less_and_not_the_other_way_round():
    profile = tuned("psnr>=45").profile
    with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=41", guard=False) as cache:
        picture()
        assert "certified for psnr>=45" in str(cache.stats())
        with cache.using(target="psnr>=46"):
            picture()
        assert "certified for psnr>=46" not in str(cache.stats())


def test_a_certificate_is_for_the_plan_that_was_tried_and_no_other():
    """With another predictor, or residuals instead of outputs, the pictures are not those that were tried."""
    profile = tuned("psnr>=45").profile
    for other in ({"predictor": "hold"}, {"quantity": "seam"}):
        with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=45", **other) as cache:
            picture()
            assert "certified" not in str(cache.stats())


def test_ssim_needs_a_certificate_and_gets_one():
    with holdover.enable(pipeline(), "plan", profile=measured(), target="ssim>=0.99"):
        with pytest.raises(holdover.ConfigError, match=r"holdover\.tune"):
            picture()
    found = tuned("ssim>=0.99")
    assert found.certificate is not None
    with holdover.enable(pipeline(), "plan", profile=found.profile, target="ssim>=0.99") as cache:
        picture()
        assert "certified for ssim>=0.99" in str(cache.stats())


def test_psnr_without_a_certificate_is_what_is_expected():
    with holdover.enable(pipeline(), "plan", profile=measured(), target="psnr>=30", guard=False) as cache:
        picture()
        few = cache.stats().last.computed_total
        with cache.using(target="psnr>=55"):
            picture()
            assert cache.stats().last.computed_total > few


def test_a_target_without_a_profile_says_how_to_get_one():
    for settings in ({"target": "psnr>=40"}, {"predictor": "least_squares", "budget": 3}):
        with pytest.raises(holdover.ConfigError, match=r"holdover\.calibrate"):
            holdover.enable(pipeline(), "plan", **settings)


def test_polishing_does_not_change_what_is_certified():
    """A certificate is for the weights that were tried, too; new weights on the same schedule are another plan."""
    found = tuned("psnr>=45")
    before = certified_picture(found.profile)
    polished = holdover.polish(
        pipeline(), found.profile, len(found.certificate.computed), CALIBRATION, trials=1, progress=False
    )
    with holdover.enable(pipeline(), "plan", profile=polished, target="psnr>=45", guard=False) as cache:
        after = picture()
        assert torch.equal(after, before) or "certified" not in str(cache.stats())


def certified_picture(profile):
    with holdover.enable(pipeline(), "plan", profile=profile, target="psnr>=45", guard=False):
        return picture()


def test_polishing_with_a_multistep_scheduler_is_never_worse_either():
    """The weights tried must be those for the scheduler that runs, not for Euler's."""
    pipe = prompted_flux()
    shifting = {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
    pipe.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, **shifting)
    profile = holdover.calibrate(pipe, CALIBRATION, STEPS, progress=False)
    with Trials(Caller(pipe, STEPS, profile.facts.guidance), CALIBRATION) as tried:
        tried.reference()
        start = planner_for(profile).frontier[3].computed
        before = tried.values(profile, "psnr", start)
        polished = holdover.polish(pipe, profile, 3, CALIBRATION, trials=6, progress=False)
        (schedule,) = polished.facts.schedules
        after = tried.values(polished, "psnr", schedule.computed)
    half = len(CALIBRATION) // 2  # the second half judges
    assert worth(after[half:]) >= worth(before[half:]) - 1e-6


def worth(values):
    return 0.5 * sum(values) / len(values) + 0.5 * min(values)


def test_a_new_certificate_takes_the_place_of_the_old_one():
    again = holdover.tune(pipeline(), tuned("psnr>=45").profile, HELD_BACK, "psnr>=45", batch_size=2, **SURE)
    assert len(again.profile.facts.certificates) == 1
    assert again.certificate == tuned("psnr>=45").certificate


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


def mean_quality(profile, budget, prompts, seed):
    """The mean PSNR of a budget as `enable` would run it."""
    with holdover.enable(pipeline(), "plan", profile=profile, budget=budget, guard=False) as cache:
        picture()
        computed = {v.step for v in cache.stats().last.visits if v.computed}
    with Trials(Caller(pipeline(), STEPS, profile.facts.guidance), prompts, seed, batch_size=2) as tried:
        tried.reference()
        values = tried.values(profile, "psnr", tuple(sorted(computed)))
    return worth(values)


@pytest.mark.parametrize("budget", [2, 3])
def test_a_polished_plan_is_never_worse_on_the_prompts_that_judge(budget):
    prompts = [*CALIBRATION, "a yellow bus", "two clouds"]
    polished = holdover.polish(pipeline(), measured(), budget, prompts, trials=8, batch_size=2, progress=False)
    (schedule,) = polished.facts.schedules
    assert len(schedule.computed) == budget
    assert schedule.computed[0] == 0
    before = mean_quality(measured(), budget, prompts[2:], seed=2)
    assert mean_quality(polished, budget, prompts[2:], seed=2) >= before - 1e-6
    with holdover.enable(pipeline(), "plan", profile=polished, budget=budget) as cache:
        picture()
        assert "polished" in str(cache.stats())


def test_polishing_fits_late_steps_and_keeps_early_ones_as_they_were_planned():
    profile = measured()
    caller = Caller(pipeline(), STEPS, profile.facts.guidance)
    planner = planner_for(profile)
    computed = planner.frontier[3].computed
    with Refit(caller, profile, CALIBRATION, [0, 1]) as refit:
        fitted = refit.weights(computed, None)
    assert {noise > FITTED_BELOW for noise in profile.facts.noise} == {True, False}
    for step, planned in planner.weights(computed).items():
        own, fitted = fitted[: len(planned.values)], fitted[len(planned.values) :]
        assert (own == pytest.approx(planned.values, rel=1e-6)) == (profile.facts.noise[step] > FITTED_BELOW)
    assert fitted == ()


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
            TestTwoExperts.video(), CALIBRATION, TestTwoExperts.STEPS, progress=False, height=16, width=16
        )

    def drawn(self, profile: Profile, **settings):
        """The stats of one video under a plan."""
        with holdover.enable(self.video(), "plan", profile=profile, guard=False, **settings) as cached:
            self.video()("a cat", num_inference_steps=self.STEPS, height=16, width=16, output_type="pt")
            return cached.stats()

    def computed(self, profile: Profile, **settings) -> tuple[int, ...]:
        return tuple(sorted({v.step for v in self.drawn(profile, **settings).last.visits if v.computed}))

    def test_what_an_error_means_for_a_video_and_where_experts_begin_is_measured(self):
        facts = self.profile().facts
        assert facts.psnr_offset is not None
        assert len(facts.noise) == self.STEPS
        assert facts.starts == (0, 3)
        assert list(planner_for(self.profile()).frontier) == list(range(2, self.STEPS + 1))

    @pytest.mark.parametrize("budget", [2, 4])
    def test_a_polished_plan_is_the_one_that_runs(self, budget):
        polished = holdover.polish(self.video(), self.profile(), budget, CALIBRATION, trials=12, progress=False)
        (schedule,) = polished.facts.schedules
        assert {0, 3} <= set(schedule.computed)
        assert self.computed(polished, budget=budget) == schedule.computed
        assert "polished" in str(self.drawn(polished, budget=budget))

    def test_a_certified_plan_is_the_one_that_runs(self):
        found = holdover.tune(self.video(), self.profile(), HELD_BACK, "psnr>=40", **SURE)
        assert found.certificate is not None
        assert all(isinstance(value, float) for tried in found.tried for value in tried.values)
        assert self.computed(found.profile, target="psnr>=40") == found.certificate.computed
        assert "certified" in str(self.drawn(found.profile, target="psnr>=40"))

    def test_a_budget_without_a_step_for_each_cannot_be_polished(self):
        with pytest.raises(holdover.ConfigError, match="2 to 8 computed steps, not 1"):
            holdover.polish(self.video(), self.profile(), 1, CALIBRATION, progress=False)


def test_a_plan_with_nothing_held_is_polished_and_saved_too(tmp_path):
    polished = holdover.polish(pipeline(), measured(), STEPS, CALIBRATION[:2], trials=1, progress=False)
    assert Profile.load(polished.save(tmp_path / "all.safetensors")) == polished


def test_polishing_needs_prompts_to_fit_to_and_prompts_to_judge():
    with pytest.raises(holdover.ConfigError, match="two prompts at least"):
        holdover.polish(pipeline(), measured(), 3, CALIBRATION[:1], progress=False)


@pytest.mark.parametrize("budget", [0, STEPS + 1])
def test_a_budget_that_cannot_be_polished(budget):
    with pytest.raises(holdover.ConfigError, match="1 to 8 computed steps"):
        holdover.polish(pipeline(), measured(), budget, CALIBRATION, progress=False)


def test_the_frontier_of_a_profile_has_every_budget():
    assert list(planner_for(measured()).frontier) == list(range(1, STEPS + 1))
