"""A held step runs what the model does outside its blocks, less what only feeds them, one addition for each segment
that someone reads, and nothing else.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import holdover
from tiny.models import MODELS, with_timestep

READ = {"FluxTransformer2DModel": 1, "QwenImageTransformer2DModel": 1, "WanTransformer3DModel": 1}
CLOCK = {"aten::_local_scalar_dense", "aten::mean", "aten::_to_copy"}  # without a scheduler the timestep is read


class Operations(TorchDispatchMode):
    """Counts what is called on tensors."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def operations(model, inputs):
    with torch.no_grad(), Operations() as mode:
        model(**inputs)
    return mode.seen


@pytest.mark.parametrize(("name", "read"), READ.items())
def test_one_addition_a_segment(name, read):
    tiny = MODELS[name]
    model, inputs = tiny.build(), tiny.inputs()
    steps = [with_timestep(tiny, inputs, t) for t in (1.0, 0.8, 0.6)]
    settings = {"mag_ratios": [1.0], "mag_threshold": 1e9, "mag_max_skip_steps": 9, "mag_retention_ratio": 0.0}
    with holdover.enable(model, "mag_cache", num_inference_steps=12, **settings) as cache, torch.no_grad():
        model(**steps[0])
        model(**steps[1])
        held = operations(model, steps[2])
        assert [v.computed for v in cache.stats().generations[-1].forwards] == [True, False, False]
    for child, blocks in list(model.named_children()):
        if isinstance(blocks, nn.ModuleList):
            setattr(model, child, nn.ModuleList())
    outside = operations(model, steps[2])
    assert held["aten::add"] - outside["aten::add"] == read
    work = {op: n for op, n in (held - outside).items() if op != "aten::add"}
    assert set(work) <= CLOCK
