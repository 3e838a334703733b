"""The whole transformer compiled: one graph for computed steps, one for held ones, whatever was done first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import holdover
from constant_free import HOLD
from tiny.pipelines import PIPELINES, run

STEPS = 28
METHODS = {
    "mag_cache": ({"mag_ratios": [1.01] * STEPS, "mag_threshold": 0.5, "mag_max_skip_steps": 2}, 2),
    "tea_cache": ({"rel_l1_thresh": 0.6}, 2),
    "plan": ({"schedule": tuple(range(0, STEPS, 4)), "predictor": "newton"}, 1),
}
FREE = {
    "easy_cache": (HOLD["easy_cache"], 1),
    "sea_cache": ({"threshold": 0.3}, 2),
    "first_block": ({"threshold": 0.3}, 2),
    "taylor_seer": (HOLD["taylor_seer"] | {"quantity": "residuals"}, 2),
    "spectrum": (HOLD["spectrum"], 1),
}
TINY = PIPELINES["FluxPipeline"]


def result(pipe):
    return run(pipe, **TINY.call(steps=STEPS))


@pytest.fixture(scope="module")
def expected():
    found = {}
    for method, (settings, _) in (METHODS | FREE).items():
        pipe = TINY.build()
        with holdover.enable(pipe, method, **settings):
            found[method] = result(pipe)
    return found


def compile_whole(pipe, way, backend="eager", **options):
    if way == "in place":
        pipe.transformer.compile(backend=backend, **options)
    else:
        pipe.transformer = torch.compile(pipe.transformer, backend=backend, **options)


ORDERS = ("before", "after")
WAYS = [(method, way, order) for method in METHODS for way in ("in place", "wrapped") for order in ORDERS]
WAYS += [(method, "in place", order) for method in FREE for order in ORDERS]


@pytest.mark.parametrize(("method", "way", "order"), WAYS)
def test_no_step_is_compiled_twice_and_enabling_again_compiles_nothing(method, way, order, expected):
    """In place as one full graph, in which a graph break is an error."""
    torch._dynamo.reset()
    counters.clear()
    settings, graphs = (METHODS | FREE)[method]
    pipe = TINY.build()
    options = {"fullgraph": True} if way == "in place" else {}
    if order == "before":
        compile_whole(pipe, way, **options)
    with holdover.enable(pipe, method, **settings) as cache:
        if order == "after":
            compile_whole(pipe, way, **options)
        assert torch.equal(result(pipe), expected[method])
        assert torch.equal(result(pipe), expected[method])
        assert cache.stats().held > 0
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    if (way, order) == ("in place", "before"):
        with holdover.enable(pipe, method, **settings):
            assert torch.equal(result(pipe), expected[method])
        assert counters["stats"]["unique_graphs"] == graphs


def test_a_wrapper_made_while_enabled_is_plain_after_disable():
    torch._dynamo.reset()
    pipe = TINY.build()
    cache = holdover.enable(pipe, "mag_cache", **METHODS["mag_cache"][0])
    compile_whole(pipe, "wrapped")
    held = result(pipe)
    cache.disable()
    plain = result(pipe)
    assert torch.equal(plain, result(TINY.build()))
    assert not torch.equal(plain, held)


def reusing_memory(module, _):
    """A backend whose graphs write into the same memory each time they run, as CUDA graphs do."""
    kept = []

    def graph(*inputs):
        outputs = module(*inputs)
        if not kept:
            kept.extend(output.clone() for output in outputs)
        for memory, output in zip(kept, outputs, strict=True):
            memory.copy_(output)
        return tuple(kept)

    return graph


@pytest.mark.parametrize("way", ["in place", "wrapped"])
@pytest.mark.parametrize("method", ["mag_cache", "plan"])
def test_a_graph_that_reuses_its_memory_overwrites_nothing(method, way):
    guided = PIPELINES["WanPipeline"]  # one branch after the other: what the first returned is used after the second
    pictures = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        pipe = guided.build()
        if compiled:
            compile_whole(pipe, way, backend=reusing_memory)
        pictures[compiled, "no cache"] = run(pipe, **guided.call(steps=STEPS))
        with holdover.enable(pipe, method, **METHODS[method][0]) as cache:
            pictures[compiled, method] = run(pipe, **guided.call(steps=STEPS))
            assert cache.stats().held > 0
    assert torch.equal(pictures[False, method], pictures[True, method])
    assert not torch.equal(pictures[False, "no cache"], pictures[True, "no cache"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden_states):
        return hidden_states + self.inner(hidden_states)


class Asking(nn.Module):
    """Looks at what its blocks are before it calls them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden_states, timestep):
        hidden_states = hidden_states * timestep
        for block in self.blocks:
            hidden_states = block(hidden_states) if isinstance(block, Block) else hidden_states
        return hidden_states


def test_a_loop_that_asks_for_the_class_of_its_blocks_gets_the_right_answer():
    torch._dynamo.reset()
    latent, times = torch.linspace(-1, 1, 16).reshape(2, 8), [torch.tensor([1.0 - i / 8]) for i in range(8)]
    settings = {"mag_ratios": [1.0], "mag_threshold": 1e9, "mag_max_skip_steps": 2, "num_inference_steps": 8}
    outputs = []
    for compiled in (False, True):
        model = Asking().eval()
        if compiled:
            model.compile(backend="eager")
        with holdover.enable(model, "mag_cache", **settings) as cache, torch.no_grad():
            outputs.append(torch.stack([model(latent, t) for t in times]))
            assert cache.stats().held > 0
    assert torch.equal(*outputs)
