"""A short soak run: long-lived pipelines leave nothing behind and generate what fresh ones generate."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak.plan import RESIDENT, SHARING, Record, State, make_plan
from benchmarks.soak.run import soak


def test_a_short_soak_run_leaves_nothing_behind_and_equals_fresh_processes() -> None:
    plan = make_plan(60, seed=197, steps=(4, 10), compare_every=30)
    outcome = soak(plan, samples=6)
    assert outcome.generations == 60
    assert outcome.counts["aborted"] >= 3
    assert all(outcome.counts[key] >= 1 for key in ("interrupted", "prompts switched", "through other pipelines"))
    assert outcome.counts["held"] >= 50
    assert all(c["held"] > 0 for c in outcome.comparisons)
    assert outcome.equal == len(outcome.comparisons) == 2
    assert outcome.faults() == []


def test_a_plan_is_fixed_by_its_seed_and_survives_json() -> None:
    plan = make_plan(100, seed=1)
    assert plan == make_plan(100, seed=1) != make_plan(100, seed=2)
    assert [Record.from_json(record.as_json()) for record in plan] == plan


def test_a_plan_has_every_kind_of_event() -> None:
    plan = make_plan(400, seed=0)
    aborts = [r.abort for r in plan if r.abort is not None]
    assert {(a["in"], a["error"]) for a in aborts} == {
        ("interrupt", None),
        *((where, error) for where in ("block", "callback") for error in ("KeyboardInterrupt", "RuntimeError")),
    }
    assert {r.through for r in plan} == {None, *SHARING}
    assert {r.through for r in plan if r.compare} == {None, SHARING[0]}
    assert {r.switch is None for r in plan if r.compare} == {True, False}
    methods = {None if r.state.cache is None else r.state.cache["method"] for r in plan}
    assert methods == {None, "none", "tea_cache", "mag_cache"}
    assert {r.override == {} for r in plan if r.override is not None} == {True, False}
    assert all({r.state.lora is None for r in plan if r.pipeline == name} == {True, False} for name in RESIDENT)
    assert all(r.abort is None for r in plan if r.compare)


def test_a_record_without_detours_generates_the_same_image() -> None:
    cache = {"method": "tea_cache", "settings": {"rel_l1_thresh": 0.2, "coefficients": [1.0, 0.0]}}
    record = Record(0, "FluxPipeline", 8, 0, state=State(cache), again=True, refresh=True)
    assert record.without_detours().state == State(cache)
    assert Record(0, "FluxPipeline", 8, 0, state=State(cache), override={}).without_detours().state == State()
    other = Record(0, "FluxPipeline", 8, 0, state=State(cache), override={"rel_l1_thresh": 0.5}).without_detours()
    assert other.state.cache == {"method": "tea_cache", "settings": {"rel_l1_thresh": 0.5, "coefficients": [1.0, 0.0]}}
