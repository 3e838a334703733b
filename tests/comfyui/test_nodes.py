"""The ComfyUI nodes, on a stand-in and, where COMFYUI_PATH names a checkout (and packages), on ComfyUI itself."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_standin import SAMPLERS, StandIn
from real_comfyui import RealComfyUI, load

from holdover.comfyui import NODE_CLASS_MAPPINGS, nodes
from holdover.comfyui.calibration import calibrate
from holdover.comfyui.model_cache import KEY, detach, find_cache
from holdover.errors import ConfigError, HoldoverError, ProfileError
from holdover.profiles import Profile

CACHED = {
    "easy_cache": {"settings": "threshold=0.3, warmup_steps=2"},
    "spectrum": {"settings": "warmup_steps=3"},
    "plan": {"budget": "5", "profile": "none"},
}
NOTHING_HELD = {"none": {}, "easy_cache": {"settings": "threshold=0"}, "plan": {"budget": "1x", "profile": "none"}}
REAL_SAMPLERS = ("euler", "dpmpp_2m", "heun", "res_multistep", "euler_ancestral")


@pytest.fixture(scope="module", params=["stand-in", "ComfyUI"])
def comfy(request: pytest.FixtureRequest) -> Any:
    if request.param == "stand-in":
        return StandIn()
    path = os.environ.get("COMFYUI_PATH")
    if path is None:
        pytest.skip("COMFYUI_PATH does not name a checkout of ComfyUI: only the stand-in is tested")
    load(path)
    return RealComfyUI()


def apply(model: Any, method: str, **inputs: Any) -> Any:
    return nodes.Holdover().apply(model, method, **{"verbose": False, **inputs})[0]


def last(model: Any) -> Any:
    cache = find_cache(model)
    assert cache is not None
    assert cache.last is not None
    return cache.last


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def profile(comfy: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    measured = calibrate(comfy.model(), lambda model, seed: comfy.sample(model, seed), [11, 12], "tiny")
    assert sorted(measured.facts.branches) == ["cond", "uncond"]
    mix = dict(zip(measured.facts.branches, measured.facts.mix, strict=True))
    assert mix == pytest.approx({"cond": 3.0, "uncond": -2.0}, abs=1e-3)
    return str(measured.save(tmp_path_factory.mktemp("profile") / "tiny.safetensors"))


@pytest.mark.parametrize("sampler", REAL_SAMPLERS)
def test_bits_held_steps_and_removal(comfy: Any, sampler: str) -> None:
    if isinstance(comfy, StandIn) and sampler not in SAMPLERS:
        pytest.skip("the stand-in does not have it")
    model = comfy.model()
    plain = comfy.sample(model, sampler=sampler)
    for method, inputs in NOTHING_HELD.items():
        cached = apply(model, method, **inputs)
        assert torch.equal(comfy.sample(cached, sampler=sampler), plain)
        assert last(cached).stats.held_total == 0
    evaluations = 12 + 11 * (sampler == "heun")
    for method, inputs in CACHED.items():
        cached = apply(model, method, **inputs)
        out, stats = comfy.sample(cached, sampler=sampler), last(cached).stats
        assert stats.computed_total + stats.held_total == 2 * evaluations
        assert (stats.held_total > 0) == (not torch.equal(out, plain))
        assert stats.held_total > 0 or (method, sampler) == ("easy_cache", "euler_ancestral")  # its input is new noise
        assert error(out, plain) < 0.35
        assert torch.equal(comfy.sample(cached, sampler=sampler), out)  # no state is left
        assert torch.equal(comfy.sample(detach(cached), sampler=sampler), plain)
    assert torch.equal(comfy.sample(model, sampler=sampler), plain)
    assert find_cache(model) is None


def test_a_measured_plan_is_better_than_one_without_measurements(comfy: Any, profile: str) -> None:
    model = comfy.model()
    plain = comfy.sample(model)
    measured, unmeasured = (apply(model, "plan", budget="5", profile=name) for name in (profile, "none"))
    errors = [error(comfy.sample(cached), plain) for cached in (measured, unmeasured)]
    assert [last(cached).stats.computed_total for cached in (measured, unmeasured)] == [10, 10]
    assert errors[0] < errors[1]
    alone = comfy.sample(measured, cfg=1.0)  # one branch of the two that were measured
    assert set(last(measured).stats.branches) == {"cond"}
    assert error(alone, comfy.sample(model, cfg=1.0)) < 0.2
    held = apply(model, "mag_cache", profile=profile)
    comfy.sample(held)
    assert last(held).stats.held_total > 0
    assert torch.equal(comfy.sample(apply(model, "mag_cache", profile=profile, settings="mag_threshold=0")), plain)
    noisy = comfy.sample(held, sampler="euler_ancestral")
    assert torch.equal(noisy, comfy.sample(model, sampler="euler_ancestral"))
    assert "the sampler euler_ancestral adds noise at each step, and mag_cache" in nodes.summarize(held)
    comfy.sample(measured, sampler="euler_ancestral")
    assert "which held steps do not know of" in nodes.summarize(measured)


def test_low_vram(comfy: Any) -> None:
    """Weights that stay on the host are cast for each forward; held steps cast none."""
    if isinstance(comfy, StandIn):
        pytest.skip("the stand-in has no memory management")
    model = comfy.model()
    plain = comfy.sample(model)
    with comfy.low_vram():
        assert torch.equal(comfy.sample(apply(comfy.model(), "none")), plain)
        cached = apply(comfy.model(), "spectrum")
        held = comfy.sample(cached)
        assert cached.model.model_lowvram
    assert last(cached).stats.held_total > 0
    assert torch.equal(comfy.sample(apply(model, "spectrum")), held)


@pytest.mark.parametrize("method", CACHED)
def test_one_batch_or_two_and_held_forwards_do_not_run(comfy: Any, method: str) -> None:
    model = comfy.model()
    cached = apply(model, method, **CACHED[method])
    outputs, ran = [], []
    for together in (True, False):
        calls: list[None] = []
        hook = comfy.inner(model).register_forward_hook(lambda *_, calls=calls: calls.append(None))
        outputs.append(comfy.sample(cached, together=together))
        hook.remove()
        ran.append((len(calls), last(cached).skipped, last(cached).stats.computed_total))
    assert ran[0][0] + ran[0][1] == 12
    assert ran[1][0] + ran[1][1] == 24
    assert ran[1][0] == ran[1][2]
    assert error(outputs[0], outputs[1]) < 0.05


def test_an_interrupt_frees_the_state(comfy: Any) -> None:
    model = comfy.model()
    cached = apply(model, "spectrum", settings="warmup_steps=2")
    expected = comfy.sample(cached)
    calls: list[None] = []

    def interrupt(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt

    hook = comfy.inner(model).register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        comfy.sample(cached)
    hook.remove()
    stopped = last(cached)
    assert not stopped.stats.finished
    assert (stopped.branches, stopped.guider, stopped.sampler) == ({}, None, None)
    assert torch.equal(comfy.sample(cached), expected)
    assert last(cached).stats.finished
    assert last(cached).branches == {}


def test_two_models_and_other_batch_sizes_do_not_meet(comfy: Any) -> None:
    first, second = comfy.model(0), comfy.model(1)
    one, two = apply(first, "plan", budget="5", profile="none"), apply(second, "easy_cache", **CACHED["easy_cache"])
    alone = comfy.sample(one), comfy.sample(two)
    assert comfy.sample(one, batch=3).shape[0] == 3
    assert last(one).stats.held_total > 0
    assert torch.equal(comfy.sample(two), alone[1])
    assert torch.equal(comfy.sample(one), alone[0])
    replaced = apply(one, "none")  # a second node takes the place of the first
    assert torch.equal(comfy.sample(replaced), comfy.sample(first))
    assert torch.equal(comfy.sample(one), alone[0])


def test_start_and_end_percent(comfy: Any) -> None:
    model = comfy.model()
    cached = apply(model, "plan", budget="5", profile="none", start_percent=0.3, end_percent=0.8)
    comfy.sample(cached)
    steps = [forward.step for forward in last(cached).stats.forwards if not forward.computed]
    levels = [last(cached).evaluations.sigmas[step] for step in steps]
    assert levels
    percents = [model.model.model_sampling.percent_to_sigma(percent) for percent in (0.3, 0.8)]
    assert percents[1] <= min(levels) <= max(levels) <= percents[0]
    cached = apply(model, "plan", budget="5", profile="none", start_percent=0.999)
    assert torch.equal(comfy.sample(cached), comfy.sample(model))
    assert "no step lies between" in nodes.summarize(cached)


def test_summaries(comfy: Any) -> None:
    model = comfy.model()
    assert nodes.summarize(model) == "holdover: not on this model"
    cached, text = nodes.Holdover().apply(model, "spectrum")
    assert text.startswith("holdover: spectrum")
    assert nodes.summarize(cached) == "holdover: no generation has run with this model"
    latent = {"samples": comfy.sample(cached)}
    passed, text = nodes.HoldoverSummary().report(cached, latent)
    assert passed is latent
    for words in ("spectrum, 12 steps", "cond ", "uncond ", "computed", "forwards of the model did not run"):
        assert words in text
    longer = {"samples": comfy.sample(cached, steps=16)}
    assert nodes.HoldoverSummary().report(cached, latent)[1] == text
    assert "spectrum, 16 steps" in nodes.HoldoverSummary().report(cached, longer)[1]
    assert "no recent generation" in nodes.summarize(cached, torch.zeros(1, 4))
    comfy.sample(cached)
    strip = nodes.draw_strip(last(cached).stats)
    assert strip.shape == (1, 30, 170, 3)
    assert len(strip.reshape(-1, 3).unique(dim=0)) == 3


class Vae:
    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return (latent[:, :3] * 0.1 + 0.5).movedim(1, -1)


def test_calibrate_and_compare_nodes(comfy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sampler is ComfyUI's own, so on the stand-in it is replaced."""
    model, vae, inputs = comfy.model(), Vae(), {"latent_image": {"samples": torch.zeros(1, 16, 8, 8)}}
    monkeypatch.setattr(nodes, "profile_folder", lambda: tmp_path)
    if isinstance(comfy, StandIn):
        monkeypatch.setattr(nodes, "run_sampler", lambda model, seed, **_: comfy.sample(model, seed))
        monkeypatch.setattr(nodes, "_comfyui_version", lambda: "stand-in")
    else:
        from real_comfyui import condition

        conditions = {"positive": condition(1), "negative": condition(2)}
        inputs |= {**conditions, "steps": 12, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
        for node in NODE_CLASS_MAPPINGS.values():
            assert "model" in node.INPUT_TYPES()["required"]
    with torch.inference_mode():
        (file,) = nodes.HoldoverCalibrate().measure(model, "tiny", 2, 7, vae=vae, **inputs)
        assert Path(file) == tmp_path / "tiny.safetensors"
        assert Profile.load(file).facts.psnr_offset is not None
        cached = apply(model, "plan", quality="psnr>=45", profile="tiny")
        both, strip, quality, text = nodes.HoldoverCompare().compare(cached, vae, 3, **inputs)
        assert both.shape[2] == 2 * both.shape[1]
        assert strip.shape[0] == 1
        assert quality > 40
        assert f"{quality:.1f} dB" in text
        assert last(cached).stats.held_total > 0
        planned = {}
        for name in ("high", "psnr>=40", "draft"):
            cached = apply(model, "plan", quality=name, profile="tiny")
            comfy.sample(cached)
            planned[name] = last(cached).stats.trace("cond"), nodes.summarize(cached)
        assert planned["high"][0] == planned["psnr>=40"][0] != planned["draft"][0]
        assert "quality high is psnr>=40: expected, not certified)" in planned["high"][1]  # there is no holdover.tune
        with pytest.raises(ConfigError, match="no cache on this model"):
            nodes.HoldoverCompare().compare(model, vae, 3, **inputs)
        seeds = nodes.HoldoverCalibrate.INPUT_TYPES if not isinstance(comfy, StandIn) else None
        assert seeds is None or seeds()["required"]["seed"][1]["control_after_generate"] is False
        nodes.HoldoverCalibrate().measure(model, "largest", 2, 2**64 - 1, **inputs)
        with pytest.raises(ConfigError, match="plain name"):
            nodes.HoldoverCalibrate().measure(model, "../tiny", 2, 7, vae=vae, **inputs)


@pytest.mark.parametrize(
    ("inputs", "kind", "words"),
    [
        ({"method": "easy_cache", "budget": "8"}, ConfigError, "budget is a setting of plan"),
        ({"method": "spectrum", "profile": "x"}, ConfigError, "spectrum uses no profile"),
        ({"method": "easy_cache", "settings": "threshold"}, ConfigError, "Settings look like"),
        ({"method": "easy_cache", "settings": "treshold=1"}, ConfigError, "threshold"),
        ({"method": "plan", "settings": "quantity=seam", "profile": "none"}, ConfigError, "quantity has no effect"),
        ({"method": "mag_cache", "settings": "hold_in=cpu"}, ConfigError, "hold_in has no effect"),
        ({"method": "mag_cache", "settings": "num_inference_steps=50"}, ConfigError, "steps has no effect"),
        ({"method": "plan", "budget": "5", "settings": "budget=6"}, ConfigError, "budget is given twice: 6 and 5"),
        ({"method": "plan", "budget": "²", "profile": "none"}, ConfigError, "budget"),
        ({"method": "plan", "quality": "40", "profile": "none"}, ConfigError, "A target looks like"),
        ({"method": "plan", "settings": "predictor=least_squares", "profile": "none"}, ConfigError, "least_squares n"),
        ({"method": "plan", "profile": "nosuch"}, ProfileError, "profile 'nosuch'. .* has tiny; Holdover Calibrate"),
        ({"method": "plan", "profile": "x" * 5000}, ProfileError, "There is no profile 'xxx"),
        ({"method": "mag_cache"}, ProfileError, "Holdover Calibrate"),
        ({"method": "plan"}, ProfileError, "Holdover Calibrate"),
        ({"method": "plan", "quality": "psnr>=40", "profile": "none"}, ConfigError, "A quality needs a profile"),
        ({"method": "plan", "quality": "high", "profile": "none"}, ConfigError, "A quality needs a profile"),
        ({"method": "plan", "quality": "hihg"}, ConfigError, "Did you mean 'high'"),
        ({"method": "plan", "quality": "psnr=40"}, ConfigError, "A target looks like"),
        ({"method": "easy_cache", "quality": "high"}, ConfigError, "quality is a setting of plan"),
        ({"method": "tea_cache", "settings": "rel_l1_thresh=0.2"}, ConfigError, "not available in ComfyUI"),
        ({"method": "none", "start_percent": 0.8, "end_percent": 0.2}, ConfigError, "must be less than"),
    ],
)
def test_errors_say_what_to_do(
    inputs: dict[str, Any], kind: type[HoldoverError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.safetensors").touch()
    monkeypatch.setattr(nodes, "profile_folder", lambda: tmp_path)
    with pytest.raises(kind, match=words):
        apply(StandIn().model(), **inputs)


def test_what_cannot_be_followed_is_computed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    comfy = StandIn()
    model = comfy.model()
    cached = apply(model, "spectrum")
    assert torch.equal(comfy.sample(cached, sampler="unlisted"), comfy.sample(model, sampler="unlisted"))
    assert "the sampler unlisted is not linear in the model's outputs" in caplog.text
    sample: Callable[..., Any] = lambda model, seed: comfy.sample(model, seed, sampler="unlisted")  # noqa: E731
    with pytest.raises(HoldoverError, match="cannot be measured: .*not linear"):
        calibrate(model, sample, [0], "tiny")
    with pytest.raises(ConfigError, match="at least one seed"):
        calibrate(model, sample, [], "tiny")
    assert KEY not in str(model.wrappers)
    windows = model.clone()
    windows.model_options["context_handler"] = object()
    cached = apply(windows, "spectrum")
    assert torch.equal(comfy.sample(cached), comfy.sample(model))
    assert "context windows" in nodes.summarize(cached)
    unwrapped = comfy.model()
    unwrapped.model.diffusion_model.forward = unwrapped.model.diffusion_model.run
    cached = apply(unwrapped, "spectrum")
    assert torch.equal(comfy.sample(cached), comfy.sample(model))
    assert "does not call ComfyUI's diffusion_model wrappers" in nodes.summarize(cached)


def test_conditionings_that_another_node_runs_one_by_one_are_computed() -> None:
    comfy = StandIn()
    model = comfy.model()
    model.model_options["one_by_one"] = True
    plain = comfy.sample(model)
    for method, inputs in {**CACHED, "none": {}}.items():
        cached = apply(model, method, **inputs)
        assert torch.equal(comfy.sample(cached), plain)
        assert "another node runs the conditionings of a batch one by one" in nodes.summarize(cached)


def test_a_sampler_that_uses_the_output_without_guidance_is_not_held() -> None:
    comfy = StandIn()
    model = comfy.model()
    cached = apply(model, "spectrum")
    assert torch.equal(comfy.sample(cached, sampler="euler_cfg_pp"), comfy.sample(model, sampler="euler_cfg_pp"))
    assert "without guidance on its own" in nodes.summarize(cached)


def test_a_flow_whose_highest_noise_level_is_rounded_up() -> None:
    """ComfyUI's shifted flows have a sigma_max of 1 or one rounding above it."""
    comfy, traces = StandIn(), []
    for highest in (1.0, 1.0 + 2**-23):
        cached = apply(comfy.model(sigma_max=highest), "plan", budget="5", profile="none")
        comfy.sample(cached)
        traces.append(last(cached).stats.trace("cond"))
        assert last(cached).spec.noise[0] == pytest.approx(1.0)
    assert traces[0] == traces[1]
    assert traces[0].count("C") == 5


@pytest.mark.parametrize("method", CACHED)
def test_a_compiled_forward_has_no_graphs_of_the_wrappers(method: str) -> None:
    """ComfyUI's TorchCompileModel compiles what calls them."""
    comfy, compiled, graphs = StandIn(), StandIn().model(), []
    cached = apply(comfy.model(), method, **CACHED[method])
    plain = comfy.sample(cached)
    compiled.model.diffusion_model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    again = apply(compiled, method, **CACHED[method])
    assert error(comfy.sample(again), plain) < 1e-4
    assert last(again).stats.trace("cond") == last(cached).stats.trace("cond")
    assert len(graphs) <= 2  # of one shape, and of any
    torch._dynamo.reset()


def test_a_profile_is_of_the_model_inside_torch_compile_and_of_weights_that_can_be_read(tmp_path: Path) -> None:
    comfy = StandIn()
    model = comfy.model()
    model.model.diffusion_model = torch.compile(model.model.diffusion_model, backend="eager")
    measured = calibrate(model, lambda model, seed: comfy.sample(model, seed), [11], "tiny")
    assert dict(measured.facts.models)[KEY].transformer_class == "TinyModel"
    profile = str(measured.save(tmp_path / "tiny.safetensors"))
    for own in (model, comfy.model()):
        cached = apply(own, "plan", budget="5", profile=profile)
        comfy.sample(cached)
        assert last(cached).stats.held_total > 0
        assert "other weights" not in nodes.summarize(cached)
    other = comfy.model(seed=1)
    cached = apply(other, "plan", budget="5", profile=profile)
    comfy.sample(cached)
    assert "was measured on other weights" in nodes.summarize(cached)
    other.model.model_lowvram = True  # LoRAs are added when a weight is cast: nothing of them is in the parameters
    cached.patches = {"weight": []}
    comfy.sample(cached)
    assert "in low-VRAM mode it is not known" in nodes.summarize(cached)
    assert "other weights" not in nodes.summarize(cached)
    with pytest.raises(ConfigError, match="was measured without a VAE"):
        apply(model, "plan", quality="high", profile=profile)
    known = str(measured.with_facts(psnr_offset=10.0).save(tmp_path / "known.safetensors"))
    with pytest.raises(ConfigError, match="a quality here is a PSNR"):
        apply(model, "plan", quality="ssim>=0.9", profile=known)
    with pytest.raises(ConfigError, match="of all steps"):
        apply(model, "plan", quality="high", profile=known, end_percent=0.8)
    before = nodes.Holdover.IS_CHANGED(profile=profile, method="plan")
    measured.with_facts(name="another").save(profile)
    assert nodes.Holdover.IS_CHANGED(profile=profile, method="plan") != before
    assert nodes.Holdover.IS_CHANGED(profile=None) == nodes.Holdover.IS_CHANGED(profile="none") == ""


def test_a_schedule_is_typed_with_spaces() -> None:
    comfy = StandIn()
    cached = apply(comfy.model(), "plan", profile="none", settings="schedule=0 1 5 9, predictor=newton")
    comfy.sample(cached)
    assert last(cached).stats.trace("cond") == "CChhhChhhChh"


def test_a_model_that_predicts_the_noise(tmp_path: Path) -> None:
    """Its noise levels are far above 1, and what easy_cache holds is no difference of alike quantities there."""
    comfy = StandIn()
    model = comfy.model(sigma_max=14.0)
    plain = comfy.sample(model)
    measured = calibrate(model, lambda model, seed: comfy.sample(model, seed), [11, 12], "tiny")
    profile = str(measured.save(tmp_path / "tiny.safetensors"))
    for method, inputs in {**CACHED, "plan": {"budget": "5", "profile": profile}}.items():
        cached = apply(model, method, **inputs)
        assert error(comfy.sample(cached), plain) < 0.35
        assert (last(cached).stats.held_total > 0) == (method != "easy_cache")
        assert ("this model predicts the noise" in nodes.summarize(cached)) == (method == "easy_cache")
    for method, inputs in NOTHING_HELD.items():
        assert torch.equal(comfy.sample(apply(model, method, **inputs)), plain)


def test_the_folder_for_custom_nodes_and_its_workflows() -> None:
    folder, found = Path(__file__).parents[2] / "comfyui", set()
    pack = runpy.run_path(str(folder / "__init__.py"))
    assert pack["NODE_CLASS_MAPPINGS"] is NODE_CLASS_MAPPINGS
    assert set(NODE_CLASS_MAPPINGS) == set(pack["NODE_DISPLAY_NAME_MAPPINGS"])
    for path in (folder / "workflows").glob("*.json"):
        workflow = json.loads(path.read_text("utf-8"))
        for node in workflow.values():
            assert all(source[0] in workflow for source in node["inputs"].values() if isinstance(source, list))
            own = NODE_CLASS_MAPPINGS.get(node["class_type"])
            if own is nodes.Holdover:
                assert set(node["inputs"]) <= {name for group in own.INPUT_TYPES().values() for name in group}
            found.add(node["class_type"])
    assert set(NODE_CLASS_MAPPINGS) <= found
