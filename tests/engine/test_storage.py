"""Residuals held in eight bits, or on the host."""

from __future__ import annotations

import pytest
import torch

import holdover
from holdover.engine.storage import STORAGES
from holdover.errors import ConfigError
from tiny.pipelines import PIPELINES, run

SETTINGS = {
    "mag_cache": {"mag_ratios": [1.0] * 10, "mag_max_skip_steps": 2},
    "tea_cache": {"rel_l1_thresh": 0.5, "coefficients": [1.0, 0.0]},
}


@pytest.mark.parametrize("hold_in", ["device", "cpu"])
def test_a_tensor_comes_back_as_it_was(hold_in: str) -> None:
    tensor = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    storage = STORAGES[hold_in]
    assert torch.equal(storage.load(storage.store(tensor)), tensor)


def test_eight_bits_keep_each_token_within_a_sixteenth_of_its_largest_value() -> None:
    tensor = torch.randn(2, 50, 64) * torch.logspace(-3, 3, 50)[:, None]
    storage = STORAGES["fp8"]
    again = storage.load(storage.store(tensor))
    assert again.dtype == tensor.dtype
    assert ((again - tensor).abs() <= tensor.abs().amax(-1, keepdim=True) / 16).all()
    assert 0.005 < (again - tensor).norm() / tensor.norm() < 0.05
    assert storage.store(tensor).nbytes < tensor.nbytes / 3


def test_zeros_stay_zeros_in_eight_bits() -> None:
    storage = STORAGES["fp8"]
    assert torch.equal(storage.load(storage.store(torch.zeros(1, 3, 8))), torch.zeros(1, 3, 8))


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("name", ["FluxPipeline[true_cfg]", "WanVACEPipeline"])
def test_on_the_host_images_are_the_same_and_the_device_holds_nothing(name: str, method: str) -> None:
    tiny = PIPELINES[name]
    pipe, images, held = tiny.build(), {}, {}
    for hold_in in ("device", "cpu", "fp8"):
        with holdover.enable(pipe, method, hold_in=hold_in, **SETTINGS[method]) as cache:
            images[hold_in] = run(pipe, **tiny.call(steps=10))
            assert cache.stats().last.held_total > 0
            held[hold_in] = cache.stats().last.peak_bytes
    assert torch.equal(images["cpu"], images["device"])
    assert not torch.equal(images["fp8"], images["device"])
    assert held["cpu"] < held["fp8"] < held["device"]


def test_anywhere_else_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hold_in must be one of 'device', 'fp8', 'cpu'"):
        holdover.MagCacheConfig(hold_in="disk")
