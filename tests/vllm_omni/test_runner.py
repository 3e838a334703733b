"""Requests drawn by the runner: the plain picture where nothing is held, holdover's own where steps are."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from omni_pipelines import DiffusersInside, Loop

import holdover
from holdover.errors import UnsupportedModelError
from tiny.pipelines import run

STEPS = 12
RATIOS = [1.01] * STEPS
MAG = {"mag_ratios": RATIOS, "mag_threshold": 0.5, "mag_max_skip_steps": 2}
HOLDING = {
    "holdover_plan": {"budget": 5},
    "holdover_tea_cache": {"rel_l1_thresh": 0.6, "coefficients": [1.0, 0.0]},
    "holdover_mag_cache": MAG,
    "holdover_cache_dit": {"residual_diff_threshold": 5.0, "max_warmup_steps": 2},
}
NOTHING = {
    "holdover_plan": {"schedule": list(range(STEPS))},
    "holdover_tea_cache": {"rel_l1_thresh": 0.0},
    "holdover_mag_cache": {"mag_ratios": RATIOS, "mag_threshold": 0.0},
    "holdover_cache_dit": {"residual_diff_threshold": 0.0},
}
NAMES = ["FluxPipeline", "QwenImagePipeline", "WanPipeline[2.2]"]


def drawn(omni, pipeline, backend, config, *requests):
    runner = omni.runner(pipeline, backend, config)
    pictures = [runner.execute_model(request) for request in requests]
    return pictures, runner.cache_backend


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", NOTHING)
def test_with_nothing_held_the_picture_is_the_plain_one(omni, name, backend):
    (plain,), _ = drawn(omni, DiffusersInside(name), "none", {}, omni.request(STEPS, steps=STEPS))
    (cached,), cache = drawn(omni, DiffusersInside(name), backend, NOTHING[backend], omni.request(STEPS, steps=STEPS))
    assert cache.stats().held == 0
    assert cache.stats().computed >= STEPS
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("announced", [STEPS, None])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", HOLDING)
def test_with_steps_held_the_picture_is_that_of_holdover_alone(omni, name, backend, announced):
    alone = DiffusersInside(name)
    with holdover.enable(alone.pipe, backend.removeprefix("holdover_"), **HOLDING[backend]) as cache:
        expected = run(alone.pipe, **alone.tiny.call(steps=STEPS))
        held = cache.stats().held
    (picture,), cache = drawn(
        omni, DiffusersInside(name), backend, HOLDING[backend], omni.request(announced, steps=STEPS)
    )
    assert cache.stats().held == held > 0
    assert torch.equal(picture, expected)


@pytest.mark.parametrize("announce", [True, False])
@pytest.mark.parametrize("backend", ["holdover_plan", "holdover_mag_cache"])
def test_requests_of_different_step_counts_are_each_drawn_as_if_alone(omni, backend, announce):
    counts, config = (8, 12, 1, 8), {"holdover_plan": {"budget": "2x"}, "holdover_mag_cache": MAG}[backend]
    requests = [omni.request(n if announce else None, steps=n, seed=i) for i, n in enumerate(counts)]
    pictures, cache = drawn(omni, DiffusersInside("FluxPipeline"), backend, config, *requests)
    assert [g.steps for g in cache.stats().generations] == list(counts)
    for request, picture in zip(requests, pictures, strict=True):
        (alone,), _ = drawn(omni, DiffusersInside("FluxPipeline"), backend, config, request)
        assert torch.equal(picture, alone)


def test_a_step_count_announced_for_one_request_does_not_outlive_it(omni):
    runner = omni.runner(Loop(), "holdover_mag_cache", MAG)
    seen = []
    for announced, steps in ((8, 8), (None, 6), (12, 12), (None, 6)):
        runner.execute_model(omni.request(announced, steps=steps))
        seen.append(runner.cache_backend.stats().last.steps)
    assert seen[0::2] == [8, 12]
    assert seen[1] == seen[3]


def test_requests_of_a_loop_without_a_scheduler_do_not_run_into_each_other(omni):
    """Two requests whose timesteps would pass for one falling loop."""
    request = omni.request(steps=1), omni.request(steps=6, seed=1)
    pictures, cache = drawn(omni, Loop(), "holdover_mag_cache", MAG, *request)
    assert cache.stats().count == 2
    (alone,), _ = drawn(omni, Loop(), "holdover_mag_cache", MAG, request[1])
    assert torch.equal(pictures[1], alone)


def test_a_request_may_bring_settings_or_want_no_cache(omni):
    asked = {"budget": 3}, "off", None, {"budget": None, "schedule": list(range(STEPS))}
    runner = omni.runner(DiffusersInside("FluxPipeline"), "holdover_plan", {"budget": 6})
    computed = []
    for wish in asked:
        extra = {} if wish is None else {"holdover": wish}
        picture = runner.execute_model(omni.request(STEPS, extra, steps=STEPS))
        computed.append(runner.cache_backend.stats().last.computed_total)
    assert computed == [3, STEPS, 6, STEPS]
    plain = omni.runner(DiffusersInside("FluxPipeline")).execute_model(omni.request(STEPS, steps=STEPS))
    assert torch.equal(picture, plain)


def test_requests_drawn_together_that_want_different_settings_hold_nothing(omni):
    runner = omni.runner(DiffusersInside("FluxPipeline"), "holdover_plan", {"budget": 6})
    runner.execute_model(omni.request(STEPS, {"holdover": {"budget": 3}}, steps=STEPS), omni.request(STEPS))
    assert runner.cache_backend.stats().last.held_total == 0


def test_an_unknown_setting_of_a_request_fails_that_request_alone(omni):
    runner = omni.runner(DiffusersInside("FluxPipeline"), "holdover_plan", {"budget": 6})
    with pytest.raises(holdover.ConfigError, match="Did you mean 'budget'"):
        runner.execute_model(omni.request(STEPS, {"holdover": {"buget": 3}}, steps=STEPS))
    runner.execute_model(omni.request(STEPS, steps=STEPS))
    assert runner.cache_backend.stats().last.computed_total == 6


def test_a_step_count_announced_for_a_refused_request_is_forgotten_with_it(omni):
    runner = omni.runner(Loop(), "holdover_mag_cache", MAG)
    runner.execute_model(omni.request(steps=6))
    unknown = runner.cache_backend.stats().last.steps
    with pytest.raises(holdover.ConfigError):
        runner.execute_model(omni.request(9, {"holdover": {"mag_treshold": 1}}))
    runner.execute_model(omni.request(steps=6))
    assert runner.cache_backend.stats().last.steps == unknown != 9


def test_an_unknown_key_stops_the_worker_from_starting(omni):
    with pytest.raises(holdover.ConfigError, match="Did you mean 'budget'"):
        omni.runner(DiffusersInside("FluxPipeline"), "holdover_plan", '{"buget": 3}')


def test_after_a_request_that_failed_half_way_the_next_is_exact(omni):
    runner = omni.runner(Loop(), "holdover_mag_cache", MAG)
    expected = omni.runner(Loop(), "holdover_mag_cache", MAG).execute_model(omni.request(8, seed=1))
    calls = []

    def stop(module, inputs):
        calls.append(module)
        if len(calls) == 6:
            raise KeyboardInterrupt

    hook = runner.pipeline.transformer.x_embedder.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        runner.execute_model(omni.request(8))
    hook.remove()
    assert torch.equal(runner.execute_model(omni.request(8, seed=1)), expected)


def live_bytes() -> int:
    """The bytes of all tensors that Python can reach."""
    gc.collect()
    return sum(found.nbytes for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter))


def test_between_requests_nothing_is_held(omni):
    runner = omni.runner(Loop(), "holdover_mag_cache", MAG)
    before = live_bytes()
    runner.execute_model(omni.request(steps=7))
    assert runner.cache_backend.stats().last.peak_bytes > 0
    assert live_bytes() == before


@pytest.mark.parametrize("own", [False, True])
def test_disable_gives_back_the_pipeline_as_it_was(omni, own):
    """Also where vLLM-Omni's profiler has put a forward of its own on the instance."""
    pipeline = Loop()
    if own:
        pipeline.forward = pipeline.forward
    before = dict(vars(pipeline)), type(pipeline), type(pipeline.transformer), vars(pipeline).get("forward")
    runner = omni.runner(pipeline, "holdover_mag_cache", MAG)
    runner.execute_model(omni.request(6))
    runner.cache_backend.disable()
    assert (dict(vars(pipeline)), type(pipeline), type(pipeline.transformer), vars(pipeline).get("forward")) == before
    assert not runner.cache_backend.is_enabled()
    plain = omni.runner(Loop()).execute_model(omni.request(6))
    assert torch.equal(runner.execute_model(omni.request(6)), plain)


def test_a_worker_says_what_it_held(omni, caplog):
    with caplog.at_level(logging.INFO, "holdover.vllm_omni"):
        runner = omni.runner(Loop(), "holdover_plan", {"budget": 3})
        runner.execute_model(omni.request(8))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "holdover_plan is enabled on the transformer of Loop",
        "holdover_plan: 3 forwards computed, 5 held",
    ]


# What would be inactive without a word is an error.


class Direct(Loop):
    """Calls its transformer's forward instead of the transformer."""

    def ran(self, **inputs):
        return self.transformer.forward(**inputs)


class Restless(Loop):
    """Its conditioning is another at every step."""

    def branch(self, latents, level, index):
        self.prompts = [torch.randn(1, 8, 16)]
        return super().branch(latents, level, index)


class Nameless(torch.nn.Module):
    """Has nothing that looks like a transformer."""


def test_a_pipeline_that_goes_past_the_cache_is_an_error(omni):
    runner = omni.runner(Direct(), "holdover_mag_cache", MAG)
    with pytest.raises(UnsupportedModelError, match="Direct ran without one forward of its transformer"):
        runner.execute_model(omni.request(6))


def test_a_transformer_in_training_mode_is_an_error(omni):
    pipeline = Loop()
    pipeline.transformer.train()
    runner = omni.runner(pipeline, "holdover_mag_cache", MAG)
    with pytest.warns(holdover.HoldoverWarning, match="training mode"):
        with pytest.raises(UnsupportedModelError, match="in training mode"):
            runner.execute_model(omni.request(6))


def test_a_pipeline_in_which_nothing_can_be_held_is_an_error(omni):
    runner = omni.runner(Restless(), "holdover_mag_cache", MAG)
    with pytest.warns(holdover.HoldoverWarning, match="Nothing could be held"):
        with pytest.raises(UnsupportedModelError, match="conditioning changes at every step"):
            runner.execute_model(omni.request(6))


def test_a_pipeline_without_transformers_is_refused(omni):
    with pytest.raises(holdover.EnableError, match="Nameless has none of transformer, transformer_2"):
        omni.runner(Nameless(), "holdover_plan", {})


def test_a_cache_is_refreshed_only_for_its_own_pipeline(omni):
    backend = omni.runner(Loop(), "holdover_plan", {}).cache_backend
    with pytest.raises(holdover.NotEnabledError, match="not on that Loop"):
        backend.refresh(Loop(), 5)
