"""Each method against its authors' rule: their code in diffusers, or a computation written from the paper's formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig, SeaCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks.sea_cache import _apply_sea_filter
from diffusers.hooks.taylorseer_cache import TaylorSeerState
from hypothesis import given, settings
from hypothesis import strategies as st

import holdover
from holdover.grid import Grid
from holdover.methods.easy_cache import add_difference
from holdover.methods.sea_cache import filter_noise, find_channels, find_token_grid
from holdover.models.inputs import iter_tensors
from holdover.policies.base import schedule
from holdover.policies.interval import IntervalPolicy
from holdover.predictors import Chebyshev, Taylor
from tiny.models import MODELS, with_timestep

STEPS = 12
FLUX, WAN = MODELS["FluxTransformer2DModel"], MODELS["WanTransformer3DModel"]


def denoise(tiny, forward, context=None):
    """A short Euler loop; returns the output of every step."""
    inputs, outputs = tiny.inputs(), []
    latent = inputs[tiny.latent]
    with torch.no_grad():
        for i in range(STEPS):
            sigma = 1 - i / STEPS
            arguments = with_timestep(tiny, {**inputs, tiny.latent: latent}, sigma)
            where = {"step_index": i, "sigma": sigma, "num_inference_steps": STEPS}
            if context is None:
                outputs.append(forward(**arguments))
            else:
                with context("cond", **where):
                    outputs.append(next(iter_tensors(forward(**arguments, return_dict=False))))
            latent = latent - outputs[-1] / STEPS
    return outputs


def ours(tiny, model, method, **chosen):
    """The outputs of a cached loop and its trace."""
    with holdover.enable(model, method, **chosen) as cache:
        outputs = denoise(tiny, model, model.cache_context)
        return outputs, cache.stats().last.trace("cond")


def theirs(tiny, model, config, inside):
    """The same under diffusers' cache; `inside` is a module of the last block, which runs at computed steps only."""
    ran, trace = [], []
    inside.register_forward_pre_hook(lambda *_: ran.append(1))

    def forward(**arguments):
        ran.clear()
        output = model(**arguments)
        trace.append("C" if ran else "h")
        return output

    model.enable_cache(config)
    return denoise(tiny, forward, model.cache_context), "".join(trace)


def assert_equal(outputs, expected):
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def assert_close(outputs, expected, tolerance=1e-5):
    for a, b in zip(outputs, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


# EasyCache


class PaperEasyCache:
    """Equations 5 to 8 of arXiv:2507.02860, on a model without guidance."""

    def __init__(self, model, threshold, warmup):
        self.model, self.threshold, self.warmup = model, threshold, warmup
        self.trace, self.total, self.gain = "", 0.0, None
        self.last_input = self.computed_input = self.computed_output = None

    def __call__(self, **arguments):
        x, step = arguments["hidden_states"], len(self.trace)
        compute = step < self.warmup or step == STEPS - 1 or self.gain is None
        if not compute:
            relative = (x - self.last_input).abs().mean() / self.computed_output.abs().mean()
            self.total += float(self.gain * relative)
            compute = self.total >= self.threshold
        self.last_input = x
        self.trace += "C" if compute else "h"
        if not compute:
            return x + (self.computed_output - self.computed_input)
        self.total = 0.0
        output = next(iter_tensors(self.model(**arguments, return_dict=False)))
        if self.computed_output is not None:
            moved = (x - self.computed_input).abs().mean()
            self.gain = (output - self.computed_output).abs().mean() / moved
        self.computed_input, self.computed_output = x, output
        return output


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("tiny", [FLUX, WAN], ids=lambda tiny: tiny.name)
def test_easy_cache_is_the_rule_of_its_paper(tiny, threshold):
    model = tiny.build()
    outputs, trace = ours(tiny, model, "easy_cache", threshold=threshold, warmup_steps=3)
    reference = PaperEasyCache(model, threshold, 3)
    assert_equal(outputs, denoise(tiny, reference))
    assert trace == reference.trace
    assert ("h" in trace) == (threshold > 0)


def test_easy_cache_holds_the_difference_over_the_channels_that_input_and_output_share():
    output, entered, latent = torch.randn(3, 1, 6, 2, generator=torch.Generator().manual_seed(0)).unbind()
    narrow = add_difference(output[:, :4], entered, latent)  # an input with conditions behind the latents
    assert torch.equal(narrow, latent[:, :4] + (output[:, :4] - entered[:, :4]))
    wide = add_difference(output, entered[:, :4], latent[:, :4])  # an output with variances behind the mean
    assert torch.equal(wide[:, :4], narrow)
    assert torch.equal(wide[:, 4:], output[:, 4:])


# SeaCache


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("threshold", [0.1, 0.3, 10.0])
def test_sea_cache_decides_and_holds_as_diffusers_does(threshold, order):
    model = WAN.build()
    rule = {"threshold": threshold, "max_held": 2, "power": 3.0, "order": order}
    outputs, trace = ours(WAN, model, "sea_cache", **rule)
    config = SeaCacheConfig(threshold=threshold, residual_order=order)
    expected, of_diffusers = theirs(WAN, model, config, model.blocks[-1].attn1)
    assert trace == of_diffusers
    assert "h" in trace
    if order == 0:
        assert_equal(outputs, expected)
    else:
        assert_close(outputs, expected)


@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.9, 1.0])
def test_the_filter_is_that_of_diffusers(sigma):
    video = torch.randn(3, 6, 5, 4, generator=torch.Generator().manual_seed(0))  # frames, rows, columns, channels
    level = min(max(sigma, 1e-6), 1 - 1e-6)
    expected = _apply_sea_filter(video, sigma=sigma, power_exp=3.0)
    found = filter_noise(video[None], [1, 2, 3], 1 - level, level, 3.0)[0]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_filter_is_the_formula_of_the_paper():
    image, a, b = np.random.default_rng(0).normal(size=(6, 7)), 0.4, 0.6
    gains = [a / (a**2 + b**2 * np.abs(np.fft.fftfreq(n)) ** 2) for n in image.shape]
    gain = np.outer(*gains)
    dft = [np.exp(-2j * np.pi * np.outer(range(n), range(n)) / n) for n in image.shape]
    spectrum = (dft[0] @ image @ dft[1]) * gain / gain.mean()
    expected = (np.linalg.inv(dft[0]) @ spectrum @ np.linalg.inv(dft[1])).real
    found = filter_noise(torch.tensor(image)[None], [1, 2], a, b, 2.0)[0]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float32), atol=1e-5)


def test_the_filter_keeps_what_is_clean_and_smooths_what_is_noise():
    noise = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(filter_noise(noise, [2, 3], 1.0, 0.0, 2.0), noise, atol=1e-5)
    rough = [filter_noise(noise, [2, 3], 1 - level, level, 2.0).diff(dim=-1).std() for level in (0.2, 0.6, 0.95)]
    assert rough[0] > rough[1] > rough[2]


def test_a_sequence_of_tokens_is_arranged_as_the_arguments_say():
    ids = torch.tensor([[0, row, column] for row in range(3) for column in range(4)])
    assert find_token_grid({"img_ids": ids}, 12) == (1, 3, 4)
    assert find_token_grid({"img_shapes": [[(1, 3, 4)]]}, 12) == (1, 3, 4)
    assert find_token_grid({"num_frames": 2, "height": 2, "width": 3}, 12) == (2, 2, 3)
    assert find_token_grid({"img_ids": ids}, 15) == (15,)  # with tokens of a reference image
    assert find_token_grid({}, 12) == (12,)


@pytest.mark.parametrize(
    ("shape", "axis"), [((1, 4, 8, 9), 1), ((1, 5, 4, 8, 9), 2), ((4, 5, 8, 9), 0), ((1, 12, 4), 2), ((1, 4, 12), 1)]
)
def test_the_channels_are_found_by_their_number(shape, axis):
    assert find_channels(torch.empty(shape), 4) == axis


# First-block cache


@pytest.mark.parametrize("threshold", [0.3, 0.7, 1.0, 10.0])
def test_first_block_decides_and_holds_as_diffusers_does(threshold):
    model = FLUX.build()
    outputs, trace = ours(FLUX, model, "first_block", threshold=threshold)
    last = model.single_transformer_blocks[-1].attn
    expected, of_diffusers = theirs(FLUX, model, FirstBlockCacheConfig(threshold=threshold), last)
    assert trace == of_diffusers
    assert ("h" in trace) == (threshold > 0.5)
    assert_equal(outputs, expected)


def test_a_model_with_one_block_is_refused_by_first_block():
    class OneBlock(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

        def forward(self, hidden_states):
            for block in self.blocks:
                hidden_states = hidden_states + block(hidden_states)
            return hidden_states

    model = OneBlock().eval()
    with holdover.enable(model, "first_block"), torch.no_grad():
        with pytest.raises(holdover.UnsupportedModelError, match="OneBlock has a single block"):
            model(torch.ones(1, 3, 4))


# TaylorSeer


@settings(deadline=None)
@given(order=st.integers(0, 4), computed=st.sets(st.integers(0, 30), min_size=1, max_size=8), ahead=st.integers(1, 9))
def test_the_series_is_that_of_diffusers(order, computed, ahead):
    anchors = sorted(computed)
    values = torch.randn(len(anchors), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(len(anchors)))
    state = TaylorSeerState(taylor_factors_dtype=torch.float64, max_order=order)
    for anchor, value in zip(anchors, values, strict=True):
        state.current_step = anchor
        state.update((value,))
    state.current_step += ahead
    weights = torch.tensor(Taylor(order).weights(anchors[-1] + ahead, anchors), dtype=torch.float64)
    assert torch.allclose(weights @ values, state.predict()[0], rtol=1e-9, atol=1e-9)


def test_taylor_seer_forecasts_the_output_as_diffusers_lite_mode_does():
    model = FLUX.build()
    outputs, trace = ours(FLUX, model, "taylor_seer", interval=2, order=2)
    config = TaylorSeerCacheConfig(
        cache_interval=2, max_order=2, taylor_factors_dtype=torch.float32, use_lite_mode=True
    )
    expected, of_diffusers = theirs(FLUX, model, config, model.single_transformer_blocks[-1].attn)
    assert trace == of_diffusers == "CCChChChChCh"
    assert_close(outputs, expected)


def test_taylor_seer_s_interval_is_that_of_its_authors():
    """Three steps, then every sixth: a counter of held steps starts again at each computed one."""
    counter, expected = 0, ""
    for step in range(50):
        compute = step < 3 or counter == 5
        counter = 0 if compute else counter + 1
        expected += "C" if compute else "h"
    decisions = schedule(IntervalPolicy(3, 6, 0.0, Grid(50)), Grid(50))
    assert "".join("C" if d.compute else "h" for d in decisions) == expected


@settings(deadline=None)
@given(order=st.integers(0, 4), computed=st.sets(st.integers(0, 30), min_size=5, max_size=8), ahead=st.integers(1, 9))
def test_the_exact_series_is_exact_on_polynomials_of_its_order(order, computed, ahead):
    anchors = sorted(computed)
    polynomial = np.polynomial.Polynomial(np.random.default_rng(order).normal(size=order + 1))
    point = anchors[-1] + ahead
    weights = Taylor(order, exact=True).weights(point, anchors)
    forecast = sum(w * polynomial(a) for w, a in zip(weights, anchors, strict=True))
    assert forecast == pytest.approx(polynomial(point), rel=1e-6, abs=1e-6 * sum(map(abs, weights)))


# Spectrum


@pytest.mark.parametrize(("growth", "computed"), [(0.75, 14), (3.0, 10)])
def test_spectrum_computes_as_many_steps_as_its_authors_say(growth, computed):
    """Of 50, with five warm-up steps and a window of 2 at first."""
    made = schedule(IntervalPolicy(5, 2.0, growth, Grid(50)), Grid(50))
    assert sum(decision.compute for decision in made) == computed
    window, held, expected = 2.0, 0, []
    for step in range(50):
        compute = step < 5 or (held + 1) % math.floor(window) == 0
        if compute and step >= 5:
            window = round(window + growth, 3)
        held = 0 if compute else held + 1
        expected.append(compute)
    assert [decision.compute for decision in made] == expected


@settings(deadline=None)
@given(
    degree=st.integers(0, 5),
    ridge=st.floats(1e-3, 1.0),
    computed=st.sets(st.integers(0, 40), min_size=2, max_size=9),
    ahead=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_forecast_is_a_ridge_regression_mixed_with_a_line(degree, ridge, computed, ahead, share):
    anchors = sorted(computed)
    values = np.random.default_rng(degree).normal(size=(len(anchors), 3))
    variable = [2 * a / 50 - 1 for a in (*anchors, anchors[-1] + ahead)]
    basis = np.array([[math.cos(k * math.acos(min(x, 1.0))) for k in range(degree + 1)] for x in variable])
    padded = np.vstack([basis[:-1], math.sqrt(ridge) * np.eye(degree + 1)])
    fitted = np.linalg.lstsq(padded, np.vstack([values, np.zeros((degree + 1, 3))]), rcond=None)[0]
    slope = (values[-1] - values[-2]) / (anchors[-1] - anchors[-2])
    expected = share * basis[-1] @ fitted + (1 - share) * (values[-1] + slope * ahead)
    weights = Chebyshev(degree, ridge, share, 0, 50, depth=50).weights(anchors[-1] + ahead, anchors)
    assert np.array(weights) @ values == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("ridge", [1e-300, 1e-18])
def test_with_hardly_any_ridge_the_forecast_is_the_smallest_polynomial_through_the_computed_steps(ridge):
    basis = np.polynomial.chebyshev.chebvander(2 * np.array([0, 1, 4, 6]) / 50 - 1, 8)
    expected = basis[-1] @ np.linalg.pinv(basis[:-1])
    assert Chebyshev(8, ridge, 1.0, 0, 50, depth=50).weights(6, [0, 1, 4]) == pytest.approx(expected, rel=1e-6)


def test_spectrum_on_a_bare_transformer_asks_for_the_number_of_steps():
    model = FLUX.build()
    with holdover.enable(model, "spectrum"), torch.no_grad():
        with pytest.warns(holdover.HoldoverWarning, match="spectrum needs the number of steps"):
            model(**FLUX.inputs())
