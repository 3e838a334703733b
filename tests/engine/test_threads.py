"""Two threads on two pipelines: each image is the one that its pipeline generates alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import holdover
from tiny.pipelines import PIPELINES

STEPS = 6
SEEDS = range(3)
HOLDING = {"mag_ratios": [1.0], "mag_threshold": 1.0, "mag_retention_ratio": 0.0, "mag_max_skip_steps": 1}
TEA = {"rel_l1_thresh": 3.0, "coefficients": [1.0, 0.0]}
NAMES = ["FluxPipeline", "FluxPipeline[true_cfg]", "StableDiffusion3Pipeline", "Lumina2Pipeline"]


def build(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    pipe.set_progress_bar_config(disable=True)
    return tiny, pipe


def build_sharing(pipe):
    """A pipeline with the same transformer and a scheduler of its own."""
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other = type(pipe).from_pipe(pipe, scheduler=scheduler)
    other.set_progress_bar_config(disable=True)
    return other


def generate(pipe, tiny, seed, **extra):
    torch.set_num_threads(1)  # of this thread
    return pipe(**tiny.call(steps=STEPS, seed=seed), **extra, return_dict=False)[0]


def generate_together(*jobs):
    """Run each job's generations in a thread of its own, all at the same time; returns the images of each."""
    start = threading.Barrier(len(jobs))

    def work(pipe, tiny):
        start.wait()
        return [generate(pipe, tiny, seed) for seed in SEEDS]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(work, *job) for job in jobs]]


@pytest.mark.parametrize("names", [("FluxPipeline", "FluxPipeline"), ("FluxPipeline[true_cfg]", "CogVideoXPipeline")])
@pytest.mark.parametrize(("method", "settings"), [("mag_cache", HOLDING), ("tea_cache", TEA)])
def test_pipelines_that_share_nothing(names, method, settings):
    built = [build(name) for name in names]
    caches = [holdover.enable(pipe, method, **settings) for _, pipe in built]
    alone = [[generate(pipe, tiny, seed) for seed in SEEDS] for tiny, pipe in built]
    held = [cache.stats().held for cache in caches]
    assert min(held) > 0
    together = generate_together(*((pipe, tiny) for tiny, pipe in built))
    for mine, theirs in zip(together, alone, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert [cache.stats().held for cache in caches] == [2 * count for count in held]


@pytest.mark.parametrize("name", NAMES)
def test_pipelines_that_share_a_transformer(name):
    """At a setting that computes everything, every image is the plain one, whichever thread runs when."""
    tiny, pipe = build(name)
    other = build_sharing(pipe)
    plain = [generate(pipe, tiny, seed) for seed in SEEDS]
    with holdover.enable(pipe, "mag_cache", **HOLDING | {"mag_threshold": 0.0}) as cache:
        together = generate_together((pipe, tiny), (other, tiny))
        assert cache.stats().held == 0
    for images in together:
        assert all(map(torch.equal, images, plain))


@pytest.mark.parametrize("name", NAMES[:3])
def test_nothing_is_held_from_another_thread(name):
    """A generation of the same prompt with another seed runs in another thread between two steps of the first one."""
    tiny, pipe = build(name)
    other = build_sharing(pipe)
    crossings = []

    def list_records():
        return [record for generation in cache.stats().generations for record in generation.forwards]

    def cut_in(pipe, step, timestep, tensors):
        if step == 2:
            crossings.append(len(list_records()))
            pool.submit(generate, other, tiny, 1).result()
            crossings.append(len(list_records()))
        return {}

    with holdover.enable(pipe, "mag_cache", **HOLDING) as cache, ThreadPoolExecutor(1) as pool:
        generate(pipe, tiny, 0, callback_on_step_end=cut_in)
        records = list_records()
        assert cache.stats().held > 0
    for crossing in crossings:
        for record in records[crossing : crossing + len(tiny.branches)]:
            assert record.computed
            assert record.reason in ("the step before ran in another thread", "nothing to hold yet")
    assert records[crossings[0]].reason == "the step before ran in another thread"


def test_the_name_of_a_branch_belongs_to_its_thread():
    _, pipe = build("FluxPipeline")
    with holdover.enable(pipe, "mag_cache", **HOLDING) as cache, ThreadPoolExecutor(1) as pool:
        transformer = cache._engine.transformers[0]
        with pipe.transformer.cache_context("cond"):
            assert transformer.context.hint.name == "cond"
            assert pool.submit(lambda: transformer.context.hint.name).result() is None
