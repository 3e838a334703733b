"""Weights spread over ranks: FSDP is seen through, and ranks that meet inside the blocks run the same ones."""

from __future__ import annotations

import pytest

from parallel.company import Company
from parallel.told_apart import APART

ALL = ("mag_cache", "tea_cache", "plan", "cache_dit")


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
def test_the_picture_and_the_decisions_of_one_process(
    two: Company, how: str, model: str, methods: tuple[str, ...]
) -> None:
    for of_rank in two.run("weights", how, model, methods):
        for method, (distance, decisions, of_one) in of_rank.items():
            assert distance == 0.0 if how != "tensor" else distance < 1e-5, method
            assert decisions == of_one, method
            assert any("h" in trace for trace in decisions.values()), f"{method} held nothing"


@pytest.mark.parametrize("how", ["fully_shard", "wrapper", "tensor"])
def test_a_transformer_is_recognised_by_what_is_inside(two: Company, how: str) -> None:
    for plain, spread in two.run("recognised", how):
        assert any("ratios" in note for note in plain)
        assert spread == plain


def test_requests_that_share_weights_are_held_together(two: Company) -> None:
    by_themselves = two.run("two_processes", APART)
    together = two.run("two_requests_on_shared_weights", APART)
    for method in APART:
        assert by_themselves[0][method] != by_themselves[1][method]
        assert together[0][method] == together[1][method]
        assert "h" in together[0][method]["cond"]


def test_a_signal_that_cannot_be_read_off_wrapped_weights_is_refused(two: Company) -> None:
    assert all("Shard it with fully_shard" in said for said in two.run("unreadable"))


def test_a_kind_of_forward_that_is_new_to_one_rank_is_traced_by_all(two: Company) -> None:
    first, second = two.run("a_new_kind_on_one_rank")
    assert first == second


def test_a_model_that_one_rank_must_refuse_is_refused_by_all(two: Company) -> None:
    first, second = two.run("refused")
    assert "on another rank" in first
    assert "does not replay" in first
    assert "does not replay" in second


def test_groups_that_cannot_be_are_refused_by_name(four: Company) -> None:
    for rank, (named, meshed, foreign, other) in enumerate(four.run("misstated")):
        assert "Ranks.cfg must be a process group" in named
        assert "Ranks.sequence must be one dimension of a mesh" in meshed
        assert ("Ranks.cfg must be a process group this rank is in" in foreign) == (rank != 0)
        assert "but the transformer is split over ranks" in other
