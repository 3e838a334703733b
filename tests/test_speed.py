"""The speed benchmark of benchmarks/speed on a tiny model: rows are measured, kept, taken up again and shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.speed.loop import Pipeline
from benchmarks.speed.measure import against_ideal, identity, measured
from benchmarks.speed.methods import UNCACHED, Candidate, candidates
from benchmarks.speed.models import MODELS
from benchmarks.speed.results import OutOfTimeError, Results
from benchmarks.speed.run import TINY, Options, Table, built
from benchmarks.speed.table import NONE_YET, markdown

STEPS = 6
FLUX = {(row.by, row.label): row for row in candidates(MODELS["flux"].ratios, everything=True)}


@pytest.fixture(scope="module")
def flux() -> Pipeline:
    return built("flux", Options(tiny=True), TINY)


def test_an_uncached_run_computes_every_step(flux: Pipeline) -> None:
    row = measured(flux, UNCACHED, STEPS)
    assert (row["computed"], row["held"], row["trace"]) == (STEPS, 0, "C" * STEPS)
    assert row["gpu_ms"]["held"] is None


@pytest.mark.parametrize(
    ("label", "trace"), [("plan, K = 10 of 50", "ChhhCh"), ("tea_cache", "ChhhCC"), ("plan, K = 15 of 50", "ChhhCh")]
)
def test_a_forced_schedule_is_what_runs(flux: Pipeline, label: str, trace: str) -> None:
    assert measured(flux, FLUX["holdover", label], STEPS)["trace"] == trace


def test_computing_every_step_gives_the_uncached_latents(flux: Pipeline) -> None:
    assert identity(flux, MODELS["flux"].ratios, STEPS) == {"mag_cache": True, "tea_cache": True, "plan": True}


def test_a_method_that_raises_is_a_row_that_says_so(flux: Pipeline) -> None:
    def put_on(pipe: Pipeline, steps: int) -> None:
        raise ValueError("no such thing\nand more")

    assert measured(flux, Candidate("broken", "them", put_on), STEPS) == {"raised": "ValueError: no such thing"}


def test_the_ideal_is_own_computed_steps_and_the_floor() -> None:
    row = {"gpu_ms": {"computed": 100.0, "held": 2.0}, "computed": 10, "held": 40, "wall_s": 1.1}
    assert against_ideal(row, 0.5) == pytest.approx({"floor_ms": 0.5, "ideal_s": 1.02, "over_ideal": 1.1 / 1.02 - 1})


def test_rows_are_written_at_once_and_not_measured_again(tmp_path: Path) -> None:
    path, row = tmp_path / "speed.json", {"section": "growth", "model": "flux", "label": "plan"}
    Results(path, 60).add(row)
    again = Results(path, 0)
    assert not again.needs(row)
    assert again.needs(row | {"label": "mag_cache"})
    with pytest.raises(OutOfTimeError):
        again.check_time(1)


def test_a_spent_budget_stops_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        Table("flux", Options(tiny=True), Results(tmp_path / "speed.json", -1)).run()
    assert markdown(tmp_path / "speed.json") == NONE_YET


def test_the_tables_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [FLUX["holdover", "mag_cache 0.24/5/0.1"]]
    monkeypatch.setattr("benchmarks.speed.run.candidates", lambda ratios, everything: chosen)
    Table("flux", Options(tiny=True), Results(tmp_path / "speed.json", 300)).run()
    text = markdown(tmp_path / "speed.json")
    assert text.count("| no cache | 6 |") == 2
    assert text.count("| holdover mag_cache 0.24/5/0.1 | 4 + 2 |") == 2
    assert "compiled blocks; bit for bit when every step is computed: mag_cache, tea_cache, plan" in text
