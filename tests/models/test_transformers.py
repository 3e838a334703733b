"""Every transformer class of diffusers: without held steps the output is bit-identical, holds replay, undo is exact."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from typer.testing import CliRunner

import holdover
from constant_free import HOLD
from holdover.cli import app
from holdover.engine.verify import ReplayReport
from holdover.support import support_of, supported
from models.support_table import (
    MODELS,
    TABLE,
    build_row,
    check_replay,
    first_tensor,
    run_generation,
    transformer_classes,
)
from snapshots import differences, snapshot
from tiny.models import UNAVAILABLE, with_timestep
from tiny.pipelines import PIPELINES, run

STEPS = 6
WRITES = [name for name in MODELS if name.endswith("[kv]")]
SHIPPED_ROWS = json.loads(TABLE.read_text())["classes"]
HELD = [name for name in MODELS if name not in WRITES]
ONE_BLOCK = ["FluxTransformer2DModel[one_double]"]

pytestmark = pytest.mark.filterwarnings(*(f"ignore::{kind}" for kind in ("FutureWarning", "DeprecationWarning")))


def test_every_class_is_here_or_named_with_the_reason():
    tried = {name.partition("[")[0] for name in MODELS}
    assert set(transformer_classes()) == tried | set(UNAVAILABLE)
    assert len(tried) >= 75


@pytest.mark.parametrize("name", sorted(HELD))
def test_a_generation(name):
    tiny = MODELS[name]
    model = tiny.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plain = run_generation(tiny, model, STEPS)
    changing = find_own_changes(tiny, model)
    before = snapshot(model)
    with holdover.enable(model, "tea_cache", coefficients=[1.0, 0.0], rel_l1_thresh=0.0, signal="input") as cache:
        assert_same(run_generation(tiny, model, STEPS), plain)
        with cache.using(rel_l1_thresh=1e9):
            held = run_generation(tiny, model, STEPS)
            trace = cache.stats().last.trace("cond")
            assert trace[0] == trace[-1] == "C"
            assert trace.count("h") >= STEPS - 3
        assert all(torch.isfinite(output).all() for output in held)
        assert cache.reports()["transformer"].max_error < 1e-5
    with holdover.enable(model, "mag_cache", calibrate=True) as cache:
        assert_same(run_generation(tiny, model, STEPS), plain)
        profile = cache.calibration()
    ratios = profile.ratios("cond")
    settings = {"mag_ratios": ratios, "mag_threshold": 1e9, "mag_max_skip_steps": 2, "mag_retention_ratio": 0.0}
    with holdover.enable(model, "mag_cache", **settings) as cache:
        held = run_generation(tiny, model, STEPS)
        trace = cache.stats().last.trace("cond")
        assert "hh" in trace
        assert "hhh" not in trace
    assert all(torch.isfinite(output).all() for output in held)
    for method in HOLD:
        check_without_constants(tiny, model, plain, method)
    assert set(differences(before, snapshot(model))) <= changing
    assert_same(run_generation(tiny, model, STEPS), plain)


def check_without_constants(tiny, model, plain, method):
    """Computed steps are bit-identical to the plain model, held ones finite, and what is held replays."""
    with holdover.enable(model, method, **HOLD[method]) as cache:
        if method == "first_block" and tiny.name in ONE_BLOCK:
            with pytest.raises(holdover.UnsupportedModelError, match="has a single block"):
                run_generation(tiny, model, STEPS)
            return
        outputs, trace = run_generation(tiny, model, STEPS), cache.stats().last.trace("cond")
        assert cache.reports()["transformer"].max_error < 1e-5
    assert trace.count("h") >= 2
    for kind, output, expected in zip(trace, outputs, plain, strict=True):
        assert torch.isfinite(output).all()
        assert kind == "h" or torch.equal(output, expected)


def find_own_changes(tiny, model):
    """Return what the plain model replaces on itself in every run, such as tables for the last shape."""
    before = snapshot(model)
    run_generation(tiny, model, 2)
    return set(differences(before, snapshot(model)))


def assert_same(outputs, expected):
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("name", sorted(WRITES))
def test_passes_that_write_a_cache_are_never_held(name):
    tiny = MODELS[name]
    model = tiny.build()
    with holdover.enable(model, "mag_cache", mag_ratios=[1.0] * STEPS, mag_retention_ratio=0.0) as cache:
        run_generation(tiny, model, STEPS)
        forwards = cache.stats().last.forwards
    assert all(forward.computed for forward in forwards)
    assert any("writes" in forward.reason for forward in forwards)
    with pytest.raises(holdover.EnableError, match="writes"):
        holdover.check(model, **tiny.inputs())


BATCHED = ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"]


@pytest.mark.parametrize("name", BATCHED)
def test_batches_and_a_resolution_change_between_generations(name):
    tiny = MODELS[name]
    model = tiny.build()
    shapes = [{"batch": 1}, {"batch": 2}, {"batch": 3}, {"batch": 1, "size": 1}, {"batch": 1}]
    plain = [run_generation(tiny, model, 6, **shape) for shape in shapes]
    with holdover.enable(model, "mag_cache", mag_ratios=[1.0] * 6, mag_threshold=0.0) as cache:
        for shape, expected in zip(shapes, plain, strict=True):
            assert_same(run_generation(tiny, model, 6, **shape), expected)
        with cache.using(mag_threshold=1e9, mag_retention_ratio=0.0, mag_max_skip_steps=2):
            held = [run_generation(tiny, model, 6, **shape) for shape in shapes]
            assert [g.trace("cond") for g in cache.stats().generations[-5:]] == ["ChhChh"] * 5
    assert_same(held[0], held[-1])


def test_perturbed_passes_are_branches_of_their_own():
    """A pass with skipped layers (SLG) has the same conditioning, but must not share held residuals."""
    tiny = MODELS["SD3Transformer2DModel[skip_layers]"]
    model = tiny.build()
    inputs = tiny.inputs()
    plain = {key: value for key, value in inputs.items() if key != "skip_layers"}
    with torch.no_grad(), holdover.enable(model, "mag_cache", mag_ratios=[1.0] * 4, num_inference_steps=4) as cache:
        for i in range(4):
            model(**with_timestep(tiny, plain, 1 - i / 4))
            model(**with_timestep(tiny, inputs, 1 - i / 4))
        assert cache.stats().last.branches == ("1", "2")
        assert len(cache._engine.transformers[0].paths) == 2


def test_check_reports_and_leaves_the_model_alone():
    tiny = MODELS["FluxTransformer2DModel[controlnet]"]
    model = tiny.build()
    before = snapshot(model)
    expected = first_tensor(model(**tiny.inputs()))
    report = holdover.check(model, **tiny.inputs())
    assert differences(before, snapshot(model)) == []
    assert torch.equal(first_tensor(model(**tiny.inputs())), expected)
    assert report.ok
    assert report.max_error < 1e-5
    assert {name for name, _ in report.streams} >= {"transformer_blocks.hidden_states"}
    assert "FluxTransformer2DModel replays" in str(report)
    assert len(report.outputs) == 1
    assert report.unread == ("transformer_blocks.encoder_hidden_states",)
    assert "nothing reads it after the blocks: transformer_blocks.encoder_hidden_states" in str(report)


def test_check_takes_a_pipeline_with_one_transformer():
    pipe = PIPELINES["FluxPipeline"].build()
    inputs = captured_inputs(pipe)
    assert holdover.check(pipe, **inputs).ok
    with pytest.raises(holdover.ConfigError, match="hidden_states=..."):
        holdover.check(pipe)
    with pytest.raises(holdover.ConfigError, match="no argument 'hiden_states'. Did you mean 'hidden_states'"):
        holdover.check(pipe, hiden_states=inputs["hidden_states"])
    with pytest.raises(holdover.EnableError, match="transformer or transformer_2"):
        holdover.check(PIPELINES["WanPipeline[2.2]"].build(), **inputs)


def captured_inputs(pipe):
    """Return the arguments of one forward, as the pipeline passes them."""
    seen = []
    hook = pipe.transformer.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    run(pipe, **PIPELINES["FluxPipeline"].call(steps=1))
    hook.remove()
    return seen[0]


def test_check_says_when_a_model_does_not_replay():
    class Forgetful(torch.nn.Module):
        """The model multiplies each block's output by a random number, so no replay is possible."""

        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, hidden_states):
            for block in self.blocks:
                hidden_states = block(hidden_states) * torch.rand(())
            return hidden_states

    report = holdover.check(Forgetful().eval(), hidden_states=torch.randn(1, 3, 4))
    assert not report.ok
    assert "does not replay" in str(report)


def test_shipped_table_has_every_class():
    assert sorted(SHIPPED_ROWS) == sorted(transformer_classes())


@pytest.mark.parametrize("name", SHIPPED_ROWS)
def test_shipped_table_is_not_stale(name):
    """The table shows what the tracer finds; `python tests/models/support_table.py` updates it."""
    assert SHIPPED_ROWS[name] == json.loads(json.dumps(build_row(name)))


def test_at_least_72_of_75_classes_replay():
    assert sum(bool(row.verified) for row in supported()) >= 72
    assert len(supported()) >= 75


def test_one_class_is_explained():
    text = support_of("FluxTransformer2DModel").explain()
    assert "transformer_blocks" in text
    assert "modulated" in text
    with pytest.raises(holdover.HoldoverError, match="FluxTransformer2DModel"):
        support_of("FluxTransformer2DModl")


def test_models_command():
    listed = CliRunner().invoke(app, ["models"])
    assert listed.exit_code == 0
    assert "classes replay exactly" in listed.stdout
    unknown = CliRunner().invoke(app, ["models", "FluxTransformer2DModl"])
    assert unknown.exit_code == 2
    assert "Did you mean 'FluxTransformer2DModel'" in unknown.stderr


def test_replay_of_a_plain_model_is_a_report():
    assert isinstance(check_replay(MODELS["FluxTransformer2DModel"]), ReplayReport)
