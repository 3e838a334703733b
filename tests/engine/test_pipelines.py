"""Pipelines that are not diffusers pipelines, and pipelines that get another transformer while a cache is on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers as d
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import nn

import holdover
from holdover.engine.backend import find_cache
from holdover.models.pipelines import find_transformers
from tiny.pipelines import PIPELINES, run
from tiny.prompted import prompted_flux

TINY = PIPELINES["FluxPipeline"]
SETTINGS = {
    "tea_cache": {"coefficients": [1.0, 0.0], "rel_l1_thresh": 10.0},
    "mag_cache": {"mag_ratios": [1.0] * 6, "mag_retention_ratio": 0.2},
    "cache_dit": {"residual_diff_threshold": 1.0, "max_warmup_steps": 1},
}


class ModulePipeline(nn.Module):
    """As vLLM-Omni's pipelines: a module whose forward runs the whole loop."""

    def __init__(self, pipe: FluxPipeline) -> None:
        super().__init__()
        self.transformer, self.scheduler, self._call = pipe.transformer, pipe.scheduler, pipe.__call__

    def forward(self, **request: Any) -> torch.Tensor:
        return self._call(**request, return_dict=False)[0]


class PropertyPipeline:
    """Its transformer is a property."""

    def __init__(self, pipe: FluxPipeline) -> None:
        self._pipe, self.scheduler = pipe, pipe.scheduler

    @property
    def transformer(self) -> FluxTransformer2DModel:
        return self._pipe.transformer

    def __call__(self, **request: Any) -> torch.Tensor:
        return self._pipe(**request, return_dict=False)[0]


class UnregisteredPipeline(FluxPipeline):
    """`components` raises: diffusers wants every argument of `__init__` registered."""

    _execution_device = torch.device("cpu")  # which diffusers would look for in the components

    def maybe_free_model_hooks(self) -> None: ...

    def __init__(self, watermark: str = "", **parts: Any) -> None:
        super().__init__(**parts)
        self.watermark = watermark

    def __call__(self, *args: Any, **request: Any) -> torch.Tensor:
        return super().__call__(*args, **request, return_dict=False)[0]


def unregistered(pipe: FluxPipeline) -> UnregisteredPipeline:
    made = UnregisteredPipeline(**pipe.components)
    with pytest.raises(ValueError, match="incorrectly initialized"):
        _ = made.components
    return made


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("make", [ModulePipeline, PropertyPipeline, unregistered])
def test_its_transformer_is_cached(make: Any, method: str) -> None:
    plain = TINY.build()
    plain.set_progress_bar_config(disable=True)
    pipe = make(plain)
    if isinstance(pipe, FluxPipeline):
        pipe.set_progress_bar_config(disable=True)
    expected = pipe(**TINY.call(steps=6))
    assert find_transformers(pipe) == {"transformer": plain.transformer}
    with holdover.enable(pipe, method, **SETTINGS[method]) as cache:
        assert find_cache(pipe) is find_cache(plain.transformer) is cache
        pipe(**TINY.call(steps=6))
        (trace,) = {cache.stats().last.trace(branch) for branch in cache.stats().last.branches}
        assert len(trace) == 6
        assert "h" in trace
        cache.refresh(pipe, 6)
    assert torch.equal(pipe(**TINY.call(steps=6)), expected)


def test_a_module_that_takes_a_timestep_is_a_transformer() -> None:
    """Although a part of it is called `transformer`."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.transformer(x) + t

    model = Denoiser()
    assert find_transformers(model) == {"transformer": model}
    assert find_transformers(SimpleNamespace(transformer=model)) == {"transformer": model}


def test_declared_and_repeated_transformers_are_found_once() -> None:
    class Omni(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self._dit_modules = ["model.0", "model", "absent"]

        def forward(self, request: Any) -> None: ...

    pipe = Omni()
    assert find_transformers(pipe) == {"model": pipe.model}
    part = nn.Linear(2, 2)
    twice = SimpleNamespace(transformer=part, transformer_2=part, small_transformer=nn.Linear(2, 2))
    assert list(find_transformers(twice)) == ["transformer", "small_transformer"]
    with pytest.raises(holdover.EnableError, match="has no transformer to cache"):
        find_transformers(SimpleNamespace(transformer=None, scheduler=object()))


# Another transformer


@pytest.mark.parametrize("method", ["none", *SETTINGS])
def test_a_replaced_transformer_is_said_at_the_next_generation(method: str) -> None:
    pipe, other = TINY.build(), TINY.build().transformer
    original = pipe.transformer
    cache = holdover.enable(pipe, method, **SETTINGS.get(method, {}))
    run(pipe, **TINY.call(steps=6))
    pipe.transformer = other
    message = r"FluxPipeline.transformer was replaced after the cache was enabled.*disable\(\) the cache and enable"
    with pytest.raises(holdover.EnableError, match=message):
        run(pipe, **TINY.call(steps=6))
    with pytest.raises(holdover.EnableError, match=message):
        cache.refresh(pipe, 6)
    pipe.transformer = original
    run(pipe, **TINY.call(steps=6))
    assert cache.stats().count == 2
    pipe.transformer = other
    cache.disable()
    run(pipe, **TINY.call(steps=6))
    with holdover.enable(pipe, method, **SETTINGS.get(method, {})) as again:
        run(pipe, **TINY.call(steps=6))
        assert again.stats().count == 1


def test_a_transformer_that_is_loaded_later_is_said_at_the_next_generation() -> None:
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    low_noise, pipe.transformer_2 = pipe.transformer_2, None
    with holdover.enable(pipe, "mag_cache", **SETTINGS["mag_cache"]):
        pipe.transformer_2 = low_noise
        with pytest.raises(holdover.EnableError, match="transformer_2 was loaded after the cache was enabled"):
            run(pipe, **tiny.call(steps=6))


def test_inpainting_is_one_loop_in_every_generation() -> None:
    """It blends the latents of each step, so those that the scheduler returned are gone, as after an exception."""
    flux = prompted_flux()
    parts = ("transformer", "scheduler", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    pipe = d.FluxInpaintPipeline(**{name: flux.components[name] for name in parts})
    pipe.set_progress_bar_config(disable=True)
    half = torch.zeros(1, 1, 64, 64)
    half[..., 32:] = 1.0
    call = {"image": torch.full((1, 3, 64, 64), 0.5), "mask_image": half, "strength": 1.0, "height": 64, "width": 64}

    def generate() -> torch.Tensor:
        seed = torch.Generator().manual_seed(0)
        image: torch.Tensor = pipe("a cat", num_inference_steps=8, generator=seed, output_type="pt", **call).images
        return image

    plain = generate()
    with holdover.enable(pipe, "plan", schedule=(0, 3, 6), profile="none") as cache:
        images = [generate() for _ in range(2)]
        assert [one.trace(one.branches[0]) for one in cache.stats().generations] == ["ChhChhCh"] * 2
    assert torch.equal(*images)
    assert torch.equal(generate(), plain)


def test_the_same_transformer_compiled_is_not_another() -> None:
    pipe = TINY.build()
    with holdover.enable(pipe, "mag_cache", **SETTINGS["mag_cache"]) as cache:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        run(pipe, **TINY.call(steps=6))
        assert cache.stats().held > 0
        assert find_cache(pipe) is cache


def test_an_expert_that_was_dropped_is_not_another() -> None:
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    pipe.register_to_config(boundary_ratio=None)
    with holdover.enable(pipe, "cache_dit", **SETTINGS["cache_dit"]) as cache:
        pipe.transformer_2 = None
        run(pipe, **tiny.call(steps=6))
        assert cache.stats().held > 0
