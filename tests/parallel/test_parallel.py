"""Branches, tokens and weights over several ranks: the decisions and the image are those of one process.

Everything is in one file because its tests share two groups of worker processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from constant_free import HOLD
from holdover.grid import Grid
from holdover.policies.teacache import Polynomial, TeaCachePolicy
from parallel.workers import RankTimeoutError, WorkerGroup, run_under_torchrun

ROOT = Path(__file__).resolve().parents[2]
ALL = ("mag_cache", "tea_cache", "plan", "cache_dit")
TOLERANCE = 1e-5  # relative; ranks add up in another order, or read weights at another address
# With these settings the two prompts of the cases are decided differently, each by itself.
DIFFERENT: dict[str, dict[str, Any]] = {
    "tea_cache": {"rel_l1_thresh": 0.15},
    "cache_dit": {"residual_diff_threshold": 0.3},
}
Results = list[dict[str, tuple[Any, ...]]]


def test_a_rank_that_hangs_is_an_error_and_the_group_starts_again(two: WorkerGroup) -> None:
    two.run("rank")
    with pytest.raises(RankTimeoutError, match=r"ranks \[0\]"):
        two.run("wait_alone", lag=1)
    assert two.run("rank") == [0, 1]


def test_the_example_generates_the_image_of_one_process_over_two() -> None:
    printed = run_under_torchrun(2, ROOT / "examples" / "parallel.py", "32")
    lines = [line.split() for line in printed.splitlines()]
    assert [line[:4] for line in lines] == [
        [method, "rank", rank, branch]
        for method in ("tea_cache", "cache_dit", "plan")
        for rank, branch in (("0", "cond"), ("1", "uncond"))
    ]
    assert all({"C", "h"} == set(line[4]) and len(line[4]) == 20 for line in lines)
    assert all(" ".join(line[5:]) == "bit for bit the image of one process" for line in lines)


# Guidance: each branch on a rank of its own


def assert_branches_of_one_process(results: Results, names: tuple[str, str]) -> None:
    for own, of_rank in zip(names, results, strict=True):
        for method, (equal, decisions, of_one) in of_rank.items():
            assert equal, method
            assert decisions == {own: of_one[own]}, method
            assert "h" in decisions[own], f"{method} held nothing"


@pytest.mark.parametrize("model", ["flux", "qwen", "wan"])
def test_each_rank_runs_and_caches_its_own_branch(two: WorkerGroup, model: str) -> None:
    methods = ("tea_cache", "mag_cache", "cache_dit", "plan")
    assert_branches_of_one_process(two.run("guidance", model, methods), ("cond", "uncond"))


@pytest.mark.parametrize("model", ["flux", "qwen"])
def test_unnamed_branches_are_numbered_as_in_one_process(two: WorkerGroup, model: str) -> None:
    assert_branches_of_one_process(two.run("guidance", model, ("mag_cache", "tea_cache"), False), ("1", "2"))


def test_the_rank_identifies_the_branch_where_nothing_else_does(two: WorkerGroup) -> None:
    first, second = two.run("drifting_guidance")
    assert list(first) == ["1"]
    assert list(second) == ["2"]
    assert first["1"] == second["2"]
    assert "h" in first["1"]


def test_guidance_and_sequence_over_four_ranks(four: WorkerGroup) -> None:
    results = four.run("guidance_and_sequence", "wan", ("tea_cache", "cache_dit", "plan"))
    results += four.run("guidance_and_sequence", "flux", ("tea_cache", "cache_dit"))
    for own, of_rank in zip(["cond", "cond", "uncond", "uncond"] * 2, results, strict=True):
        for method, (distance, decisions, of_one) in of_rank.items():
            assert distance < TOLERANCE, method
            assert decisions == {own: of_one[own]}, method
            assert "h" in decisions[own], f"{method} held nothing"


# Sequence: tokens split over ranks by diffusers' context parallelism


def assert_as_one_process(results: Results) -> None:
    for of_rank in results:
        for method, (distance, decisions, of_one) in of_rank.items():
            assert distance < TOLERANCE, method
            assert decisions == of_one, method
            assert any("h" in trace for trace in decisions.values()), f"{method} held nothing"


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("flux", {"ulysses_degree": 2}),
        ("flux", {"ring_degree": 2}),
        ("wan", {"ulysses_degree": 2}),
        ("wan", {"ring_degree": 2}),
        ("qwen", {"ulysses_degree": 2, "ulysses_anything": True}),
        ("qwen", {"ring_degree": 2, "ring_anything": True}),
    ],
    ids=str,
)
def test_every_method_with_tokens_over_two_ranks(two: WorkerGroup, model: str, how: dict[str, Any]) -> None:
    assert_as_one_process(two.run("sequence", model, how, ALL))


@pytest.mark.parametrize("model", ["flux", "wan"])
def test_methods_without_constants_over_two_ranks(two: WorkerGroup, model: str) -> None:
    free = tuple(HOLD)
    assert_branches_of_one_process(two.run("guidance", model, free), ("cond", "uncond"))
    assert_as_one_process(two.run("sequence", model, {"ulysses_degree": 2}, free))
    for how in ("fully_shard", "wrapper", *(["tensor"] if model == "flux" else [])):
        assert_as_one_process(two.run("weights", how, model, free))


def test_a_signal_that_is_read_late(two: WorkerGroup) -> None:
    assert_as_one_process(two.run("sequence", "flux", {"ulysses_degree": 2}, ("tea_cache",), {"read": "late"}))


def test_a_ring_of_two_by_two_ranks(four: WorkerGroup) -> None:
    how = {"ring_degree": 2, "ulysses_degree": 2}
    assert_as_one_process(four.run("sequence", "flux", how, ("tea_cache", "cache_dit")))


def decide_alone(changes: list[float], threshold: float) -> str:
    """What a rank would decide from the changes of its own tokens."""
    policy = TeaCachePolicy(threshold, Polynomial((1.0, 0.0)), Grid(len(changes) + 1))
    state = policy.start()
    decisions = [policy.decide(step, change, state) for step, change in enumerate([None, *changes])]
    return "".join("C" if decision.compute else "h" for decision in decisions)


def test_ranks_that_would_decide_differently_alone_decide_alike(two: WorkerGroup) -> None:
    (_, first), (_, second) = two.run("uneven_signal", 0.0)
    threshold = (sum(first[:4]) + sum(second[:4])) / 2
    (decisions, first), (same, second) = two.run("uneven_signal", threshold)
    assert decide_alone(first, threshold) != decide_alone(second, threshold)
    assert decisions == same
    assert "h" in decisions["cond"]


def test_groups_of_ranks_with_different_requests_are_independent(four: WorkerGroup) -> None:
    results = four.run("two_requests", DIFFERENT)
    assert_as_one_process(results)
    for method in DIFFERENT:
        first, again, second, too = (of_rank[method][1] for of_rank in results)
        assert first == again
        assert second == too
        assert first != second, method


def test_ranks_without_a_group_exchange_nothing(two: WorkerGroup) -> None:
    first, second = two.run("two_processes", DIFFERENT)
    for method in DIFFERENT:
        assert first[method] != second[method], method


# Weights split over ranks: FSDP and tensor parallelism


@pytest.mark.parametrize(
    ("how", "model", "methods"),
    [
        ("fully_shard", "flux", ALL),
        ("fully_shard", "wan", ("mag_cache", "tea_cache")),
        ("wrapper", "flux", ("mag_cache", "plan")),
        ("wrapper", "wan", ("mag_cache", "plan")),
        ("tensor", "flux", ALL),
        ("tensor", "qwen", ("mag_cache", "tea_cache")),
    ],
)
def test_split_weights_give_the_image_and_the_decisions_of_one_process(
    two: WorkerGroup, how: str, model: str, methods: tuple[str, ...]
) -> None:
    assert_as_one_process(two.run("weights", how, model, methods))


@pytest.mark.parametrize("how", ["fully_shard", "wrapper", "tensor"])
def test_a_transformer_with_split_weights_finds_its_constants(two: WorkerGroup, how: str) -> None:
    for plain, split in two.run("notes", how):
        assert any("ratios" in note for note in plain)
        assert split == plain


def test_requests_that_share_weights_hold_the_same_steps(two: WorkerGroup) -> None:
    alone = two.run("two_processes", DIFFERENT)
    together = two.run("two_requests_on_shared_weights", DIFFERENT)
    for method in DIFFERENT:
        assert alone[0][method] != alone[1][method]
        assert together[0][method] == together[1][method]
        assert "h" in together[0][method]["cond"]


def test_a_signal_that_cannot_be_computed_from_wrapped_weights_is_an_error(two: WorkerGroup) -> None:
    assert all("Shard it with fully_shard" in error for error in two.run("unreadable_signal"))


def test_a_shape_that_is_new_to_one_rank_is_traced_by_all(two: WorkerGroup) -> None:
    first, second = two.run("new_shape_on_one_rank")
    assert first == second


def test_a_model_that_one_rank_must_refuse_is_refused_by_all(two: WorkerGroup) -> None:
    first, second = two.run("unsupported_model")
    assert "on another rank" in first
    assert "does not replay" in first
    assert "does not replay" in second


def test_invalid_groups_are_errors_that_name_the_key(four: WorkerGroup) -> None:
    for rank, (named, meshed, foreign, other) in enumerate(four.run("invalid_groups")):
        assert "Ranks.cfg must be a process group" in named
        assert "Ranks.sequence must be one dimension of a mesh" in meshed
        assert ("Ranks.cfg must be a process group this rank is in" in foreign) == (rank != 0)
        assert "but the transformer is split over ranks" in other


# The server


def test_a_served_model_over_two_processes(two: WorkerGroup) -> None:
    """Half of every weight each: the image and the steps of one process; a cancelled generation ends on both."""
    alone, first, after = two.run("split_server")[0]
    assert alone[1] == first[1] == after[1] == "ChhChh"
    assert first == after
    assert max(abs(a - b) for a, b in zip(alone[0], first[0], strict=True)) <= 1  # sums in another order
