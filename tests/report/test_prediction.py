"""The predicted frontier next to the measured one: every budget of the planner, on the axes of what was run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diffusers import FirstBlockCacheConfig

import holdover
from holdover.compare import Comparison, Custom, FewerSteps, MethodCandidate, Results, compare, diffusers_cache
from holdover.metrics import Summary
from holdover.plan import TuningResult
from holdover.plan.planner import search_profile
from holdover.profiles import Profile, measured
from holdover.report import Prediction, write_report
from holdover.report.plots import measure_curves, plot_prediction, predict_psnr
from tiny.prompted import prompted_flux

STEPS, TARGET = 8, "psnr>=45"
HELD_OUT = ["yellow car", "a green tree", "a house", "a pink flower"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return prompted_flux()


@pytest.fixture(scope="module")
def found(pipe: Any) -> TuningResult:
    profile = holdover.calibrate(pipe, ["red apple", "blue dog"], STEPS, batch_size=2, effort="quick", progress=False)
    sure = {"share": 0.5, "confidence": 0.9, "batch_size": 2, "progress": False}
    return holdover.tune(pipe, profile, HELD_OUT, TARGET, **sure)


@pytest.fixture(scope="module")
def prediction(found: TuningResult) -> Prediction:
    return Prediction.of(found, TARGET)


def broken(pipe: Any) -> Any:
    raise RuntimeError("no luck")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frontier")


@pytest.fixture(scope="module")
def results(pipe: Any, found: TuningResult, folder: Path) -> Results:
    found.profile.save(folder / "tiny.safetensors")
    settings = {"profile": str(folder / "tiny.safetensors")}
    plans = [MethodCandidate("plan", (("budget", k), *settings.items()), f"plan {k}", "plan") for k in (2, 4)]
    fewer = [FewerSteps(k, order) for order in (False, True) for k in (2, 4)]
    peers = [
        diffusers_cache("theirs 2", lambda: FirstBlockCacheConfig(threshold=2.0), "theirs"),
        MethodCandidate("none"),
    ]
    unknown = [Custom("fails", broken)]
    spec = Comparison(("yellow car", "a house"), (*plans, *fewer, *peers, *unknown), steps=STEPS, baselines=False)
    return compare(pipe, spec, folder)


def plots(html: str) -> list[str]:
    section = html[html.index('id="predicted"') : html.index('id="images"')]
    return re.findall(r"<svg.*?</svg>", section, re.DOTALL)


def dashed(svg: str, color: str) -> list[int]:
    """How many points each dashed line of a color has."""
    lines = re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', svg)
    dashes = [path for path, style in lines if "stroke-dasharray" in style and f"stroke: var(--{color})" in style]
    return [len(re.findall("[ML]", path)) for path in dashes]


def shipped() -> Profile:
    return next(profile for profile in measured() if profile.name == "emoji")


def test_every_budget_that_holds_has_what_the_planner_expects_of_it() -> None:
    profile = shipped()
    offset, frontier = profile.facts.psnr_offset, search_profile(profile).frontier
    assert offset is not None
    found = predict_psnr(profile)
    assert [count for count, _ in found] == list(range(1, 50))
    assert [value for _, value in found] == [frontier[count].psnr(offset) for count in range(1, 50)]
    to_60_db = [min(value, 60.0) for _, value in found]
    assert to_60_db == sorted(to_60_db)


def test_a_profile_without_images_predicts_nothing() -> None:
    assert predict_psnr(shipped().with_facts(psnr_offset=None)) == ()


def test_trials_have_what_was_expected_and_what_was_measured(found: TuningResult, prediction: Prediction) -> None:
    assert len(prediction.trials) == len(found.tried) > 1
    for trial, tried in zip(prediction.trials, found.tried, strict=True):
        assert trial.expected == prediction.at(trial.computed) == tried.expected
        assert trial.p10 == Summary.of(tried.values).p10
        assert (trial.computed, trial.images) == (len(tried.computed), len(tried.values))
    assert found.certificate is not None
    assert prediction.certified == len(found.certificate.computed)
    assert prediction.at(STEPS) is prediction.at(None) is None


def test_other_methods_and_both_baselines_are_measured_curves(results: Results) -> None:
    lines = measure_curves(results)
    assert set(lines) == {"plan", "theirs", "none", "fewer_steps", "second_order"}
    for series, labels in {
        "plan": "plan {}",
        "fewer_steps": "{} steps",
        "second_order": "{} steps, second order",
    }.items():
        kept = tuple((k, results.row(labels.format(k)).summary("psnr").p10) for k in (2, 4))
        assert lines[series] == kept


def test_equal_images_are_above_all_others(results: Results) -> None:
    lines = measure_curves(results)
    finite = [height for name, line in lines.items() if name != "none" for _, height in line]
    assert lines["none"] == ((STEPS, max(finite) + 5),)


def test_of_two_settings_with_as_many_steps_the_better_one_counts(results: Results) -> None:
    plan, other = results.row("plan 4"), results.row("4 steps")
    row = replace(other, candidate=plan.candidate | {"label": "again"}, computed=plan.computed, held=plan.held, steps=8)
    lines = measure_curves(replace(results, rows=(plan, row)))
    assert lines == {"plan": ((4, max(plan.summary("psnr").p10, other.summary("psnr").p10)),)}


def test_both_panels_have_the_prediction_at_every_budget(
    results: Results, folder: Path, prediction: Prediction
) -> None:
    html = write_report(results, folder, prediction=prediction).read_text("utf-8")
    assert len(plots(html)) == 2
    for svg in plots(html):
        assert dashed(svg, "rose") == [STEPS - 1, STEPS - 1]
        assert svg.count(">target 45 dB<") == 2
        assert svg.count(f">certified: {prediction.certified}<") == 2
        assert not re.search(r"#0[14a]0[25b]", svg), "a placeholder color is left"
    for name in ("fewer steps", "fewer steps, second-order solver", "theirs", "plan"):
        assert re.search(rf">\s*{name}<", plots(html)[0])


def test_the_page_says_what_was_found_and_what_each_plan_kept(
    results: Results, folder: Path, prediction: Prediction
) -> None:
    html = write_report(results, folder, prediction=prediction).read_text("utf-8")
    assert f"Found: {prediction.words.replace('>', '&gt;')}." in html
    body = html[html.index('<table class="trials">') : html.index('id="images"')]
    assert body.count('<th scope="row">') == len(prediction.trials)
    assert body.count("<td>certified</td>") == 1
    assert f"{prediction.at(2):.1f} dB expected" in html
    assert html.count("dB expected</li>") == 2


def test_without_a_prediction_nothing_of_it_is_shown(results: Results, folder: Path) -> None:
    html = write_report(results, folder).read_text("utf-8")
    assert 'id="predicted"' not in html
    assert "dB expected" not in html


def test_a_target_that_is_no_psnr_is_no_line(results: Results, found: TuningResult) -> None:
    svg = plot_prediction(results, Prediction.of(found, "ssim>=0.9"), 11.5, 5.6, "ssim")
    assert "target" not in svg
    assert svg.count(">certified: ") == 1


def test_a_profile_that_predicts_nothing_is_mentioned(results: Results, prediction: Prediction) -> None:
    svg = plot_prediction(results, replace(prediction, psnr=()), 11.5, 5.6, "none")
    assert "this profile predicts no PSNR" in svg
    assert dashed(svg, "rose") == []


def test_a_page_elsewhere(results: Results, folder: Path, tmp_path: Path, prediction: Prediction) -> None:
    page = write_report(results, folder, tmp_path / "there.html", prediction)
    assert page == tmp_path / "there.html"
    assert "<img" in page.read_text("utf-8")
