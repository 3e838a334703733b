"""On every pipeline: hold nothing and the bits are the same; hold, and each branch does what its policy says."""

from __future__ import annotations

import pytest
import torch

import holdover
from constant_free import HOLD as HOLD_FREE
from constant_free import NOTHING as NOTHING_FREE
from snapshots import denoiser, differences
from tiny.pipelines import PIPELINES, run

STEPS = 6
TEA = {"coefficients": [1.0, 0.0]}
MAG = {"mag_ratios": [1.01] * STEPS}
NOTHING = [("tea_cache", {**TEA, "rel_l1_thresh": 0.0}), ("mag_cache", {**MAG, "mag_threshold": 0.0}), ("none", {})]
HOLD = [
    ("tea_cache", {**TEA, "rel_l1_thresh": 10.0}),
    ("mag_cache", {**MAG, "mag_threshold": 0.5, "mag_max_skip_steps": 2}),
]


@pytest.fixture(scope="module", params=sorted(PIPELINES))
def built(request):
    tiny = PIPELINES[request.param]
    pipe = tiny.build()
    return tiny, pipe, run(pipe, **tiny.call(steps=STEPS))


@pytest.mark.parametrize(("method", "settings"), NOTHING)
def test_nothing_held_is_bit_identical(built, method, settings):
    tiny, pipe, plain = built
    with holdover.enable(pipe, method, **settings) as cache:
        first, second = run(pipe, **tiny.call(steps=STEPS)), run(pipe, **tiny.call(steps=STEPS))
        stats = cache.stats()
    assert stats.held == 0
    assert stats.computed > 0
    assert stats.count == 2
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)


@pytest.mark.parametrize(("method", "settings"), HOLD)
def test_held_generation(built, method, settings):
    tiny, pipe, plain = built
    before = denoiser(pipe)
    with holdover.enable(pipe, method, **settings) as cache:
        first, second = run(pipe, **tiny.call(steps=STEPS)), run(pipe, **tiny.call(steps=STEPS))
        generation = cache.stats().last
        replayed = list(cache.reports().values())
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
    assert all(report.ok and report.max_error < 1e-5 for report in replayed)
    assert generation.held_total > 0
    for branch in generation.branches:  # every branch holds on its own
        forwards = generation.of_branch(branch)
        assert forwards[0].computed
        assert len({forward.step for forward in forwards}) == len(forwards)
        assert method == "tea_cache" or "hhh" not in generation.trace(branch)
    assert not cache.is_enabled()
    assert differences(before, denoiser(pipe)) == []
    assert torch.equal(run(pipe, **tiny.call(steps=STEPS)), plain)


def test_methods_without_constants(built):
    """One test for all, which runs two generations of each method and one for the undo of all."""
    tiny, pipe, plain = built
    before = denoiser(pipe)
    for method, settings in NOTHING_FREE.items():
        with holdover.enable(pipe, method, **settings) as cache:
            assert torch.equal(run(pipe, **tiny.call(steps=STEPS)), plain), method
            assert cache.stats().held == 0
            with cache.using(**HOLD_FREE[method]):
                held = run(pipe, **tiny.call(steps=STEPS))
            generation = cache.stats().last
            assert all(report.ok and report.max_error < 1e-5 for report in cache.reports().values()), method
        assert torch.isfinite(held).all(), method
        assert not torch.equal(held, plain), method
        assert {f.computed for f in generation.forwards} == {True, False}, method
    assert differences(before, denoiser(pipe)) == []
    assert torch.equal(run(pipe, **tiny.call(steps=STEPS)), plain)


def test_guidance_off_runs_one_branch(built):
    tiny, pipe, _ = built
    plain = run(pipe, **tiny.call(steps=STEPS, guidance=False))
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_threshold": 0.0}):
        assert torch.equal(run(pipe, **tiny.call(steps=STEPS, guidance=False)), plain)
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_threshold": 0.5}) as cache:
        held = run(pipe, **tiny.call(steps=STEPS, guidance=False))
        assert cache.stats().held > 0
    assert torch.isfinite(held).all()
