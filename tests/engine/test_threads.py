"""Two threads on two pipelines: each image is the one that its pipeline generates alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import holdover
from tiny.pipelines import PIPELINES

STEPS = 6
GENERATIONS = 4
HOLDING = {"mag_ratios": [1.0], "mag_threshold": 1.0, "mag_retention_ratio": 0.0, "mag_max_skip_steps": 1}
TEA = {"rel_l1_thresh": 0.5, "coefficients": [1.0, 0.0]}


def generate(pipe, tiny, seed):
    return pipe(**tiny.call(steps=STEPS, seed=seed), return_dict=False)[0]


def generate_together(*jobs):
    """Run each job's generations in a thread of its own, all at the same time; returns the images of each."""
    start = threading.Barrier(len(jobs))

    def work(pipe, tiny, seeds):
        torch.set_num_threads(1)
        start.wait()
        return [generate(pipe, tiny, seed) for seed in seeds]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(work, *job) for job in jobs]]


def build(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    pipe.set_progress_bar_config(disable=True)
    return tiny, pipe


@pytest.mark.parametrize("names", [("FluxPipeline", "FluxPipeline"), ("FluxPipeline[true_cfg]", "WanPipeline")])
@pytest.mark.parametrize(("method", "settings"), [("mag_cache", HOLDING), ("tea_cache", TEA)])
def test_pipelines_that_share_nothing(names, method, settings):
    built = [build(name) for name in names]
    caches = [holdover.enable(pipe, method, **settings) for _, pipe in built]
    seeds = range(GENERATIONS)
    alone = [[generate(pipe, tiny, seed) for seed in seeds] for tiny, pipe in built]
    held = [cache.stats().held for cache in caches]
    assert min(held) > 0
    together = generate_together(*((pipe, tiny, seeds) for tiny, pipe in built))
    for mine, theirs in zip(together, alone, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert [cache.stats().held for cache in caches] == [2 * count for count in held]


@pytest.mark.parametrize("name", ["FluxPipeline", "FluxPipeline[true_cfg]", "StableDiffusion3Pipeline", "WanPipeline"])
def test_pipelines_that_share_a_transformer(name):
    """At a setting that computes everything, every image is the plain one, whichever thread runs when."""
    tiny, pipe = build(name)
    other = type(pipe).from_pipe(pipe)
    other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other.set_progress_bar_config(disable=True)
    seeds = range(GENERATIONS)
    plain = [generate(pipe, tiny, seed) for seed in seeds]
    with holdover.enable(pipe, "mag_cache", **HOLDING | {"mag_threshold": 0.0}) as cache:
        together = generate_together((pipe, tiny, seeds), (other, tiny, seeds))
        assert cache.stats().held == 0
    for images in together:
        assert all(map(torch.equal, images, plain))


@pytest.mark.parametrize("name", ["FluxPipeline", "FluxPipeline[true_cfg]"])
def test_nothing_is_held_from_another_thread(name):
    """Two threads take turns step by step, with the same prompt and other noise: no step is held for the other."""
    tiny, pipe = build(name)
    other = type(pipe).from_pipe(pipe)
    other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other.set_progress_bar_config(disable=True)
    plain = [generate(pipe, tiny, 0), generate(other, tiny, 1)]
    turns = threading.Barrier(2)

    def take_turns(pipe, step, timestep, tensors):
        turns.wait()
        return {}

    def work(pipe, seed):
        torch.set_num_threads(1)
        turns.wait()
        return pipe(**tiny.call(steps=STEPS, seed=seed), callback_on_step_end=take_turns, return_dict=False)[0]

    with holdover.enable(pipe, "mag_cache", **HOLDING), ThreadPoolExecutor(2) as pool:
        images = [future.result() for future in [pool.submit(work, pipe, 0), pool.submit(work, other, 1)]]
    alone = []
    with holdover.enable(pipe, "mag_cache", **HOLDING):
        alone = [generate(pipe, tiny, 0), generate(pipe, tiny, 1)]
    for image, uncached, cached in zip(images, plain, alone, strict=True):
        worst = (cached - uncached).abs().max()
        assert (image - uncached).abs().max() <= worst
