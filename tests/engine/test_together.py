"""With offload, LoRA and compile, before or after."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks.group_offloading import ModuleGroup
from peft import LoraConfig

import holdover
from tiny.pipelines import PIPELINES, run

METHODS = {
    "mag_cache": {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5, "mag_max_skip_steps": 2},
    "tea_cache": {"rel_l1_thresh": 0.6},
}
TINY = PIPELINES["FluxPipeline"]


def result(pipe, seed=0):
    return run(pipe, **TINY.call(steps=12, seed=seed))


@pytest.fixture(scope="module")
def expected():
    found = {}
    for method, settings in METHODS.items():
        pipe = TINY.build()
        with holdover.enable(pipe, method, **settings):
            found[method] = result(pipe)
    return found


@pytest.fixture(params=sorted(METHODS))
def method(request):
    return request.param


@pytest.mark.parametrize("order", ["before", "after"])
def test_compile_repeated_blocks_fullgraph(method, order, expected):
    torch._dynamo.reset()
    pipe = TINY.build()

    def compile_blocks():
        pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)

    if order == "before":
        compile_blocks()
    with holdover.enable(pipe, method, **METHODS[method]) as cache:
        if order == "after":
            compile_blocks()
        assert torch.equal(result(pipe), expected[method])
        assert torch.equal(result(pipe), expected[method])
        assert cache.stats().held > 0


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_compiling_the_whole_transformer(method, way, expected):
    torch._dynamo.reset()
    pipe = TINY.build()
    if way == "in place":
        pipe.transformer.compile(backend="eager")
    else:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with holdover.enable(pipe, method, **METHODS[method]) as cache:
        assert torch.equal(result(pipe), expected[method])
        assert cache.stats().held > 0


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_group_offload_leaves_held_blocks_where_they_are(method, level, order, expected, monkeypatch):
    pipe = TINY.build()
    brought = []
    onload = ModuleGroup.onload_

    def spy(self):
        brought.append(self)
        return onload(self)

    monkeypatch.setattr(ModuleGroup, "onload_", spy)

    def offload():
        grouping = {"num_blocks_per_group": 1} if level == "block_level" else {}
        device = torch.device("cpu")
        pipe.transformer.enable_group_offload(device, device, offload_type=level, **grouping)

    if order == "before":
        offload()
    with holdover.enable(pipe, method, **METHODS[method]) as cache:
        if order == "after":
            offload()
        result(pipe)  # traces and checks
        brought.clear()
        assert torch.equal(result(pipe), expected[method])
        generation = cache.stats().last
        cached = len(brought)
        brought.clear()
        with cache.off():
            result(pipe)
    assert generation.held_total >= 8
    assert cached < 0.7 * len(brought)


def test_a_signal_leaves_a_group_of_blocks_where_it_was(monkeypatch):
    pipe, moves = TINY.build(), []
    for name in ("onload_", "offload_"):
        plain = getattr(ModuleGroup, name)
        monkeypatch.setattr(ModuleGroup, name, lambda self, name=name, plain=plain: (moves.append(name), plain(self)))
    device = torch.device("cpu")
    pipe.transformer.enable_group_offload(device, device, offload_type="block_level", num_blocks_per_group=2)
    with holdover.enable(pipe, "tea_cache", rel_l1_thresh=1e9, coefficients=[1.0, 0.0]) as cache:
        result(pipe)
        moves.clear()
        result(pipe)
        assert cache.stats().last.held_total > 5
    assert moves.count("onload_") == moves.count("offload_") > 0


@pytest.mark.parametrize("name", ["LTXPipeline", "PixArtSigmaPipeline"])
def test_sequential_offload_where_the_first_block_has_parameters_of_its_own(name):
    tiny, images = PIPELINES[name], []
    pipe = tiny.build()
    for is_offloaded in (False, True):
        if is_offloaded:
            cpu_offload(pipe.transformer, torch.device("cpu"))
        with holdover.enable(pipe, "tea_cache", rel_l1_thresh=0.3, coefficients=[1.0, 0.0]) as cache:
            images.append(run(pipe, **tiny.call(steps=8)))
            assert cache.stats().held > 0
    assert torch.equal(*images)


@pytest.mark.parametrize("order", ["before", "after"])
def test_model_offload_hooks(method, order, expected):
    pipe = TINY.build()

    def offload():
        cpu_offload_with_hook(pipe.transformer, execution_device=torch.device("cpu"))

    if order == "before":
        offload()
    cache = holdover.enable(pipe, method, **METHODS[method])
    if order == "after":
        offload()
    assert torch.equal(result(pipe), expected[method])
    cache.disable()
    remove_hook_from_module(pipe.transformer)
    assert torch.equal(result(pipe), result(TINY.build()))


def with_lora(pipe):
    torch.manual_seed(3)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False), "style")
    return pipe


@pytest.mark.parametrize("order", ["before", "after"])
def test_lora_loaded_before_or_after(method, order, expected):
    reference = with_lora(TINY.build())
    with holdover.enable(reference, method, **METHODS[method]):
        wanted = result(reference)
    pipe = TINY.build()
    if order == "before":
        with_lora(pipe)
    cache = holdover.enable(pipe, method, **METHODS[method])
    if order == "after":
        with_lora(pipe)
    assert torch.equal(result(pipe), wanted)
    pipe.transformer.disable_adapters()
    assert torch.equal(result(pipe), expected[method])
    pipe.transformer.enable_adapters()
    assert torch.equal(result(pipe), wanted)
    pipe.transformer.delete_adapters("style")
    assert torch.equal(result(pipe), expected[method])
    cache.disable()
    assert not torch.equal(wanted, expected[method])


def test_moving_the_pipeline_while_enabled(method, expected):
    pipe = TINY.build()
    with holdover.enable(pipe, method, **METHODS[method]):
        pipe.to(torch.float64)
        result64 = run(pipe, **{k: v.double() if torch.is_tensor(v) else v for k, v in TINY.call(steps=12).items()})
        assert result64.dtype == torch.float64
        pipe.to(torch.float32)
        assert torch.equal(result(pipe), expected[method])
