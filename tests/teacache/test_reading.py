"""When TeaCache reads the change of its signal: at once, or late."""

from __future__ import annotations

import pytest
import torch

import holdover
from holdover.grid import Grid
from holdover.policies.teacache import Polynomial, TeaCachePolicy
from tiny.pipelines import PIPELINES, run

TINY = PIPELINES["FluxPipeline[true_cfg]"]
SETTINGS = {"coefficients": [1.0, 0.0], "rel_l1_thresh": 0.25, "read": "late"}


def result(pipe, seed=0):
    return run(pipe, **TINY.call(steps=12, seed=seed))


def test_late_takes_the_change_at_a_computed_step_for_those_that_follow():
    policy = TeaCachePolicy(1.0, Polynomial((1.0, 0.0)), Grid(10), late=True)
    state = policy.start()
    given = [None, None, 0.3, None, None, None, 0.6, None, 0.1, None]
    assert "".join("C" if policy.decide(i, d, state).compute else "h" for i, d in enumerate(given)) == "CChhhChChC"


def test_late_forgets_a_change_that_belongs_to_other_inputs():
    policy = TeaCachePolicy(1.0, Polynomial((1.0, 0.0)), Grid(10), late=True)
    state = policy.start()
    for step, change in enumerate((None, None, 0.1)):
        policy.decide(step, change, state)
    state.anchor = None
    assert policy.decide(3, None, state).reason == "nothing to hold yet"
    assert policy.decide(4, None, state).reason == "no change of the signal is known yet"


def test_late_decides_the_same_every_time_and_leaks_nothing():
    pipe = TINY.build()
    with holdover.enable(pipe, "tea_cache", **SETTINGS) as cache:
        first = result(pipe)
        result(pipe, seed=1)
        again = result(pipe)
        traces = [[g.trace(b) for b in g.branches] for g in cache.stats().generations]
    assert torch.equal(first, again)
    assert traces[0] == traces[2]
    for trace in traces[0]:
        assert trace.startswith("CC")
        assert trace.endswith("C")
        assert "h" in trace


def test_late_at_threshold_0_is_the_plain_pipeline():
    pipe = TINY.build()
    plain = result(pipe)
    with holdover.enable(pipe, "tea_cache", **SETTINGS | {"rel_l1_thresh": 0.0}):
        assert torch.equal(result(pipe), plain)


def test_a_signal_of_the_timestep_alone_has_nothing_to_wait_for():
    tiny = PIPELINES["CogVideoXPipeline"]
    results = []
    for read in ("now", "late"):
        pipe = tiny.build()
        with holdover.enable(pipe, "tea_cache", coefficients=[1.0, 0.0], rel_l1_thresh=1.0, read=read) as cache:
            results.append(run(pipe, **tiny.call(steps=12)))
            assert cache.stats().held > 0
    assert torch.equal(*results)


def test_an_unknown_way_of_reading_is_an_error():
    with pytest.raises(holdover.ConfigError, match="late"):
        holdover.enable(TINY.build(), "tea_cache", read="lat")
