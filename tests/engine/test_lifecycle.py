"""Generations begin and end by themselves, and nothing of one reaches the next."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

import holdover
from constant_free import HOLD
from holdover.engine.state import BranchState
from holdover.engine.storage import HeldTensors
from tiny.pipelines import PIPELINES, run

MAG = {"mag_ratios": [1.01] * 12, "mag_threshold": 0.5, "mag_max_skip_steps": 2}


@pytest.fixture(scope="module")
def flux():
    tiny = PIPELINES["FluxPipeline"]
    return tiny, tiny.build()


def reference(name, **call):
    """The picture a freshly built and freshly enabled pipeline makes."""
    tiny = PIPELINES[name]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", **MAG):
        return run(pipe, **tiny.call(**call))


class StopHereError(Exception):
    """Raised by a test in the middle of a generation."""


@pytest.mark.parametrize("step", [0, 1, 5, 11])
@pytest.mark.parametrize("error", [StopHereError, KeyboardInterrupt])
def test_after_an_exception_in_a_callback_the_next_generation_is_exact(flux, step, error):
    tiny, pipe = flux
    expected = reference("FluxPipeline", steps=12, seed=7)

    def stop(pipe, i, t, kwargs):
        if i == step:
            raise error
        return {}

    with holdover.enable(pipe, "mag_cache", **MAG):
        with pytest.raises(error):
            run(pipe, **tiny.call(steps=12, seed=3), callback_on_step_end=stop)
        assert torch.equal(run(pipe, **tiny.call(steps=12, seed=7)), expected)


@pytest.mark.parametrize("forward", [1, 4, 6])
def test_after_an_exception_inside_a_forward_the_next_generation_is_exact(flux, forward):
    tiny, pipe = flux
    expected = reference("FluxPipeline", steps=12, seed=7)
    calls = []

    def stop(module, inputs):
        calls.append(module)
        if len(calls) == forward:
            raise StopHereError

    with holdover.enable(pipe, "mag_cache", **MAG):
        hook = pipe.transformer.norm_out.register_forward_pre_hook(stop)
        with pytest.raises(StopHereError):
            run(pipe, **tiny.call(steps=12, seed=3))
        hook.remove()
        assert torch.equal(run(pipe, **tiny.call(steps=12, seed=7)), expected)


@pytest.mark.parametrize("method", HOLD)
def test_methods_without_constants_leave_nothing_of_an_aborted_generation(method):
    """An exception in the second branch of a step."""
    tiny = PIPELINES["FluxPipeline[true_cfg]"]
    pipe, calls = tiny.build(), []

    def stop(module, inputs):
        calls.append(module)
        if len(calls) == 4:
            raise StopHereError

    with holdover.enable(pipe, method, **HOLD[method]) as cache:
        expected = run(pipe, **tiny.call(steps=8, seed=7))
        assert cache.stats().held > 0
        hook = pipe.transformer.proj_out.register_forward_pre_hook(stop)
        with pytest.raises(StopHereError):
            run(pipe, **tiny.call(steps=8, seed=3))
        hook.remove()
        assert torch.equal(run(pipe, **tiny.call(steps=8, seed=7)), expected)


def test_every_step_count_gets_its_own_schedule(flux):
    tiny, pipe = flux
    with holdover.enable(pipe, "mag_cache", mag_threshold=0.24, mag_max_skip_steps=5, mag_retention_ratio=0.1) as cache:
        for steps in (28, 50, 7, 1, 28):
            run(pipe, **tiny.call(steps=steps))
            last = cache.stats().last
            assert last.steps == steps
            assert [forward.step for forward in last.forwards] == list(range(steps))
        traces = [g.trace("cond") for g in cache.stats().generations]
    assert traces[0] == traces[-1]
    assert traces[0][:3] == "CCC"
    assert traces[1][:5] == "CCCCC"


def test_image_to_image_counts_the_steps_that_run():
    tiny = PIPELINES["FluxImg2ImgPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_retention_ratio": 0.5}) as cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
    assert generation.steps == 8
    assert [v.step for v in generation.forwards] == list(range(4, 12))
    assert generation.trace(generation.branches[0]) == "CCCChhCh"


def test_an_expert_s_first_step_is_no_sign_that_nothing_can_be_held():
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    with holdover.enable(pipe, "plan", schedule=(0, 1)) as cache, warnings.catch_warnings():
        warnings.simplefilter("error", holdover.HoldoverWarning)
        run(pipe, **tiny.call(steps=2))
        assert {(v.transformer, v.step) for v in cache.stats().last.forwards} == {
            ("transformer", 0),
            ("transformer_2", 1),
        }


def test_each_expert_has_its_own_steps():
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_retention_ratio": 0.25}) as cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
    steps = {branch: [v.step for v in generation.of_branch(branch)] for branch in generation.branches}
    assert steps["transformer/cond"] == steps["transformer/uncond"] == [0, 1, 2, 3]
    assert steps["transformer_2/cond"] == steps["transformer_2/uncond"] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert generation.trace("transformer/cond") == "ChhC"
    assert generation.trace("transformer_2/cond") == "CChhChhC"


def test_a_branch_that_pauses_does_not_hold_what_is_too_old():
    """Guidance intervals: the steps a branch did not run at count against what it holds."""
    tiny = PIPELINES["HunyuanImagePipeline[interval]"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
    for branch in generation.branches:
        anchor = None
        for forward in generation.of_branch(branch):
            assert forward.computed or forward.step - anchor <= 2
            anchor = forward.step if forward.computed else anchor


def test_another_scheduler_is_followed(flux):
    tiny, _ = flux
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        run(pipe, **tiny.call(steps=12))
        old = pipe.scheduler
        pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(old.config, shift=1.0)
        run(pipe, **tiny.call(steps=9))
        assert type(old) is FlowMatchEulerDiscreteScheduler
        assert [v.step for v in cache.stats().last.forwards] == list(range(9))
        run(pipe, **tiny.call(steps=10))
        assert [v.step for v in cache.stats().last.forwards] == list(range(10))
    assert type(pipe.scheduler) is FlowMatchEulerDiscreteScheduler


def test_multistep_scheduler_in_place_of_the_pipelines_own(flux):
    tiny, _ = flux
    pipe = tiny.build()
    pipe.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    call = tiny.call(steps=8)
    plain = run(pipe, **call)
    with holdover.enable(pipe, "mag_cache", **{**MAG, "mag_threshold": 0.0}):
        assert torch.equal(run(pipe, **tiny.call(steps=8)), plain)
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        run(pipe, **tiny.call(steps=8))
        assert cache.stats().last.trace("cond") == "ChhChhCh"


def test_memory_is_released_when_a_generation_ends(flux, monkeypatch):
    tiny, pipe = flux
    alive: list[weakref.ref[HeldTensors]] = []
    store = BranchState.store

    def spy(self, step, held):
        alive.append(weakref.ref(held))
        store(self, step, held)

    monkeypatch.setattr(BranchState, "store", spy)
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        run(pipe, **tiny.call(steps=12))
        gc.collect()
        assert len(alive) == 4
        assert all(ref() is None for ref in alive)
        assert cache.stats().last.peak_bytes > 0


def test_shape_batch_and_dtype_may_change_between_generations(flux):
    tiny, pipe = flux
    with holdover.enable(pipe, "mag_cache", **MAG):
        run(pipe, **tiny.call(steps=6))
        other = run(pipe, **tiny.call(steps=12, size=1))
        again = run(pipe, **tiny.call(steps=12))
    assert torch.equal(other, reference("FluxPipeline", steps=12, size=1))
    assert torch.equal(again, reference("FluxPipeline", steps=12))


def test_batch_that_shrinks_during_a_generation_is_computed():
    """Guidance that ends halves the batch: what was held does not fit and is not broadcast."""
    tiny = PIPELINES["StableDiffusion3Pipeline[cutoff]"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        run(pipe, **tiny.call(steps=12))
        forwards = cache.stats().last.forwards
    assert [v.computed for v in forwards][:7] == [True, False, False, True, False, False, True]
    assert forwards[7].computed


def test_using_and_off_last_for_their_block(flux):
    tiny, pipe = flux
    plain = run(pipe, **tiny.call(steps=12))
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        held = run(pipe, **tiny.call(steps=12))
        with cache.off():
            assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
        with cache.using(mag_max_skip_steps=1):
            run(pipe, **tiny.call(steps=12))
            assert cache.stats().last.trace("cond") == "ChChChChChCh"
            with cache.using(mag_threshold=0.0):
                assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
        assert torch.equal(run(pipe, **tiny.call(steps=12)), held)
        with pytest.raises(holdover.ConfigError, match="mag_threshold"):
            cache.using(mag_treshold=0.1)
        assert [g.method for g in cache.stats().generations] == ["mag_cache", "none", *["mag_cache"] * 3]


def test_two_pipelines_in_two_threads_do_not_know_each_other():
    tiny = PIPELINES["FluxPipeline"]
    results: dict[int, list[torch.Tensor]] = {}

    pipes = {seed: tiny.build() for seed in (1, 2, 3)}

    def work(seed):
        pipe = pipes[seed]
        with holdover.enable(pipe, "mag_cache", **MAG):
            results[seed] = [run(pipe, **tiny.call(steps=12, seed=seed)) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in pipes:
        expected = reference("FluxPipeline", steps=12, seed=seed)
        assert all(torch.equal(result, expected) for result in results[seed])


def test_autograd_on_computes_everything_and_says_so(flux):
    _, pipe = flux
    model = pipe.transformer
    inputs = captured_inputs(pipe)
    expected = model(**inputs)[0]
    with holdover.enable(model, "mag_cache", **MAG) as cache:
        with pytest.warns(holdover.HoldoverWarning, match="no_grad"):
            outputs = [model(**inputs)[0] for _ in range(3)]
        assert all(torch.equal(output, expected) for output in outputs)
        assert "3 forwards ran with autograd on" in str(cache.stats())


def captured_inputs(pipe):
    """The arguments of one forward, as the pipeline passes them."""
    seen = []
    hook = pipe.transformer.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    run(pipe, **PIPELINES["FluxPipeline"].call(steps=1))
    hook.remove()
    return {**seen[0], "return_dict": False}


def test_gradients_flow_as_without_a_cache(flux):
    _, pipe = flux
    model = pipe.transformer
    inputs = captured_inputs(pipe)
    inputs["hidden_states"] = inputs["hidden_states"].clone().requires_grad_(True)

    def gradient():
        inputs["hidden_states"].grad = None
        model(**inputs)[0].square().sum().backward()
        return inputs["hidden_states"].grad.clone()

    expected = gradient()
    with holdover.enable(model, "mag_cache", **MAG), pytest.warns(holdover.HoldoverWarning):
        assert torch.equal(gradient(), expected)


def test_inference_mode(flux):
    tiny, pipe = flux
    expected = reference("FluxPipeline", steps=12)
    with holdover.enable(pipe, "mag_cache", **MAG), torch.inference_mode():
        assert torch.equal(run(pipe, **tiny.call(steps=12)), expected)


def test_refresh_checks_what_it_is_given(flux):
    _, pipe = flux
    with holdover.enable(pipe, "mag_cache", **MAG) as cache:
        for wrong in (0, -1, 2.5, True, "28"):
            with pytest.raises(holdover.ConfigError, match="num_inference_steps"):
                cache.refresh(pipe, wrong)
        with pytest.raises(holdover.NotEnabledError):
            cache.refresh(PIPELINES["FluxPipeline"].build(), 12)
        cache.refresh(pipe, 12)
        cache.refresh(pipe.transformer, 12, verbose=False)


@contextmanager
def no_collector():
    """Nothing but counting references frees memory here, and only what is made from now on is looked through."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_tensors():
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


EACH_KIND = pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("mag_cache", MAG),
        ("tea_cache", {"rel_l1_thresh": 0.6}),
        ("plan", {"schedule": (0, 1, 4, 8), "predictor": "newton"}),
    ],
)


@EACH_KIND
def test_the_check_of_a_new_model_leaves_no_tensors_to_the_garbage_collector(flux, method, settings):
    tiny, pipe = flux
    with holdover.enable(pipe, method, **settings), no_collector():
        run(pipe, **tiny.call(steps=12))
        left = live_tensors()
        gc.collect()
        assert live_tensors() == left


@EACH_KIND
def test_no_step_leaves_tensors_to_the_garbage_collector(flux, method, settings):
    tiny, pipe = flux
    counts = []

    def count(pipeline, step, timestep, values):
        counts.append(live_tensors())
        return values

    with holdover.enable(pipe, method, **settings):
        run(pipe, **tiny.call(steps=12))
        with no_collector():
            run(pipe, **tiny.call(steps=12), callback_on_step_end=count)
            left = live_tensors()
            gc.collect()
            assert live_tensors() == left
    most = 4 if method == "plan" else 1  # outputs that a plan weighs, residuals and a signal that others keep
    assert max(counts) - min(counts[:-1]) <= most
