"""Methods whose schedule is known before step 0 read no tensor on the host during a generation."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import holdover
from constant_free import HOLD
from tiny.pipelines import PIPELINES, run

READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero"}


class Reads(TorchDispatchMode):
    """Counts the operations that bring a number from a tensor to the host, between begin() and end()."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.listening = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.listening and func._schema.name in READS:
            self.count += 1
        return func(*args, **(kwargs or {}))


def reads(pipe, tiny):
    """Reads between the first and the last step of one generation."""
    mode = Reads()
    mode.listening = False
    hook = pipe.transformer.register_forward_pre_hook(lambda *_: setattr(mode, "listening", True))
    try:
        with mode:
            run(pipe, **tiny.call(steps=12))
    finally:
        hook.remove()
    return mode.count


CASES = [
    ("FluxPipeline", "mag_cache", {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5}),
    ("FluxPipeline[true_cfg]", "mag_cache", {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5}),
    ("QwenImagePipeline", "mag_cache", {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5}),
    ("WanPipeline", "mag_cache", {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5}),
    ("StableDiffusion3Pipeline", "mag_cache", {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5}),
    ("FluxPipeline[true_cfg]", "plan", {"schedule": (0, 4, 8)}),
    ("WanPipeline", "tea_cache", {"coefficients": [1.0, 0.0], "rel_l1_thresh": 3.0}),
    ("CogVideoXPipeline", "tea_cache", {"coefficients": [1.0, 0.0], "rel_l1_thresh": 3.0}),
    *(("FluxPipeline[true_cfg]", method, HOLD[method]) for method in ("taylor_seer", "spectrum")),
    ("FluxPipeline", "spectrum", HOLD["spectrum"] | {"quantity": "residuals"}),
]


@pytest.mark.parametrize(("name", "method", "settings"), CASES)
def test_a_static_schedule_adds_no_read(name, method, settings):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    plain = reads(pipe, tiny)
    with holdover.enable(pipe, method, **settings) as cache:
        run(pipe, **tiny.call(steps=12))  # traces and checks the cut
        cached = reads(pipe, tiny)
        assert cache.stats().last.held_total > 0
    assert cached <= plain


DATA = [("tea_cache", {"rel_l1_thresh": 0.6}), *((m, HOLD[m]) for m in ("easy_cache", "sea_cache", "first_block"))]


@pytest.mark.parametrize(("method", "settings"), DATA)
def test_a_data_signal_reads_one_scalar_a_step(method, settings):
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    plain = reads(pipe, tiny)
    with holdover.enable(pipe, method, **settings):
        run(pipe, **tiny.call(steps=12))
        assert 0 < reads(pipe, tiny) - plain <= 11
