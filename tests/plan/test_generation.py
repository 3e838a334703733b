"""Which model a profile belongs to: recognized in another precision and with adapters, not with other weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import group_offloading
from peft import LoraConfig
from torch import nn

import holdover
from holdover.plan.generation import adapters, dtype_of, facts_of, fingerprint
from holdover.profiles import Profile
from tiny.pipelines import PIPELINES, run

from .profiled import calibrated

FLUX = "FluxPipeline"
LORA = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)


@pytest.fixture
def transformer():
    return PIPELINES[FLUX].build().transformer


def test_precision_does_not_matter(transformer):
    before = fingerprint(transformer)
    assert dtype_of(transformer) == "float32"
    halved = transformer.to(torch.bfloat16)
    assert dtype_of(halved) == "bfloat16"
    assert fingerprint(halved) == before
    assert fingerprint(halved.float()) == before


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_do_not_matter_and_are_listed(transformer):
    before = facts_of(transformer)
    transformer.add_adapter(LORA, adapter_name="style")
    with_style = facts_of(transformer)
    assert with_style.fingerprint == before.fingerprint
    assert (before.adapters, with_style.adapters) == ((), ("style",))
    transformer.add_adapter(LORA, adapter_name="another")
    transformer.set_adapters(["style", "another"])
    assert adapters(transformer) == ("another", "style")
    assert fingerprint(transformer) == before.fingerprint
    transformer.disable_adapters()
    assert adapters(transformer) == ()


def test_other_weights_and_other_shapes_matter(transformer):
    before = fingerprint(transformer)
    with torch.no_grad():
        transformer.x_embedder.weight.add_(1.0)
    assert fingerprint(transformer) != before
    assert fingerprint(PIPELINES["QwenImagePipeline"].build().transformer) != before


def test_parameters_larger_than_float32_can_count():
    """37 million values, as in every large model: the last of them has no exact number in float32."""
    large = nn.Linear(1, 1)
    large.weight = nn.Parameter(torch.zeros(12288, 3072, dtype=torch.bfloat16))
    before = fingerprint(large)
    with torch.no_grad():
        large.weight[-1, -1] = 1.0
    assert fingerprint(large) != before


def test_a_model_without_parameters_or_memory_has_one_too():
    assert dtype_of(nn.Identity()) == "none"
    with torch.device("meta"):
        ghost = nn.Linear(4, 4)
    assert fingerprint(ghost) != fingerprint(nn.Identity())


def test_weights_on_disk_are_read_from_there(transformer, tmp_path):
    before = fingerprint(transformer)
    path = str(tmp_path / "groups")
    transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=path)
    assert fingerprint(transformer) == before


def test_a_scheduler_whose_step_is_wrapped_is_not_moved():
    pipe = PIPELINES[FLUX].build()
    plain_step, calls = pipe.scheduler.step, []
    pipe.scheduler.step = lambda *args, **kwargs: (calls.append(1), plain_step(*args, **kwargs))[1]
    plain = run(pipe, **PIPELINES[FLUX].call(steps=8))
    with holdover.enable(pipe, "plan", schedule=tuple(range(8)), profile="none"):
        assert torch.equal(run(pipe, **PIPELINES[FLUX].call(steps=8)), plain)
    assert len(calls) == 16


def test_where_the_weights_are_does_not_matter(transformer):
    before = fingerprint(transformer)
    cpu_offload(transformer, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in transformer.parameters())
    assert fingerprint(transformer) == before
    remove_hook_from_module(transformer, recurse=True)
    transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert fingerprint(transformer) == before


class Unreadable(torch.Tensor):
    """A parameter whose values no operation reads."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def test_values_that_cannot_be_read_are_left_out():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    assert fingerprint(one) != fingerprint(other)
    for layer in (one, other):
        for name, parameter in list(layer.named_parameters()):
            made = torch.Tensor._make_wrapper_subclass(Unreadable, parameter.shape)
            setattr(layer, name, nn.Parameter(made, requires_grad=False))
    assert fingerprint(one) == fingerprint(other) != fingerprint(nn.Identity())


def test_quantized_weights_offloaded_with_streams_are_read():
    """diffusers then keeps the values of torchao's tensors on another device than the one the tensors name."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    quantization.quantize_(layers, quantization.Int8WeightOnlyConfig())
    before, kept = fingerprint(layers), layers[0].weight.detach().clone()
    group_offloading._swap_torchao_tensor(layers[0].weight, layers[0].weight.to("meta"))
    assert fingerprint(layers) != before
    group_offloading._restore_torchao_tensor(layers[0].weight, kept)
    assert layers[0].weight.is_meta
    assert fingerprint(layers) == before


def test_a_profile_of_another_class_is_refused():
    pipe = PIPELINES["QwenImagePipeline"].build()
    with pytest.raises(holdover.ProfileError, match=r"measured on transformer \(FluxTransformer2DModel\), not on this"):
        holdover.enable(pipe, "plan", profile=calibrated(FLUX))


def test_a_profile_of_other_weights_warns():
    tiny = PIPELINES[FLUX]
    pipe = tiny.build()
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(2)
    with pytest.warns(holdover.HoldoverWarning, match="on other weights"):
        cache = holdover.enable(pipe, "plan", profile=calibrated(FLUX), budget=12)
    with cache:
        run(pipe, **tiny.call(steps=12))


def test_a_profile_without_the_adapter_in_use_warns():
    pipe = PIPELINES[FLUX].build()
    pipe.transformer.add_adapter(LORA, adapter_name="style")
    with pytest.warns(holdover.HoldoverWarning, match="with other adapters"):
        holdover.enable(pipe, "plan", profile=calibrated(FLUX)).disable()


def test_single_requests_with_other_budgets_do_not_repeat_the_warning():
    pipe = PIPELINES[FLUX].build()
    pipe.transformer.add_adapter(LORA, adapter_name="style")
    with pytest.warns(holdover.HoldoverWarning):
        cache = holdover.enable(pipe, "plan", profile=calibrated(FLUX))
    with cache, cache.using(budget=3):
        assert cache.is_enabled()


def test_the_shipped_profile_of_this_model_is_found(monkeypatch):
    own = calibrated(FLUX)
    stranger = dataclasses.replace(own.facts.models[0][1], fingerprint="0" * 16)
    other = own.with_facts(name="another", models=(("transformer", stranger),))
    monkeypatch.setattr("holdover.plan.generation.measured", lambda: (other, own))
    pipe = PIPELINES[FLUX].build()
    with holdover.enable(pipe, "plan", budget=4) as cache:
        assert "profile calibrated-FluxPipeline" in str(cache.stats())
    with pytest.raises(holdover.ProfileError, match="Did you mean 'another'"):
        holdover.enable(pipe, "plan", profile="anotter")


def test_a_profile_may_be_a_file(tmp_path):
    path = calibrated(FLUX).save(tmp_path / "flux.safetensors")
    assert Profile.load(path) == calibrated(FLUX)
    with holdover.enable(PIPELINES[FLUX].build(), "plan", profile=str(path)) as cache:
        assert cache.settings.as_dict()["profile"] == str(path)
    with pytest.raises(holdover.ProfileError, match="No profile could be read"):
        holdover.enable(PIPELINES[FLUX].build(), "plan", profile=str(tmp_path / "none.safetensors"))
