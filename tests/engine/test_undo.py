"""Enabling touches instances only, and disabling leaves no trace."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from diffusers import FluxTransformer2DModel

import holdover
from constant_free import HOLD
from snapshots import denoiser, differences, snapshot
from tiny.models import MODELS
from tiny.pipelines import PIPELINES, run

NAMES = ["FluxPipeline[true_cfg]", "StableDiffusion3Pipeline", "WanPipeline[2.2]", "ZImagePipeline", "WanVACEPipeline"]
METHODS = [("tea_cache", {"coefficients": [1.0, 0.0]}), ("mag_cache", {"mag_ratios": [1.01] * 8}), *HOLD.items()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_disable_restores_the_very_same_objects(name, method, settings):
    pipe = PIPELINES[name].build()
    before = snapshot(pipe)
    cache = holdover.enable(pipe, method, **settings)
    cache.disable()
    assert differences(before, snapshot(pipe)) == []


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline[2.2]"])
def test_disable_after_generations_leaves_what_a_plain_run_leaves(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    run(pipe, **tiny.call(steps=4))
    before = denoiser(pipe)
    with holdover.enable(pipe, "mag_cache", mag_ratios=[1.01] * 4):
        run(pipe, **tiny.call(steps=4))
    after = denoiser(pipe)
    assert differences(before, after) == []
    assert type(pipe.scheduler) is type(tiny.build().scheduler)


def test_classes_are_never_touched():
    before = dict(vars(FluxTransformer2DModel))
    tiny = PIPELINES["FluxPipeline"]
    enabled, other = tiny.build(), tiny.build()
    plain = run(other, **tiny.call(steps=8))
    with holdover.enable(enabled, "mag_cache", mag_ratios=[1.0] * 8, mag_threshold=1.0):
        held = run(enabled, **tiny.call(steps=8))
        assert torch.equal(run(other, **tiny.call(steps=8)), plain)
        assert not torch.equal(held, plain)
    assert dict(vars(FluxTransformer2DModel)) == before
    assert isinstance(enabled.transformer, FluxTransformer2DModel)


def test_a_hundred_times_on_and_off_leaves_nothing():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=3))
    before, classes = denoiser(pipe), set(FluxTransformer2DModel.__subclasses__())
    for _ in range(100):
        holdover.enable(pipe, "tea_cache", rel_l1_thresh=0.6).disable()
    gc.collect()
    assert differences(before, denoiser(pipe)) == []
    assert set(FluxTransformer2DModel.__subclasses__()) == classes
    assert torch.equal(run(pipe, **tiny.call(steps=3)), plain)
    alive = weakref.ref(pipe.transformer)
    del pipe, before
    gc.collect()
    assert alive() is None


def test_objects_keep_their_classes_while_a_cache_is_on():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    kinds = [type(each) for each in (pipe.transformer, pipe.scheduler, pipe.transformer.transformer_blocks)]
    seen = []

    def look(pipe, step, timestep, kwargs):
        seen.append([type(each) for each in (pipe.transformer, pipe.scheduler, pipe.transformer.transformer_blocks)])
        return {}

    with holdover.enable(pipe, "mag_cache", mag_ratios=[1.0] * 4, mag_threshold=1.0) as cache:
        run(pipe, **{**tiny.call(steps=4), "callback_on_step_end": look})
        assert cache.stats().held > 0
        tiny_model = MODELS["FluxTransformer2DModel"]
        other = type(pipe.transformer).from_config(tiny_model.build().config).eval()
        with torch.no_grad():
            other(**tiny_model.inputs())
        assert cache.stats().computed + cache.stats().held == 4  # not through this cache
    assert seen == [kinds] * 4


def test_a_model_is_freed_with_its_pipeline_while_a_cache_is_on():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    holdover.enable(pipe, "mag_cache", mag_ratios=[1.0] * 4)
    run(pipe, **tiny.call(steps=4))
    alive = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert alive() is None


def test_a_handle_to_a_disabled_cache_holds_no_model():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    cache = holdover.enable(pipe, "mag_cache", mag_ratios=[1.0] * 4)
    run(pipe, **tiny.call(steps=4))
    cache.disable()
    alive = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert alive() is None
    assert cache.stats().computed > 0


def test_state_dict_keys_and_repr_are_the_same_while_enabled():
    pipe = PIPELINES["FluxPipeline"].build()
    keys, text = list(pipe.transformer.state_dict()), repr(pipe.transformer)
    with holdover.enable(pipe, "mag_cache"):
        assert list(pipe.transformer.state_dict()) == keys
        assert repr(pipe.transformer) == text
        assert len(pipe.transformer.transformer_blocks) == pipe.transformer.config.num_layers


def test_copies_and_pickles_of_an_enabled_transformer_are_plain():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=4))
    with holdover.enable(pipe, "mag_cache", mag_ratios=[1.0] * 4, mag_threshold=1.0) as cache:
        held = run(pipe, **tiny.call(steps=4))
        forwards = cache.stats().computed + cache.stats().held
        twin = tiny.build()
        twin.transformer = copy.deepcopy(pipe.transformer)
        assert type(twin.transformer) is FluxTransformer2DModel
        assert type(twin.transformer.transformer_blocks) is torch.nn.ModuleList
        assert torch.equal(run(twin, **tiny.call(steps=4)), plain)
        assert type(pickle.loads(pickle.dumps(pipe.transformer))) is FluxTransformer2DModel
        assert type(copy.deepcopy(pipe.scheduler)) is type(twin.scheduler)
        assert cache.stats().computed + cache.stats().held == forwards
    assert not torch.equal(held, plain)


def test_a_copied_scheduler_does_not_drive_the_original():
    """Pipelines with two modalities copy their scheduler; the copy must set its own timesteps."""
    pipe = PIPELINES["WanPipeline"].build()
    with holdover.enable(pipe, "mag_cache", mag_ratios=[1.0] * 8):
        pipe.scheduler.set_timesteps(8)
        other = copy.deepcopy(pipe.scheduler)
        other.set_timesteps(5)
        assert len(pipe.scheduler.timesteps) == 8
        assert len(other.timesteps) == 5


def test_save_pretrained_while_enabled(tmp_path):
    pipe = PIPELINES["FluxPipeline"].build()
    with holdover.enable(pipe, "mag_cache"):
        pipe.transformer.save_pretrained(tmp_path)
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path)
    for name, weight in pipe.transformer.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_failed_enable_leaves_nothing_behind():
    pipe = PIPELINES["WanPipeline[2.2]"].build()
    first = holdover.enable(pipe.transformer_2, "mag_cache", mag_ratios=[1.0])
    before = snapshot(pipe)
    with pytest.raises(holdover.EnableError, match="already is a holdover cache"):
        holdover.enable(pipe, "mag_cache", mag_ratios=[1.0])
    assert differences(before, snapshot(pipe)) == []
    first.disable()


def test_ranks_that_are_none_are_refused_and_leave_nothing_behind():
    pipe = PIPELINES["FluxPipeline"].build()
    before = snapshot(pipe)
    with pytest.raises(holdover.ConfigError, match=r"ranks is a holdover\.Ranks, .* not \[0, 1\]"):
        holdover.enable(pipe, "easy_cache", ranks=[0, 1])
    assert differences(before, snapshot(pipe)) == []


def test_enabling_twice_is_refused_and_disabling_twice_too():
    pipe = PIPELINES["FluxPipeline"].build()
    cache = holdover.enable(pipe, "tea_cache", rel_l1_thresh=0.6)
    with pytest.raises(holdover.EnableError, match="disable"):
        holdover.enable(pipe, "mag_cache")
    with pytest.raises(holdover.EnableError):
        cache.enable(pipe)
    cache.disable()
    with pytest.raises(holdover.NotEnabledError):
        cache.disable()
    with pytest.raises(holdover.NotEnabledError):
        holdover.disable(pipe)


def test_disable_by_pipeline_or_transformer():
    pipe = PIPELINES["FluxPipeline"].build()
    cache = holdover.enable(pipe, "mag_cache")
    holdover.disable(pipe.transformer)
    assert not cache.is_enabled()


def test_a_pipeline_without_a_transformer_is_refused():
    with pytest.raises(holdover.EnableError, match="no transformer"):
        holdover.enable(io.StringIO(), "mag_cache")
