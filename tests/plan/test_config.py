"""Settings of a plan: what may be asked for, and what is said of anything else."""

from __future__ import annotations

import pytest

import holdover
from holdover import ConfigError, PlanConfig
from holdover.plan.config import Target, steps_for


@pytest.mark.parametrize(
    "given",
    [
        {"budget": 4, "target": "psnr>=40"},
        {"budget": "4x", "schedule": [0, 2]},
        {"target": "psnr>=40", "schedule": [0]},
    ],
)
def test_one_wish_at_a_time(given):
    with pytest.raises(ConfigError, match="one of budget, target, quality and schedule, not " + " and ".join(given)):
        PlanConfig(**given)


@pytest.mark.parametrize("budget", ["fast", "0.5x", "x", "4", "-4x", "4x4", ""])
def test_budget_in_words_that_mean_nothing(budget):
    with pytest.raises(ConfigError, match="at least 1x like '4x'"):
        PlanConfig(budget=budget)


@pytest.mark.parametrize("budget", [0, -3])
def test_budget_below_one_step(budget):
    with pytest.raises(ConfigError, match="at least 1 computed step"):
        PlanConfig(budget=budget)


@pytest.mark.parametrize("budget", [True, 3.5, [4], float("nan")])
def test_budget_of_another_type(budget):
    with pytest.raises(ConfigError, match=r"PlanConfig\.budget must be"):
        PlanConfig(budget=budget)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("psnt>=40", "Did you mean 'psnr'"),
        ("sim>=0.9", "Did you mean 'ssim'"),
        ("lpips>=0.9", "Known: psnr, ssim"),
        ("psnr>40", "looks like 'psnr>=40'"),
        ("psnr>=", "looks like"),
        ("psnr>=nan", "looks like"),
        ("good", "looks like"),
        ("ssim>=1.5", "at most 1"),
    ],
)
def test_target_that_cannot_be_read_or_met(target, said):
    with pytest.raises(ConfigError, match=said):
        PlanConfig(target=target)


@pytest.mark.parametrize("schedule", [[], [0, 2, 2], [-1, 3], [0, -5]])
def test_schedule_that_is_none(schedule):
    with pytest.raises(ConfigError, match="distinct steps counted from 0"):
        PlanConfig(schedule=schedule)


@pytest.mark.parametrize("schedule", ["0,3", 3, [0, 1.5], [0, "3"]])
def test_schedule_of_another_type(schedule):
    with pytest.raises(ConfigError, match=r"PlanConfig\.schedule must be"):
        PlanConfig(schedule=schedule)


@pytest.mark.parametrize(("name", "value"), [("predictor", "taylor"), ("quantity", "latent")])
def test_choices_are_named(name, value):
    with pytest.raises(ConfigError, match="one of"):
        PlanConfig(**{name: value})


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match="budget"):
        PlanConfig.from_dict({"bugdet": 4})


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("psnr>=40", Target("psnr", 40)),
        (" PSNR >= 37.5 dB ", Target("psnr", 37.5)),
        ("ssim>=0.98", Target("ssim", 0.98)),
        ("ssim>=1", Target("ssim", 1)),
    ],
)
def test_targets_in_words(text, target):
    assert Target.parsed(text) == target
    assert Target.parsed(str(target)) == target


@pytest.mark.parametrize(
    ("budget", "steps", "computed"),
    [(10, 50, 10), (60, 50, 50), ("4x", 50, 12), ("1x", 50, 50), ("2.5x", 50, 20), ("99x", 50, 1), ("3x", 2, 1)],
)
def test_budgets_in_steps(budget, steps, computed):
    assert steps_for(budget, steps) == computed


def test_settings_are_json_values_and_back():
    config = PlanConfig(schedule=[0, 3, 6], predictor="newton")
    assert PlanConfig.from_dict(config.as_dict()) == config
    assert config.replaced(schedule=None, budget="4x").budget == "4x"


def test_the_backend_has_its_name():
    assert holdover.get_cache_backend("plan", {"budget": 4}).settings == PlanConfig(budget=4)
