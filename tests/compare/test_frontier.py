"""Plans, every other method and both baselines, on a tiny real pipeline with a profile measured on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig

import holdover
from holdover.compare import Comparison, Results, build_frontier_comparison, compare, diffusers_cache
from holdover.compare.baselines import frontier_budgets
from holdover.errors import ConfigError
from holdover.profiles import Profile, measured
from tiny.prompted import prompted_flux, prompted_wan

STEPS = 8
PEERS = {
    "cache_dit DBCache",
    "cache_dit DBCache + TaylorSeer",
    "diffusers MagCache",
    "diffusers TaylorSeer",
    "diffusers first-block",
    "hold, uniform",
}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return prompted_flux()


@pytest.fixture(scope="module")
def profile(pipe: Any) -> Profile:
    return holdover.calibrate(pipe, ["red apple", "blue dog"], STEPS, batch_size=2, effort="quick", progress=False)


@pytest.fixture(scope="module")
def results(pipe: Any, profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("profile") / "tiny.safetensors"
    profile.save(path)
    return compare(pipe, build_frontier_comparison(profile, path, ["yellow car"]))


def generate(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    found: torch.Tensor = pipe("a house", num_inference_steps=STEPS, generator=generator, output_type="pt").images
    return found


def test_every_method_is_compared_with_plans(results: Results) -> None:
    assert [row.label for row in results.rows if row.error is not None] == []
    assert {row.candidate.get("name") for row in results.rows} >= {"plan", "tea_cache", "mag_cache", "cache_dit"}
    assert {row.candidate.get("series") for row in results.rows} >= PEERS


def test_plans_and_both_baselines_have_the_same_budgets(results: Results) -> None:
    wanted = frontier_budgets(STEPS)
    assert wanted == [2, 3, 4]
    for kind in ("fewer_steps", "second_order"):
        assert [row.computed_steps for row in results.rows if row.kind == kind] == wanted
    for series in ("plan", "hold, uniform"):
        assert [r.computed_steps for r in results.rows if r.candidate.get("series") == series] == wanted


def test_plans_beat_holding_evenly(results: Results) -> None:
    for budget in (3, 4):
        plan, even = results.row(f"plan {budget}"), results.row(f"hold, uniform {budget}")
        assert plan.summary("psnr").mean > even.summary("psnr").mean


def test_diffusers_caches_hold_and_are_counted(results: Results) -> None:
    """MagCache decides without data, so both libraries compute the same steps with the same ratios."""
    ours = [row.strips["cond"] for row in results.rows if row.candidate.get("name") == "mag_cache"]
    theirs = [row.strips["forwards"] for row in results.rows if row.candidate.get("series") == "diffusers MagCache"]
    assert ours == theirs
    assert all(strip.startswith("C") and "h" in strip for strip in theirs)


def test_a_diffusers_cache_leaves_the_pipeline_as_it_was(pipe: Any) -> None:
    before = generate(pipe)
    held = diffusers_cache("first block", lambda: FirstBlockCacheConfig(threshold=2.0))
    with held.context(pipe):
        assert not torch.equal(generate(pipe), before)
    assert torch.equal(generate(pipe), before)


def test_a_diffusers_cache_that_fails_half_way_leaves_no_hooks(pipe: Any) -> None:
    """Its config is refused when the last block is reached, after the others have their hooks."""
    before, blocks = generate(pipe), pipe.transformer.single_transformer_blocks

    class Unknown(type(blocks[-1])):  # type: ignore[misc]
        """A block that diffusers has no description of."""

    known = type(blocks[-1])
    blocks[-1].__class__ = Unknown
    try:
        row = compare(pipe, Comparison(("ghost",), (diffusers_cache("fails", _first_block),), steps=4)).rows[0]
        assert row.error is not None
        assert "Unknown" in row.error
    finally:
        blocks[-1].__class__ = known
    assert torch.equal(generate(pipe), before)


def _first_block() -> FirstBlockCacheConfig:
    return FirstBlockCacheConfig(threshold=2.0)


def test_branches_and_experts_are_told_apart() -> None:
    """Two experts with two branches each: forwards of one step take turns."""
    pipe, settings = prompted_wan(), {"threshold": 9.0, "max_skip_steps": 3, "retention_ratio": 0.1}
    config = {"num_inference_steps": 12, "mag_ratios": [1.0] * 12, **settings}
    peer = diffusers_cache("peer", lambda: MagCacheConfig(**config))
    (row, *_) = compare(pipe, Comparison(("ghost",), (peer,), steps=12)).rows
    assert set(row.strips) == {"forward 1", "forward 2"}
    assert {len(strip) for strip in row.strips.values()} == {12}
    assert row.computed_steps is not None
    assert 1 < row.computed_steps < 12


def test_a_model_that_diffusers_has_no_caches_for_is_refused(pipe: Any) -> None:
    own = pipe.transformer
    pipe.register_modules(transformer=torch.nn.Identity())
    try:
        context = diffusers_cache("peer", _first_block).context(pipe)
        with pytest.raises(ConfigError, match="no caches for Identity"), context:
            pass
    finally:
        pipe.register_modules(transformer=own)


def test_settings_follow_the_number_of_steps(pipe: Any, profile: Profile, tmp_path: Path) -> None:
    """With fewer steps each changes more, so thresholds grow; no two candidates have the same name."""
    few = holdover.calibrate(pipe, ["red apple"], 4, effort="quick", progress=False)
    shipped = next(each for each in measured() if each.name == "emoji")
    for of_steps, least in ((few, 0.25), (profile, 0.125), (shipped, 0.02)):
        labels = [candidate.label for candidate in build_frontier_comparison(of_steps, tmp_path, ["ghost"]).candidates]
        assert f"tea_cache {least:g}" in labels
        assert len(set(labels)) == len(labels)
