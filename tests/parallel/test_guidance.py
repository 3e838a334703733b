"""Each branch of guidance on a rank of its own: one process' picture, bit for bit, and its decisions."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.company import Company

METHODS = ("tea_cache", "mag_cache", "cache_dit", "plan")


def assert_one_process_parted(found: list[dict[str, tuple[Any, ...]]], names: tuple[str, str]) -> None:
    for own, of_rank in zip(names, found, strict=True):
        for method, (equal, decisions, of_one) in of_rank.items():
            assert equal, method
            assert decisions == {own: of_one[own]}, method
            assert "h" in decisions[own], f"{method} held nothing"


@pytest.mark.parametrize("model", ["flux", "qwen", "wan"])
def test_each_rank_runs_and_remembers_its_own_branch(two: Company, model: str) -> None:
    assert_one_process_parted(two.run("guidance", model, METHODS), ("cond", "uncond"))


@pytest.mark.parametrize("model", ["flux", "qwen"])
def test_without_names_the_branches_are_numbered_as_one_process_numbers_them(two: Company, model: str) -> None:
    assert_one_process_parted(two.run("guidance", model, ("mag_cache", "tea_cache"), False), ("1", "2"))


def test_the_rank_tells_the_branch_where_nothing_else_does(two: Company) -> None:
    first, second = two.run("drifting_guidance")
    assert list(first) == ["1"]
    assert list(second) == ["2"]
    assert first["1"] == second["2"]
    assert "h" in first["1"]


def test_guidance_and_sequence_over_four_ranks(four: Company) -> None:
    found = four.run("guidance_and_sequence", "wan", ("tea_cache", "cache_dit", "plan"))
    found += four.run("guidance_and_sequence", "flux", ("tea_cache", "cache_dit"))
    for own, of_rank in zip(["cond", "cond", "uncond", "uncond"] * 2, found, strict=True):
        for method, (distance, decisions, of_one) in of_rank.items():
            assert distance < 1e-5, method
            assert decisions == {own: of_one[own]}, method
            assert "h" in decisions[own], f"{method} held nothing"


def test_the_guard_of_a_plan_is_alarmed_on_all_ranks_or_on_none(two: Company) -> None:
    (calm, both), (alarmed, same) = two.run("guarded")
    assert not any(calm)
    assert any(alarmed)
    assert both == same == alarmed
