"""Statistics leave the process that measured them."""

from __future__ import annotations

import pickle

import holdover
from holdover.stats import StepRecord
from tiny.pipelines import PIPELINES, run


def test_statistics_can_be_pickled():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", mag_ratios=[1.0] * 4, mag_threshold=1.0) as cache:
        run(pipe, **tiny.call(steps=4))
        stats = cache.stats()
    assert pickle.loads(pickle.dumps(stats)).as_dict() == stats.as_dict()


def test_a_pickle_has_the_time_and_not_what_measures_it():
    record = StepRecord("transformer", "cond", 0, True, "first step", lambda: 0.25)
    copied = pickle.loads(pickle.dumps(record))
    assert copied.clock() == 0.25
    assert copied.reason == "first step"
