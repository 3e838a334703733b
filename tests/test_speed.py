"""benchmarks/speed on a tiny model: rows are measured, written, not measured again, and shown in tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.speed.box import measure_on_cpu
from benchmarks.speed.call import measure_calls
from benchmarks.speed.loop import Pipeline, parse_clocks
from benchmarks.speed.measure import OutOfTimeError, Results, check_identity, compare_to_ideal, measure_row
from benchmarks.speed.methods import UNCACHED, Candidate, candidates
from benchmarks.speed.models import MODELS
from benchmarks.speed.run import TINY, Options, Table, build
from benchmarks.speed.table import NONE_ON_PROCESSOR, NONE_YET, markdown, processor, whole_calls
from benchmarks.speed.training import measure_training

STEPS = 6
FLUX = {(row.by, row.label): row for row in candidates(MODELS["flux"].ratios)}


@pytest.fixture(scope="module")
def flux() -> Pipeline:
    return build("flux", Options(tiny=True), TINY)


def test_an_uncached_run_computes_every_step(flux: Pipeline) -> None:
    row = measure_row(flux, UNCACHED, STEPS)
    assert (row["computed"], row["held"], row["trace"]) == (STEPS, 0, "C" * STEPS)
    assert row["gpu_ms"]["held"] is None


@pytest.mark.parametrize(
    ("label", "trace"), [("plan, K = 10 of 50", "ChhhCh"), ("tea_cache", "ChhhCC"), ("plan, K = 15 of 50", "ChhhCh")]
)
def test_a_forced_schedule_is_what_runs(flux: Pipeline, label: str, trace: str) -> None:
    assert measure_row(flux, FLUX["holdover", label], STEPS)["trace"] == trace


def test_computing_every_step_gives_the_uncached_latents(flux: Pipeline) -> None:
    assert check_identity(flux, MODELS["flux"].ratios, STEPS) == {"mag_cache": True, "tea_cache": True, "plan": True}


def test_a_method_that_raises_is_a_row_that_says_so(flux: Pipeline) -> None:
    def enable(pipe: Pipeline, steps: int) -> None:
        raise ValueError("no such thing\nand more")

    assert measure_row(flux, Candidate("broken", "them", enable), STEPS) == {"raised": "ValueError: no such thing"}


def test_the_ideal_is_so_many_computed_steps_and_the_floor() -> None:
    row = {"gpu_ms": {"computed": 98.0, "held": 2.0}, "computed": 10, "held": 40, "wall_s": 1.1}
    least = {"floor_ms": 0.5, "ideal_s": 1.02, "over_ideal": 1.1 / 1.02 - 1}
    assert compare_to_ideal(row, 100.0, 0.5) == pytest.approx(least)


def test_rows_are_written_at_once_and_not_measured_again(tmp_path: Path) -> None:
    path, row = tmp_path / "speed.json", {"section": "growth", "model": "flux", "label": "plan"}
    Results(path, 60).add(row)
    again = Results(path, 0)
    assert not again.needs(row)
    assert again.needs(row | {"label": "mag_cache"})
    with pytest.raises(OutOfTimeError):
        again.check_time(1)


def test_a_spent_budget_stops_before_anything_is_build(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        Table("flux", Options(tiny=True), Results(tmp_path / "speed.json", -1)).run()
    assert markdown(tmp_path / "speed.json") == NONE_YET


def test_the_tables_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [FLUX["holdover", "mag_cache 0.24/5/0.1"]]
    monkeypatch.setattr("benchmarks.speed.run.candidates", lambda ratios: chosen)
    Table("flux", Options(tiny=True), Results(tmp_path / "speed.json", 300)).run()
    text = markdown(tmp_path / "speed.json")
    assert text.count("| no cache | 6 |") == 2
    assert text.count("| holdover mag_cache 0.24/5/0.1 | 4 + 2 |") == 2
    assert "compiled blocks; bit for bit when every step is computed: mag_cache, tea_cache, plan" in text


def test_on_the_processor_turns_are_written_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few steps, and with given figures for the first image of a new process."""
    first = {"import": 1.0, "load": 2.0, "draw": 3.0}
    monkeypatch.setattr("benchmarks.speed.box.first_image", lambda threads: first)
    measure_on_cpu(tmp_path / "speed_cpu.json", turns=1, steps=12, threads=torch.get_num_threads(), side=32)
    figures = json.loads((tmp_path / "speed_cpu.json").read_text())
    (turn,) = figures["turns"]
    assert (figures["threads"], figures["budget"], turn["computed"]) == (torch.get_num_threads(), 10, 10)
    assert figures["ratio"]["least"] == pytest.approx(turn["uncached_s"] / turn["plan_s"], rel=1e-4)
    text = processor(tmp_path / "speed_cpu.json")
    assert f"| 1 | {turn['uncached_s']:.2f} | {turn['plan_s']:.2f} |" in text
    assert "The first image of a new process takes 6.0 s" in text
    assert processor(tmp_path / "none.json") == NONE_ON_PROCESSOR


def test_what_the_card_says_of_its_clock() -> None:
    said = {"sm_mhz": 1590, "max_sm_mhz": 1980, "power_w": 679.81, "power_limited": True}
    assert parse_clocks("1590, 1980, 679.81, 0x0000000000000004\n") == said
    assert parse_clocks("345, 1980, 76.40, 0x0000000000000001\n") == {
        "sm_mhz": 345,
        "max_sm_mhz": 1980,
        "power_w": 76.4,
        "power_limited": False,
    }
    assert parse_clocks("1590, 1980, [N/A], [N/A]\n") is None
    assert parse_clocks("") is None


def test_a_whole_call_is_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.speed.call.MODES", ("eager", "compiled"))
    monkeypatch.setattr("benchmarks.speed.call.BUDGETS", (10,))
    measure_calls(Options(tiny=True), Results(tmp_path / "speed.json", 300))
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [row["computed"] for row in rows] == [6, 6, 2, 2]
    assert all(sum(row["parts"].values()) == pytest.approx(row["wall_s"], rel=1e-4) for row in rows)
    text = whole_calls(tmp_path / "speed.json")
    assert text.count("| compiled blocks | plan, K = 10 of 50, prompt ") == 2
    assert whole_calls(tmp_path / "none.json") == NONE_YET


def test_an_iteration_of_training_is_a_gradient_through_the_computed_steps(tmp_path: Path) -> None:
    measure_training(Options(tiny=True), Results(tmp_path / "speed.json", 300))
    (row,) = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert (row["computed"], row["model_calls"]) == (8, 15)  # the first 3 are recorded; a gradient counts as 2 more
    assert row["seconds"] > 0
    assert "One iteration of training" in markdown(tmp_path / "speed.json")


def test_float8_rows_are_measured_next_to_the_uncached_eager_run(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    Table("flux", Options(tiny=True), Results(tmp_path / "speed.json", 300), ("float8",)).run()
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [row["label"] for row in rows if row["mode"] == "eager"] == ["no cache"]
    measured = {row["label"]: row for row in rows if row["mode"] == "float8"}
    assert set(measured["identical"]["identical"].values()) == {True}
    assert set(measured["plan, K = 6 of 50"]["speedup"]) == {"eager", "float8"}
    assert "6 steps, float8, compiled blocks; bit for bit" in markdown(tmp_path / "speed.json")
