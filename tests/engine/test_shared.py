"""Pipelines that share a scheduler or a module, models made from an enabled one's class, and who keeps whom alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import holdover
from holdover.selector import methods
from snapshots import differences, snapshot
from tiny.pipelines import PIPELINES, run

STEPS = 6
MAG = {"mag_ratios": [1.0] * STEPS, "mag_retention_ratio": 0.0, "mag_threshold": 1e9, "mag_max_skip_steps": 2}
SETTINGS = {
    "mag_cache": MAG,
    "tea_cache": {"coefficients": [1.0, 0.0], "rel_l1_thresh": 0.5},
    "plan": {"schedule": (0, 2, 4)},
    "cache_dit": {"max_warmup_steps": 1},
}
TINY = PIPELINES["FluxPipeline"]


def images(pipe, *seeds):
    return [run(pipe, **TINY.call(steps=STEPS, seed=seed)) for seed in seeds]


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_transformers_with_one_scheduler(first_out):
    pipes = [TINY.build(), TINY.build()]
    pipes[1].transformer.proj_out.weight.data *= 1.5
    expected = []
    for pipe in pipes:
        with holdover.enable(pipe, "mag_cache", **MAG):
            expected.append(images(pipe, 1)[0])
    pipes[1].scheduler = pipes[0].scheduler
    before = snapshot(pipes[0].scheduler)
    caches = [holdover.enable(pipe, "mag_cache", **MAG) for pipe in pipes]
    for _ in range(2):
        for pipe, image in zip(pipes, expected, strict=True):
            assert torch.equal(images(pipe, 1)[0], image)
    assert [cache.stats().count for cache in caches] == [2, 2]
    assert all(cache.stats().last.trace("cond") == "ChhChh" for cache in caches)
    caches[first_out].disable()
    assert torch.equal(images(pipes[1 - first_out], 1)[0], expected[1 - first_out])
    caches[1 - first_out].disable()
    assert vars(pipes[0].scheduler).keys() == {path[1:] for path in before if path.startswith(".") and "[" not in path}


def test_a_shared_scheduler_keeps_no_model_alive():
    pipe, other = TINY.build(), TINY.build()
    other.scheduler = pipe.scheduler
    for each in (pipe, other):
        holdover.enable(each, "mag_cache", **MAG)
        images(each, 1)
    alive = weakref.ref(pipe.transformer)
    del pipe, each
    gc.collect()
    assert alive() is None
    holdover.disable(other)
    assert "set_timesteps" not in vars(other.scheduler)


def test_one_module_under_two_names():
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    pipe.transformer_2 = pipe.transformer
    plain = run(pipe, **tiny.call(steps=STEPS))
    before = snapshot(pipe.transformer)
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_threshold": 0.0}) as cache:
        assert torch.equal(run(pipe, **tiny.call(steps=STEPS)), plain)
        with cache.using(mag_threshold=1e9):
            run(pipe, **tiny.call(steps=STEPS))
            assert cache.stats().last.trace("cond") == "ChhChh"
    assert differences(before, snapshot(pipe.transformer)) == []


@pytest.mark.parametrize("method", methods())
def test_a_model_is_freed_with_its_pipeline(method):
    pipe = TINY.build()
    holdover.enable(pipe, method, **SETTINGS.get(method, {}))
    images(pipe, 1)
    alive = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("method", methods())
def test_a_handle_to_a_disabled_cache_holds_no_model(method):
    pipe = TINY.build()
    cache = holdover.enable(pipe, method, **SETTINGS.get(method, {}))
    images(pipe, 1)
    cache.disable()
    alive = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert alive() is None
    assert cache.stats().computed > 0


def test_instances_made_from_the_classes_of_an_enabled_pipeline_are_plain():
    pipe, other = TINY.build(), TINY.build()
    plain = images(other, 1)[0]
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        held = images(pipe, 1)[0]
        made = type(pipe.transformer).from_config(pipe.transformer.config).eval()
        made.load_state_dict(pipe.transformer.state_dict())
        other.transformer, other.scheduler = made, type(pipe.scheduler).from_config(pipe.scheduler.config)
        assert torch.equal(images(other, 1)[0], plain)
        assert cache.stats().count == 1
        assert torch.equal(images(pipe, 1)[0], held)
    assert not torch.equal(held, plain)
