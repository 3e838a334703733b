"""Context parallel, by diffusers' own code: the same decisions as one process, the same picture up to rounding."""

from __future__ import annotations

from typing import Any

import pytest

from holdover.grid import Grid
from holdover.policies.teacache import Polynomial, TeaCachePolicy
from parallel.company import Company
from parallel.told_apart import APART

ALL = ("mag_cache", "tea_cache", "plan", "cache_dit")
EVEN = {"ulysses_degree": 2}
UNEVEN = {"ulysses_degree": 2, "ulysses_anything": True}
RING = {"ring_degree": 2}
UNEVEN_RING = {"ring_degree": 2, "ring_anything": True}


def assert_as_one_process(found: list[dict[str, tuple[Any, ...]]]) -> None:
    for of_rank in found:
        for method, (distance, decisions, of_one) in of_rank.items():
            assert distance < 1e-5, method
            assert decisions == of_one, method
            assert any("h" in trace for trace in decisions.values()), f"{method} held nothing"


@pytest.mark.parametrize(
    ("model", "how"),
    [("flux", EVEN), ("flux", RING), ("wan", EVEN), ("wan", RING), ("qwen", UNEVEN), ("qwen", UNEVEN_RING)],
    ids=str,
)
def test_every_method_over_two_ranks(two: Company, model: str, how: dict[str, Any]) -> None:
    assert_as_one_process(two.run("sequence", model, how, ALL))


def test_a_signal_that_is_read_late(two: Company) -> None:
    assert_as_one_process(two.run("sequence", "flux", EVEN, ("tea_cache",), {"read": "late"}))


def test_a_ring_of_two_by_two_ranks(four: Company) -> None:
    how = {"ring_degree": 2, "ulysses_degree": 2}
    assert_as_one_process(four.run("sequence", "flux", how, ("tea_cache", "cache_dit")))


def by_itself(changes: list[float], threshold: float) -> str:
    """What a rank would decide by what it alone has seen."""
    policy = TeaCachePolicy(threshold, Polynomial((1.0, 0.0)), Grid(len(changes) + 1))
    state = policy.start()
    made = [policy.decide(step, change, state) for step, change in enumerate([None, *changes])]
    return "".join("C" if decision.compute else "h" for decision in made)


def test_ranks_that_would_decide_otherwise_by_themselves_decide_alike(two: Company) -> None:
    (_, first), (_, second) = two.run("parted_signal", 0.0)
    threshold = (sum(first[:4]) + sum(second[:4])) / 2
    (decided, first), (same, second) = two.run("parted_signal", threshold)
    assert by_itself(first, threshold) != by_itself(second, threshold)
    assert decided == same
    assert "h" in decided["cond"]


def test_groups_of_ranks_with_different_requests_are_independent(four: Company) -> None:
    found = four.run("two_requests", APART)
    assert_as_one_process(found)
    for method in APART:
        first, again, second, too = (of_rank[method][1] for of_rank in found)
        assert first == again
        assert second == too
        assert first != second, method


def test_ranks_without_a_group_exchange_nothing(two: Company) -> None:
    first, second = two.run("two_processes", APART)
    for method in APART:
        assert first[method] != second[method], method
