"""Models with an adapter of their own: BAGEL, SenseNova-U1, Wan2.2 S2V, Wan2.2 and Cosmos3."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import holdover
from cache_dit_backend.families import (
    WIDTH,
    BagelTransformer,
    NaiveCache,
    SensenovaTransformer,
    Wan22S2VPipeline,
    pipeline_of,
)
from holdover.cache_dit_backend import (
    BagelCachedBlocks,
    CacheDiTBackend,
    SensenovaCachedBlocks,
    Wan22S2VCachedBlocks,
    enable_cache_for_cosmos3,
    enable_cache_for_wan22,
    enable_cache_for_wan22_s2v,
)
from holdover.engine.backend import find_cache
from snapshots import differences, snapshot
from tiny.models import MODELS
from tiny.pipelines import PIPELINES, run

NOTHING = {"residual_diff_threshold": 0.0}
MUCH = {"residual_diff_threshold": 1.0, "max_warmup_steps": 1, "max_continuous_cached_steps": 2}
STEPS = 9


def unified_block(cache: CacheDiTBackend, pipe) -> torch.nn.Module:
    """The block that cache-dit makes of the transformer's first list."""
    return cache._adapter.adapted[pipe.transformer].lists[0].block


def bagel(pipe, named: bool = True) -> Iterator[torch.Tensor]:
    """Prefill, eight text tokens, denoising with two branches, eight more text tokens."""
    generator = torch.Generator().manual_seed(3)
    caches = [NaiveCache(), NaiveCache()]
    with torch.no_grad():
        for cache in caches:
            yield pipe.transformer(torch.randn(6, WIDTH, generator=generator), cache)
        yield from words(pipe, caches[0], generator)
        latent = torch.randn(5, WIDTH, generator=generator)
        for step in range(STEPS):
            time = torch.full((5,), 1 - step / STEPS)
            for name, cache in zip(("cond", "uncond"), caches, strict=True):
                with pipe.transformer.cache_context(name, step_index=step) if named else torch.no_grad():
                    output = pipe.transformer(latent, cache, update_past_key_values=False, mode="gen", timestep=time)
                yield output
                latent = latent - 0.02 * output
        yield from words(pipe, caches[0], generator)


def words(pipe, cache: NaiveCache, generator: torch.Generator) -> Iterator[torch.Tensor]:
    for _ in range(8):
        yield pipe.transformer(torch.randn(1, WIDTH, generator=generator), cache)


def test_bagel_with_nothing_held_is_the_plain_model() -> None:
    pipe = pipeline_of(BagelTransformer())
    plain = list(bagel(pipe, named=False))
    with holdover.enable(pipe, "cache_dit", **NOTHING) as cache:
        assert type(unified_block(cache, pipe)) is BagelCachedBlocks
        outputs = list(bagel(pipe))
    assert all(torch.equal(a, b) for a, b in zip(outputs, plain, strict=True))


def test_bagel_holds_denoising_and_never_what_writes_keys() -> None:
    pipe = pipeline_of(BagelTransformer())
    plain = list(bagel(pipe, named=False))
    before = snapshot(pipe.transformer)
    with holdover.enable(pipe, "cache_dit", **MUCH) as cache:
        outputs = list(bagel(pipe))
        forwards = [forward for generation in cache.stats().generations for forward in generation.forwards]
        assert cache.reports()["transformer"].max_error < 1e-5
    held = [forward for forward in forwards if not forward.computed]
    assert {forward.branch for forward in held} == {"cond", "uncond"}
    assert len(held) == 2 * 6
    writing = [forward for forward in forwards if "never held" in forward.reason]
    assert len(writing) == 2 + 16
    assert all(torch.equal(a, b) for a, b in zip(outputs[:10], plain[:10], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outputs[-8:], plain[-8:], strict=True))
    assert not torch.equal(outputs[-9], plain[-9])
    assert differences(before, snapshot(pipe.transformer)) == []


def sensenova(pipe) -> list[torch.Tensor]:
    """A prompt that writes the cache, denoising passes of image tokens, and one of both kinds of tokens."""
    generator = torch.Generator().manual_seed(3)
    layer_cache: list[torch.Tensor] = []
    with torch.no_grad():
        outputs = [pipe.transformer(torch.randn(6, WIDTH, generator=generator), cache=layer_cache)]
        latent = torch.randn(5, WIDTH, generator=generator)
        image = {"cache": layer_cache, "update_cache": False, "image_gen_indicators": torch.ones(5, dtype=torch.bool)}
        for step in range(STEPS):
            time = torch.full((5,), 1 - step / STEPS)
            outputs.append(pipe.transformer(latent, timestep=time, **image))
            latent = latent - 0.02 * outputs[-1]
        mixed = {**image, "image_gen_indicators": torch.arange(5) > 2}
        outputs.append(pipe.transformer(latent, timestep=time * 0.5, **mixed))
    return outputs


def test_sensenova_holds_image_tokens_of_denoising_passes_only() -> None:
    pipe = pipeline_of(SensenovaTransformer())
    plain = sensenova(pipe)
    with holdover.enable(pipe, "cache_dit", **NOTHING) as cache:
        assert type(unified_block(cache, pipe)) is SensenovaCachedBlocks
        assert all(torch.equal(a, b) for a, b in zip(sensenova(pipe), plain, strict=True))
    with holdover.enable(pipe, "cache_dit", **MUCH) as cache:
        outputs = sensenova(pipe)
        forwards = [forward for generation in cache.stats().generations for forward in generation.forwards]
    assert [forward.computed for forward in forwards] == [True, *[i % 3 == 0 for i in range(STEPS)], True]
    assert "never held" in forwards[0].reason
    assert "never held" in forwards[-1].reason
    assert torch.equal(outputs[0], plain[0])
    assert not torch.equal(outputs[2], plain[2])


def test_sensenova_computes_a_pass_with_cache_dit_skip() -> None:
    pipe = pipeline_of(SensenovaTransformer())
    image = {"cache": [], "update_cache": False, "exist_gen": True, "exist_und": False}
    tokens = torch.randn(5, WIDTH)
    with torch.no_grad(), holdover.enable(pipe, "cache_dit", **MUCH) as cache:
        for step in range(4):
            pipe.transformer(tokens, timestep=torch.full((5,), 1 - step / 4), **image)
        assert cache.stats().held == 2
        block = unified_block(cache, pipe)
        expected = tokens
        for layer in pipe.transformer.layers:
            expected = layer(expected, **image)
        assert torch.equal(block(tokens, cache_dit_skip=True, **image), expected)


def test_s2v_injects_audio_once_after_each_of_its_layers_and_as_before_after_disable() -> None:
    pipe = Wan22S2VPipeline()
    plain = pipe()
    before = snapshot(pipe.transformer)
    each = [0, 2] * 24
    refresh = enable_cache_for_wan22_s2v(pipe, NOTHING)
    cache = find_cache(pipe)
    assert type(unified_block(cache, pipe)) is Wan22S2VCachedBlocks
    pipe.transformer.injected.clear()
    assert torch.equal(pipe(), plain)
    checks = 2 * (len(each) // 24)  # the first forward of its kind is run plain, and held, once more
    assert pipe.transformer.injected[-len(each) + checks :] == each[checks:]
    refresh(pipe, 12, False)
    cache.disable()
    pipe.transformer.injected.clear()
    assert torch.equal(pipe(), plain)
    assert pipe.transformer.injected == each
    assert [path for path in differences(before, snapshot(pipe.transformer)) if path != ".audio"] == []


@pytest.mark.parametrize("last", [0, 1])
def test_s2v_holds_the_audio_with_the_blocks(last: int) -> None:
    pipe = Wan22S2VPipeline()
    plain = pipe()
    with holdover.enable(pipe, "cache_dit", **MUCH, Bn_compute_blocks=last) as cache:
        assert type(unified_block(cache, pipe)) is Wan22S2VCachedBlocks  # by the pipeline's name
        pipe.transformer.injected.clear()
        output = pipe()
        generation = cache.stats().last
        assert cache.reports()["transformer"].max_error < 1e-5
    assert [generation.trace(branch) for branch in generation.branches] == ["ChhChhChhChh"] * 2
    assert pipe.transformer.injected.count(0) > pipe.transformer.injected.count(2)
    assert 0 < (output - plain).abs().max() < 0.2 * plain.abs().max()


@pytest.mark.parametrize("boundary", [0.9, 0.5])
def test_wan22_caches_each_expert_over_the_steps_it_handles(boundary: float) -> None:
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    pipe.register_to_config(boundary_ratio=boundary)
    before = snapshot(pipe.transformer_2)
    refresh = enable_cache_for_wan22(pipe, {"max_warmup_steps": 2, "residual_diff_threshold": 1.0})
    refresh(pipe, 12, False)
    run(pipe, **tiny.call(steps=12))
    cache = find_cache(pipe)
    generation = cache.stats().last
    high = sum(t / 1000 >= boundary for t in pipe.scheduler.timesteps.tolist())
    for branch in ("cond", "uncond"):
        assert generation.trace(f"transformer/{branch}") == "CChhhChhhChh"[:high]
        assert generation.trace(f"transformer_2/{branch}") == "CChhhChhhChh"[: 12 - high]
    cache.disable()
    assert differences(before, snapshot(pipe.transformer_2)) == []


def test_wan22_masks_are_made_for_the_steps_of_each_expert() -> None:
    import cache_dit

    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", scm_steps_mask_policy="fast", scm_steps_policy="static") as cache:
        for steps in (40, 30, 40):
            run(pipe, **tiny.call(steps=steps))
            generation = cache.stats().last
            high = sum(t / 1000 >= pipe.config.boundary_ratio for t in pipe.scheduler.timesteps.tolist())
            for transformer, own in (("transformer", high), ("transformer_2", steps - high)):
                mask = cache_dit.steps_mask(mask_policy="fast", total_steps=own)
                assert generation.trace(f"{transformer}/cond") == "".join("hC"[m] for m in mask)
        with pytest.warns(holdover.HoldoverWarning, match="steps that transformer handles"):
            run(pipe, **tiny.call(steps=16))


def test_cosmos3_decides_by_the_tokens_that_are_generated() -> None:
    """diffusers passes the text tokens first; they never change, so by them every step would be held."""
    tiny = MODELS["Cosmos3OmniTransformer"]
    model = tiny.build()
    pipe = pipeline_of(model)
    before = snapshot(model)
    enable_cache_for_cosmos3(pipe, {"max_warmup_steps": 1, "residual_diff_threshold": 0.05})
    cache = find_cache(pipe)
    inputs = tiny.inputs()
    with torch.no_grad():
        for step, scale in enumerate((1.0, 1.0, 40.0, 40.0)):
            moved = {**inputs, tiny.latent: [token * scale for token in inputs[tiny.latent]]}
            with model.cache_context("cond", step_index=step):
                model(**moved)
    assert cache.stats().last.trace("cond") == "ChCh"
    cache.disable()
    assert differences(before, snapshot(model)) == []
