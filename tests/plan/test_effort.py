"""`calibrate(effort=...)`: trials choose the planner's options and plans for the budgets asked for."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module

import pytest

import holdover
from holdover.plan.error_model import DEFAULT_OPTIONS
from holdover.plan.measure import expected_cost
from holdover.profiles import PlannerOptions, Profile

from .tuned import CALIBRATION, generate, pipeline

TRIALS = import_module("holdover.plan.polish")  # the name is that of the function, too
FEW = {"corrected_share": (0.85, 1.0), "depth": (2, 6)}


@cache
def calibrated(effort: str, steps: int, *budgets: int) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRIALS, "VARIANTS", FEW)
        patch.setattr(TRIALS, "MAX_TRIALS", 2)
        patch.setattr(TRIALS, "ITERATIONS", 3)
        return holdover.calibrate(pipeline(), CALIBRATION, steps, effort=effort, budgets=budgets, progress=False)


def test_quick_tries_nothing():
    facts = calibrated("quick", 8, 3).facts
    assert (facts.effort, facts.options, facts.schedules) == ("quick", DEFAULT_OPTIONS, ())


@pytest.mark.parametrize(("effort", "steps", "budgets"), [("standard", 8, (5, 6, 7)), ("thorough", 4, (2, 3))])
def test_plans_of_few_steps_are_tried_and_run(effort, steps, budgets, tmp_path):
    profile = calibrated(effort, steps, *budgets)
    assert profile.facts.effort == effort
    stored = {len(plan.computed): plan for plan in profile.facts.schedules}
    assert stored.keys() <= set(budgets)
    cost = dict(profile.facts.cost)
    assert 2 < cost["generations"] <= expected_cost(2, steps, effort, budgets)
    assert cost["seconds"] > 0
    loaded = Profile.load(profile.save(tmp_path / "p.safetensors"))
    assert loaded.facts.options == profile.facts.options
    for budget in budgets:
        with holdover.enable(pipeline(), "plan", profile=loaded, budget=budget) as cache:
            pipeline()("yellow car", num_inference_steps=steps, output_type="pt")
            computed = {forward.step for forward in cache.stats().last.forwards if forward.computed}
            assert len(computed) == budget
            if budget in stored:
                assert tuple(sorted(computed)) == stored[budget].computed
                assert stored[budget].origin in str(cache.stats())


def test_a_calibration_that_was_stopped_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(TRIALS, "VARIANTS", FEW)
    monkeypatch.setattr(TRIALS, "MAX_TRIALS", 0)
    monkeypatch.setattr(TRIALS, "ITERATIONS", 2)
    settings = {"effort": "thorough", "budgets": [2], "progress": False, "resume": tmp_path / "unfinished"}

    def stop(*_):
        raise KeyboardInterrupt

    forwards = []
    handle = pipeline().transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(TRIALS.Trials, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            holdover.calibrate(pipeline(), CALIBRATION, 4, **settings)
    before = len(forwards)
    profile = holdover.calibrate(pipeline(), CALIBRATION, 4, **settings)
    handle.remove()
    assert len(forwards) - before < before / 2  # generations are recorded again, and plans run by the pipeline
    assert profile.facts.effort == "thorough"
    with pytest.raises(holdover.ConfigError, match="from another calibration"):
        holdover.calibrate(pipeline(), CALIBRATION[::-1], 4, **settings)
    for other in ({"seed": 99}, {"seams": True}, {"sigmas": [1.0, 0.9, 0.5, 0.2]}):
        with pytest.raises(holdover.ConfigError, match="from another calibration"):
            holdover.calibrate(pipeline(), CALIBRATION, 4, **settings, **other)
    for damage in (b"\xff\xfe", b"{}"):
        (tmp_path / "unfinished" / "thorough.json").write_bytes(damage)
        with pytest.raises(holdover.ConfigError, match="is damaged; remove it"):
            holdover.calibrate(pipeline(), CALIBRATION, 4, **settings)


def test_a_training_that_was_stopped_gives_the_same_plan_and_the_cost_of_all_runs(tmp_path, monkeypatch):
    for name, value in {"VARIANTS": {}, "MAX_TRIALS": 0, "ITERATIONS": 4}.items():
        monkeypatch.setattr(TRIALS, name, value)
    settings = {"effort": "thorough", "budgets": [2], "progress": False}
    whole = holdover.calibrate(pipeline(), CALIBRATION, 4, resume=tmp_path / "whole", **settings)
    plain, judged = TRIALS._TrialSearch._judged, []

    def stop(search, *plan):
        judged.append(plan)
        if len(judged) == 3:
            raise KeyboardInterrupt
        return plain(search, *plan)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(TRIALS._TrialSearch, "_judged", stop)
        with pytest.raises(KeyboardInterrupt):
            holdover.calibrate(pipeline(), CALIBRATION, 4, resume=tmp_path / "stopped", **settings)
    continued = holdover.calibrate(pipeline(), CALIBRATION, 4, resume=tmp_path / "stopped", **settings)
    assert continued.facts.schedules == whole.facts.schedules
    assert dict(continued.facts.cost)["generations"] > dict(whole.facts.cost)["generations"]  # recorded twice


def test_a_moved_step_is_tried_on_all_generations_only_if_it_is_better_on_a_few(tmp_path, monkeypatch):
    for name, value in {"VARIANTS": {}, "MAX_TRIALS": 5, "ITERATIONS": 0, "SCREENED": 1}.items():
        monkeypatch.setattr(TRIALS, name, value)
    prompts = [*CALIBRATION, "a yellow bus", "two clouds"]
    settings = {"effort": "thorough", "budgets": [2], "progress": False, "resume": tmp_path}
    profile = holdover.calibrate(pipeline(), prompts, 5, **settings)
    trials = json.loads((tmp_path / "thorough.json").read_text())["trials"]
    screened = {name: trial["score"] for name, trial in trials.items() if name.startswith("screened ")}
    first, *others = [name for name in trials if name not in screened]
    assert len(screened) > 2
    for other in others:
        assert screened[f"screened {other}"] > screened[f"screened {first}"]
    assert dict(profile.facts.cost)["generations"] <= expected_cost(4, 5, "thorough", [2])


def test_options_of_the_profile_are_those_of_the_planner():
    profile = calibrated("quick", 8, 3).with_facts(options=PlannerOptions(first_steps=3))
    with holdover.enable(pipeline(), "plan", profile=profile, budget=4) as cache:
        generate()
        computed = {forward.step for forward in cache.stats().last.forwards if forward.computed}
    assert {0, 1, 2} <= computed


def test_a_plan_may_use_more_past_outputs_than_four():
    profile = calibrated("quick", 8, 3).with_facts(options=PlannerOptions(depth=6))
    images = []
    for options in (PlannerOptions(depth=6), DEFAULT_OPTIONS):
        with holdover.enable(pipeline(), "plan", profile=profile.with_facts(options=options), budget=7):
            images.append(generate())
    assert images[0].isfinite().all()


def test_what_cannot_be_calibrated_is_refused_before_anything_runs():
    with pytest.raises(holdover.ConfigError, match="Did you mean 'standard'"):
        holdover.calibrate(pipeline(), CALIBRATION, 4, effort="standart")
    with pytest.raises(holdover.ConfigError, match="needs two prompts"):
        holdover.calibrate(pipeline(), CALIBRATION[:1], 4, effort="standard")
    with pytest.raises(holdover.ConfigError, match="A budget is"):
        holdover.calibrate(pipeline(), CALIBRATION, 4, effort="standard", budgets=["fast"])
    for wrong in ({"trials": -1}, {"iterations": -1}):
        with pytest.raises(holdover.ConfigError, match="must be 0 or more"):
            holdover.polish(pipeline(), calibrated("quick", 8, 3), 3, CALIBRATION, progress=False, **wrong)
    with pytest.raises(holdover.ProfileError, match="corrected_share"):
        PlannerOptions(corrected_share=2.0)
