"""What users do with a pipeline works the same while a cache is on: a part of diffusers' suite, without downloads."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from itertools import permutations
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from torch import nn

import holdover
from holdover.engine.backend import find_cache
from tiny.pipelines import PIPELINES, run

pytestmark = pytest.mark.filterwarnings("ignore:This plan was not measured")

STEPS = 6
ZERO = {
    "mag_cache": {"mag_threshold": 0.0, "mag_ratios": [1.0]},
    "tea_cache": {"rel_l1_thresh": 0.0, "coefficients": [1.0, 0.0]},
    "plan": {"budget": "1x", "profile": "none"},
    "none": {},
}
HOLDING = {"mag_ratios": [1.0], "mag_threshold": 1.0, "mag_retention_ratio": 0.0, "mag_max_skip_steps": 1}
FAMILIES = ["FluxPipeline[true_cfg]", "StableDiffusion3Pipeline", "WanPipeline[2.2]", "LTXPipeline", "Lumina2Pipeline"]


@pytest.fixture(params=FAMILIES)
def tiny(request):
    return PIPELINES[request.param]


def generate(pipe, tiny, seed=0, **extra):
    return run(pipe, **tiny.call(steps=STEPS, seed=seed) | extra)


def count_forwards(cache):
    return cache.stats().computed + cache.stats().held


# Everything computed


def scale_latents(pipe, step, timestep, tensors):
    return {"latents": tensors["latents"] * 0.9} if step == 2 else {}


def switch_prompt(pipe, step, timestep, tensors):
    return {"prompt_embeds": tensors["prompt_embeds"] * -1.0} if step == 2 else {}


def stop(pipe, step, timestep, tensors):
    pipe._interrupt = step >= 2
    return {}


@pytest.mark.parametrize("callback", [scale_latents, switch_prompt, stop])
def test_callbacks_change_the_same_image(tiny, callback):
    pipe = tiny.build()
    names = [each for each in ("latents", "prompt_embeds") if each in pipe._callback_tensor_inputs]
    options = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": names}
    untouched, plain = generate(pipe, tiny), generate(pipe, tiny, **options)
    assert torch.equal(untouched, plain) == (
        tiny.name == "Lumina2Pipeline" and callback is stop
    )  # it cannot be stopped
    for method, settings in ZERO.items():
        with holdover.enable(pipe, method, **settings) as cache:
            assert torch.equal(generate(pipe, tiny, **options), plain)
            assert cache.stats().held == 0


def test_moving_and_casting_between_generations(tiny):
    pipe = tiny.build()
    plain = generate(pipe, tiny)
    with holdover.enable(pipe, "mag_cache", **ZERO["mag_cache"]):
        assert pipe.to(torch.float64).to("cpu").to(torch.float32) is pipe
        assert torch.equal(generate(pipe, tiny), plain)


# Some steps held


class HeldPipeline(NamedTuple):
    pipe: Any
    cache: holdover.CacheBackend
    image: torch.Tensor


@pytest.fixture
def held(tiny):
    """A pipeline with a cache that holds every second step, and the image it generates."""
    pipe = tiny.build()
    cache = holdover.enable(pipe, "mag_cache", **HOLDING)
    image = generate(pipe, tiny)
    assert cache.stats().held >= 2
    yield HeldPipeline(pipe, cache, image)
    if cache.is_enabled():
        cache.disable()


def test_classes_components_and_signatures_are_the_plain_ones(tiny):
    pipe = tiny.build()

    def describe():
        parts = [part for part in pipe.components.values() if part is not None]
        lists = [m for part in parts if isinstance(part, nn.Module) for m in part.modules()]
        methods = [pipe.scheduler.set_timesteps, pipe.scheduler.step, pipe.transformer.forward, pipe.__call__]
        return {
            "classes": [(type(each), each.__class__) for each in (*parts, *lists)],
            "components": list(map(id, pipe.components.values())),
            "signatures": [inspect.signature(method) for method in methods],
            "docs": [method.__doc__ for method in methods],
            "repr": repr(pipe),
            "config": dict(pipe.config),
            "state": list(pipe.transformer.state_dict()),
        }

    before = describe()
    with holdover.enable(pipe, "mag_cache", **HOLDING):
        assert describe() == before
        generate(pipe, tiny)
        assert describe() == before
    assert describe() == before


def test_from_pipe_shares_the_transformer_and_the_cache(held, tiny):
    other = type(held.pipe).from_pipe(held.pipe)
    assert type(other) is type(held.pipe)
    assert other.transformer is held.pipe.transformer
    assert find_cache(other) is held.cache
    assert torch.equal(generate(other, tiny), held.image)
    assert torch.equal(generate(held.pipe, tiny), held.image)
    with pytest.raises(holdover.EnableError, match="already is a holdover cache"):
        holdover.enable(other, "mag_cache", **HOLDING)


@pytest.mark.parametrize(
    ("first", "second"), permutations(("FluxPipeline", "FluxImg2ImgPipeline", "FluxKontextPipeline"), 2)
)
def test_from_pipe_to_another_class(first, second):
    pipe = getattr(diffusers, first).from_pipe(PIPELINES["FluxImg2ImgPipeline"].build())
    with holdover.enable(pipe, "mag_cache", **ZERO["mag_cache"]) as cache:
        other = getattr(diffusers, second).from_pipe(pipe)
        assert type(other) is getattr(diffusers, second)
        assert other.transformer is pipe.transformer
        jobs = [(pipe, PIPELINES[first]), (other, PIPELINES[second])] * 2
        computed = [generate(*job) for job in jobs]
        assert cache.stats().held == 0
    plain = [generate(*job) for job in jobs]
    assert all(map(torch.equal, computed, plain))
    with holdover.enable(pipe, "mag_cache", **HOLDING) as cache:
        held = [generate(*job) for job in jobs]
        assert all(generation.held_total for generation in cache.stats().generations)
    assert torch.equal(held[0], held[2])
    assert torch.equal(held[1], held[3])
    assert not torch.equal(held[0], plain[0])


def test_saving_writes_the_same_files_and_they_load_without_a_cache(held, tiny, tmp_path):
    held.pipe.save_pretrained(tmp_path / "cached")
    held.cache.disable()
    held.pipe.save_pretrained(tmp_path / "plain")
    files = {path.relative_to(tmp_path / "plain"): path for path in (tmp_path / "plain").rglob("*") if path.is_file()}
    assert files
    for name, path in files.items():
        assert (tmp_path / "cached" / name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "cached").rglob("*"))) == len(list((tmp_path / "plain").rglob("*")))
    missing = {name: None for name, part in held.pipe.components.items() if part is None}
    loaded = type(held.pipe).from_pretrained(tmp_path / "cached", **missing)
    assert find_cache(loaded) is None
    assert torch.allclose(generate(loaded, tiny), generate(held.pipe, tiny), atol=1e-5)


def test_a_deep_copy_of_a_pipeline_is_plain_and_can_have_a_cache_of_its_own(held, tiny):
    before = count_forwards(held.cache)
    twin = copy.deepcopy(held.pipe)
    assert find_cache(twin) is None
    assert type(twin.transformer) is type(held.pipe.transformer)
    assert type(twin.scheduler) is type(held.pipe.scheduler)
    plain = generate(twin, tiny)
    assert count_forwards(held.cache) == before
    with holdover.enable(twin, "mag_cache", **HOLDING) as own:
        generate(twin, tiny)
        assert own.stats().held >= 2
        assert count_forwards(held.cache) == before
        assert torch.equal(generate(held.pipe, tiny), held.image)
    assert torch.equal(generate(twin, tiny), plain)
    held.cache.disable()
    assert torch.equal(generate(twin, tiny), plain)
    assert torch.allclose(generate(held.pipe, tiny), plain, atol=1e-5)


@pytest.mark.parametrize("part", ["transformer", "scheduler"])
@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "torch.save"])
def test_a_copy_of_a_component_does_not_enter_the_cache(held, tiny, part, way):
    original = getattr(held.pipe, part)
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(original))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(original, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = getattr(copy, way)(original)
    assert type(twin) is type(original)
    before = count_forwards(held.cache)
    if part == "scheduler":
        generation = held.cache.stats().last
        twin.set_timesteps(3, **{"mu": 1.0} if getattr(twin.config, "use_dynamic_shifting", False) else {})
        assert (len(twin.timesteps), len(original.timesteps)) == (3, STEPS)
        assert held.cache.stats().last == generation
    else:
        other = tiny.build()
        other.transformer = twin
        generate(other, tiny)
        assert count_forwards(held.cache) == before
    assert torch.equal(generate(held.pipe, tiny), held.image)


def test_an_interrupted_generation_leaves_nothing_to_the_next(held, tiny):
    generate(held.pipe, tiny, seed=1, callback_on_step_end=stop)
    assert torch.equal(generate(held.pipe, tiny), held.image)


def test_a_scheduler_of_the_same_class_takes_over(held, tiny):
    old = held.pipe.scheduler
    held.pipe.scheduler = type(old).from_config(old.config)
    assert type(held.pipe.scheduler) is type(old)
    assert torch.equal(generate(held.pipe, tiny), held.image)
    assert "set_timesteps" not in vars(old)


def test_a_model_of_the_same_class_has_no_cache(held, tiny):
    before = count_forwards(held.cache)
    fresh = type(held.pipe.transformer).from_config(held.pipe.transformer.config).eval()
    fresh.load_state_dict(held.pipe.transformer.state_dict())
    other = tiny.build()
    other.transformer = fresh
    generate(other, tiny)
    assert count_forwards(held.cache) == before


@pytest.mark.parametrize("callback", [None, stop])
def test_everything_is_freed_with_the_pipeline(tiny, callback):
    pipe = tiny.build()
    cache = holdover.enable(pipe, "mag_cache", **HOLDING)
    generate(pipe, tiny, callback_on_step_end=callback)
    gone = [weakref.ref(pipe), *(weakref.ref(part) for part in pipe.components.values() if part is not None)]
    del pipe, cache
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
