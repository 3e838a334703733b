"""The cache-dit backend: schedules for any number of steps, branches, limits, enabling and disabling."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
import weakref

import cache_dit
import pytest
import torch
from cache_dit.caching import BlockAdapterRegister

import holdover
from holdover.base import DiffusionCacheConfig
from holdover.cache_dit_backend import CacheDiTBackend, CacheDiTConfig
from holdover.cache_dit_backend.config import quiet_library, steps_mask
from holdover.cache_dit_backend.contexts import BranchContexts, StepContextManager, last_refresh
from holdover.models.inputs import iter_tensors
from holdover.stats import Stats
from snapshots import denoiser, differences, snapshot
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

MUCH = {"residual_diff_threshold": 1.0, "max_warmup_steps": 1, "max_continuous_cached_steps": 2}
STATIC = {"scm_steps_mask_policy": "fast", "scm_steps_policy": "static"}
FLUX = "FluxTransformer2DModel"


def first(output):
    return next(iter_tensors(output))


def masked(steps: int) -> str:
    return "".join("hC"[m] for m in cache_dit.steps_mask(mask_policy="fast", total_steps=steps))


def loop(model, steps: int = 8, **of) -> list[torch.Tensor]:
    """A denoising loop of a bare transformer; the latent moves a little."""
    tiny = MODELS[type(model).__name__]
    inputs = tiny.inputs(**of)
    with torch.no_grad():
        return [
            first(
                model(
                    **with_timestep(tiny, {**inputs, tiny.latent: inputs[tiny.latent] * (1 - 0.02 * i)}, 1 - i / steps)
                )
            )
            for i in range(steps)
        ]


# Nothing held


@pytest.mark.parametrize(
    "name", ["FluxPipeline", "QwenImagePipeline", "WanPipeline", "WanPipeline[2.2]", "SanaPipeline"]
)
@pytest.mark.parametrize("blocks", [(1, 0), (1, 1), (2, 1)])
def test_threshold_zero_is_the_plain_pipeline(name: str, blocks: tuple[int, int]) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=6))
    first_blocks, last_blocks = blocks
    settings = {"Fn_compute_blocks": first_blocks, "Bn_compute_blocks": last_blocks, "max_warmup_steps": 1}
    with holdover.enable(pipe, "cache_dit", residual_diff_threshold=0.0, **settings) as cache:
        assert torch.equal(run(pipe, **tiny.call(steps=6)), plain)
        assert cache.stats().held == 0
        reasons = {forward.reason for forward in cache.stats().last.forwards}
    assert "threshold is 0" in reasons


# The schedule


def test_each_request_has_the_mask_of_its_own_number_of_steps() -> None:
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", **STATIC) as cache:
        for steps in (12, 12, 28, 8, 12, 50):
            run(pipe, **tiny.call(steps=steps))
            assert cache.stats().last.trace("cond") == masked(steps)


def test_refresh_tells_a_bare_transformer_the_number_of_steps() -> None:
    model = MODELS[FLUX].build()
    with holdover.enable(model, "cache_dit", **STATIC) as cache:
        for steps in (8, 12, 8):
            cache.refresh(model, steps)
            loop(model, steps)
            assert cache.stats().last.trace("1") == masked(steps)


def test_a_mask_needs_a_number_of_steps() -> None:
    model = MODELS[FLUX].build()
    with holdover.enable(model, "cache_dit", **STATIC):
        with pytest.raises(holdover.ConfigError, match="needs the number of steps"):
            loop(model)
    with holdover.enable(model, "cache_dit", **STATIC, num_inference_steps=8) as cache:
        loop(model)
        assert cache.stats().last.trace("1") == masked(8)


def test_without_a_mask_for_the_steps_the_threshold_decides_alone() -> None:
    """Of a pipeline, and of an expert that runs only some of the steps."""
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", **STATIC, **MUCH) as cache:
        with pytest.warns(holdover.HoldoverWarning, match="no mask for the 7 steps, only for 4, 6, and 8 or more"):
            run(pipe, **tiny.call(steps=7))
        run(pipe, **tiny.call(steps=7))  # said once
        assert [g.trace("cond") for g in cache.stats().generations] == ["ChhChhC"] * 2
    assert steps_mask("fast", 7) is None


@pytest.mark.parametrize("policy", ["slow", "medium", "fast", "ultra"])
def test_masks_have_exactly_the_steps_asked_for(policy: str) -> None:
    for steps in (4, 6, *range(8, 101)):
        mask = steps_mask(policy, steps)
        assert len(mask) == steps
        assert mask[0] == mask[-1] == 1


def test_fewer_blocks_than_are_always_run() -> None:
    model = MODELS[FLUX].build()
    before = snapshot(model)
    with pytest.raises(holdover.ConfigError, match=r"transformer_blocks has 6 blocks.*not 4 \+ 3"):
        holdover.enable(model, "cache_dit", Fn_compute_blocks=4, Bn_compute_blocks=3)
    assert differences(before, snapshot(model)) == []
    with holdover.enable(model, "cache_dit", **MUCH, Fn_compute_blocks=4, Bn_compute_blocks=2) as cache:
        plain = loop(MODELS[FLUX].build())
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(loop(model), plain, strict=True))
        assert cache.stats().held == 5
        with pytest.raises(holdover.ConfigError, match="at most 6, not 7"), cache.using(Fn_compute_blocks=7):
            pass


@pytest.mark.parametrize(
    ("settings", "trace"),
    [
        ({}, "CChhhChh"),
        ({"max_continuous_cached_steps": 1}, "CChChChC"),
        ({"max_continuous_cached_steps": -1}, "CChhhhhh"),
        ({"max_cached_steps": 2}, "CChhCCCC"),
        ({"max_warmup_steps": 5}, "CCCCChhh"),
        ({"max_warmup_steps": 0}, "ChhhChhh"),
        ({"residual_diff_threshold": 1e-6}, "CCCCCCCC"),
        ({"force_refresh_step_hint": 3}, "CChCChhh"),
        ({"force_refresh_step_hint": 3, "force_refresh_step_policy": "repeat"}, "CChCChCC"),
        ({"force_refresh_step_hint": 0, "force_refresh_step_policy": "repeat"}, "CChhhChh"),
    ],
)
def test_every_setting_reaches_the_schedule(settings: dict, trace: str) -> None:
    model = MODELS[FLUX].build()
    with holdover.enable(
        model, "cache_dit", **{"residual_diff_threshold": 1.0, "max_warmup_steps": 2, **settings}
    ) as cache:
        loop(model)
        assert cache.stats().last.trace("1") == trace


def test_at_which_step_the_contexts_last_started_over() -> None:
    assert [last_refresh(step, None, False) for step in range(5)] == [0] * 5
    assert [last_refresh(step, 2, False) for step in range(5)] == [0, 0, 2, 2, 2]
    assert [last_refresh(step, 2, True) for step in range(5)] == [0, 0, 2, 2, 4]


def test_taylorseer_extrapolates_over_steps_a_branch_was_not_run_at() -> None:
    """A guidance interval leaves steps out; the extrapolation is to the step that runs, not to the next in line."""
    tiny = MODELS[FLUX]
    inputs = tiny.inputs()
    settings = {"residual_diff_threshold": 1.0, "max_warmup_steps": 3, "enable_taylorseer": True}

    def outputs(steps) -> dict[int, torch.Tensor]:
        model = tiny.build()
        with torch.no_grad(), holdover.enable(model, "cache_dit", **settings, max_continuous_cached_steps=-1):
            found = {}
            for step in steps:
                moved = {**inputs, tiny.latent: inputs[tiny.latent] * (1 - 0.05 * step)}
                with model.cache_context("cond", step_index=step):
                    found[step] = first(model(**with_timestep(tiny, moved, 1 - step / 8)))
            return found

    whole, interrupted = outputs(range(7)), outputs([0, 1, 2, 6])
    assert torch.equal(whole[6], interrupted[6])


# Settings of cache-dit 1.5 beyond the documented ones


def test_secondary_settings_are_those_of_the_second_expert() -> None:
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    pipe.register_to_config(boundary_ratio=0.5)
    second = {"max_warmup_steps": 3, "max_cached_steps": 1, "calibrator": "foca"}
    with holdover.enable(pipe, "cache_dit", **MUCH, secondary=second) as cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
        low = 12 - sum(t >= 500 for t in pipe.scheduler.timesteps.tolist())
        assert generation.trace("transformer/cond") == ("Chh" * 4)[: 12 - low]
        assert generation.trace("transformer_2/cond") == ("CCCh" + "C" * 12)[:low]
        assert cache.stats().last.settings["secondary"] == second


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secondary": {"max_warmup": 2}}, "no setting 'max_warmup'. Did you mean 'max_warmup_steps'"),
        ({"secondary": {"max_warmup_steps": -1}}, "max_warmup_steps must be at least 0"),
        ({"secondary": {"num_inference_steps": 4}}, "cannot be in `secondary`"),
        ({"enable_taylorseer": True, "calibrator": "dmd"}, "set only one"),
        ({"calibrator": "taylor"}, "must be one of None, 'taylorseer', 'dmd', 'foca'"),
        ({"warmup_interval": 0}, "must be at least 1"),
        ({"dmd_history": 3}, "must be at least 4"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, message: str) -> None:
    with pytest.raises(holdover.ConfigError, match=message):
        CacheDiTConfig(**settings)


@pytest.mark.parametrize("calibrator", ["taylorseer", "dmd", "foca"])
def test_calibrators_leave_nothing_of_the_replay_check(calibrator: str) -> None:
    """The check extrapolates at a computed step; what follows must be as if it had not."""
    settings = {**MUCH, "max_warmup_steps": 5, "calibrator": calibrator}
    model = MODELS[FLUX].build()
    with holdover.enable(model, "cache_dit", **settings):
        checked, unchecked = loop(model, 10), loop(model, 10)
    assert all(torch.equal(a, b) for a, b in zip(checked, unchecked, strict=True))


def test_a_config_of_the_librarys_becomes_settings() -> None:
    settings = CacheDiTConfig(
        Fn_compute_blocks=2, residual_diff_threshold=0.1, scm_steps_policy="static", calibrator="dmd", dmd_rank=3
    )
    there = CacheDiTConfig.from_library(settings.to_db_cache_config(), settings.to_calibrator_config())
    assert there == settings


# Branches


def test_branches_never_share_a_context() -> None:
    tiny = MODELS[FLUX]
    words = [tiny.inputs(seed=seed) for seed in range(3)]
    model = tiny.build()
    copies = [copy.deepcopy(model) for _ in words]

    def guided(models) -> torch.Tensor:
        latent = words[0]["hidden_states"]
        for i in range(10):
            outputs = [
                first(each(**with_timestep(tiny, {**inputs, "hidden_states": latent}, 1 - i / 10)))
                for each, inputs in zip(models, words, strict=True)
            ]
            latent = latent - sum((-1) ** j * (2 - j) * output for j, output in enumerate(outputs)) / 10
        return latent

    settings = {"residual_diff_threshold": 0.7, "max_warmup_steps": 1, "enable_taylorseer": True}
    with torch.no_grad():
        caches = [holdover.enable(each, "cache_dit", **settings) for each in copies]
        apart = guided(copies)
        assert all(cache.stats().held for cache in caches)
        with holdover.enable(model, "cache_dit", **settings) as cache:
            together = guided([model] * 3)
            assert len(cache.stats().last.branches) == 3
    assert torch.equal(together, apart)


@pytest.mark.parametrize("guidance", [True, False])
def test_with_and_without_guidance(guidance: bool) -> None:
    tiny = PIPELINES["QwenImagePipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", **MUCH) as cache:
        run(pipe, **tiny.call(steps=9, guidance=guidance))
        generation = cache.stats().last
    assert len(generation.branches) == 1 + guidance
    assert {generation.trace(branch) for branch in generation.branches} == {"ChhChhChh"}


def test_a_branch_that_comes_late_is_computed_first() -> None:
    """Also where a mask would order it held: there is nothing to hold."""
    tiny = MODELS[FLUX]
    model = tiny.build()
    with torch.no_grad(), holdover.enable(model, "cache_dit", **STATIC) as cache:
        for step in range(12):
            for name in ("cond", "uncond") if step >= 3 else ("cond",):
                with model.cache_context(name, step_index=step, num_inference_steps=12):
                    model(**with_timestep(tiny, tiny.inputs(seed=len(name)), 1 - step / 12))
        generation = cache.stats().last
    assert generation.trace("cond") == masked(12)
    assert masked(12)[3] == "h"
    assert generation.trace("uncond") == "C" + masked(12)[4:]


@pytest.mark.parametrize("settings", [MUCH, STATIC])
def test_another_batch_during_a_run_is_computed_not_broadcast(settings: dict) -> None:
    tiny = MODELS[FLUX]
    model = tiny.build()
    one, two = (with_timestep(tiny, tiny.inputs(batch=batch), 0.5) for batch in (1, 2))
    with torch.no_grad():
        expected = first(model(**one))
        with holdover.enable(model, "cache_dit", **settings) as cache:
            for step in range(12):
                with model.cache_context("cond", step_index=step, num_inference_steps=12):
                    output = first(model(**(two if step < 3 else one)))
                if step == 3:
                    assert torch.equal(output, expected)
            assert cache.stats().last.forwards[3].reason == "the inputs have another shape, dtype or device"


def test_lists_that_disagree_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX.2 has two lists, each with its own decision; a step is held where any of them is."""
    tiny = MODELS["Flux2Transformer2DModel"]
    model, inputs = tiny.build(), tiny.inputs()
    differences_seen: list[float] = []
    add = StepContextManager.add_residual_diff

    def add_residual_diff(manager, difference) -> None:
        differences_seen.append(float(difference))
        add(manager, difference)

    def two_steps() -> None:
        for step in range(2):
            with model.cache_context("cond", step_index=step):
                model(**with_timestep(tiny, inputs, 1 - step / 100))

    monkeypatch.setattr(StepContextManager, "add_residual_diff", add_residual_diff)
    with torch.no_grad(), holdover.enable(model, "cache_dit", max_warmup_steps=1) as cache:
        two_steps()
        assert len(differences_seen) == 2
        with cache.using(residual_diff_threshold=sum(differences_seen) / 2):
            two_steps()
            forward = cache.stats().last.forwards[1]
    assert not forward.computed
    assert forward.reason.startswith("the first blocks changed little, in ")
    assert forward.reason.endswith("_blocks only")


# Enabling and disabling


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline[2.2]", "ChromaPipeline"])
def test_undo_is_exact(name: str) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=6))
    before, register = denoiser(pipe), dict(BlockAdapterRegister._adapters)
    cache = holdover.enable(pipe, "cache_dit", **MUCH)
    assert not torch.equal(run(pipe, **tiny.call(steps=6)), plain)
    cache.disable()
    assert differences(before, denoiser(pipe)) == []
    assert not any(name.startswith(("_cached", "_context", "_is_", "_original")) for name in vars(type(pipe)))
    assert register == BlockAdapterRegister._adapters
    assert torch.equal(run(pipe, **tiny.call(steps=6)), plain)


@pytest.mark.parametrize("name", ["ChromaTransformer2DModel", "HunyuanDiT2DModel", "BriaFiboTransformer2DModel"])
def test_what_the_library_patches_is_there_only_while_a_forward_runs(name: str) -> None:
    tiny = MODELS[name]
    model = tiny.build()
    first(model(**tiny.inputs()))
    plain = snapshot(model)
    with torch.no_grad(), holdover.enable(model, "cache_dit", **MUCH) as cache:
        enabled = snapshot(model)
        for step in range(3):
            with model.cache_context("cond", step_index=step):
                model(**tiny.inputs())
            assert differences(enabled, snapshot(model)) == []
        assert cache.stats().held == 2
        with pytest.raises(TypeError):
            model(no_such_argument=1)
        assert differences(enabled, snapshot(model)) == []
    assert differences(plain, snapshot(model)) == []


def test_patched_models_run_beneath_accelerates_hooks() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counts(ModelHook):
        seen = 0

        def pre_forward(self, module, *args, **kwargs):
            Counts.seen += 1
            return args, kwargs

    tiny = MODELS["ChromaTransformer2DModel"]
    model = tiny.build()
    expected = first(model(**tiny.inputs()))
    add_hook_to_module(model, Counts())
    with torch.no_grad(), holdover.enable(model, "cache_dit", residual_diff_threshold=0.0):
        assert torch.equal(first(model(**tiny.inputs())), expected)
    assert Counts.seen == 3  # the forward, the plain one it is compared with, and the one that is held at once


def test_a_patched_model_with_another_hook_on_its_forward_is_refused() -> None:
    model = MODELS["ChromaTransformer2DModel"].build()
    model.forward = model.forward
    with pytest.raises(holdover.UnsupportedModelError, match="remove the hook"):
        holdover.enable(model, "cache_dit")


def test_two_pipelines_of_one_class_and_one_cached() -> None:
    tiny = PIPELINES["FluxPipeline"]
    one, two = tiny.build(), tiny.build()
    plain = run(two, **tiny.call(steps=6))
    caches = [holdover.enable(pipe, "cache_dit", **MUCH) for pipe in (one, two)]
    held = run(one, **tiny.call(steps=6))
    caches[1].disable()
    assert torch.equal(run(two, **tiny.call(steps=6)), plain)
    assert torch.equal(run(one, **tiny.call(steps=6)), held)
    caches[0].disable()


def test_enabling_again_with_other_settings_takes_effect_and_changes_no_config() -> None:
    pipe, tiny = PIPELINES["FluxPipeline"].build(), PIPELINES["FluxPipeline"]
    traces = []
    for row in (1, 3):
        config = DiffusionCacheConfig(**{**MUCH, "max_continuous_cached_steps": row}, scm_steps_mask_policy=None)
        kept = config.as_dict()
        backend = CacheDiTBackend(config)
        backend.enable(pipe)
        backend.refresh(pipe, 12)
        run(pipe, **tiny.call(steps=6))
        traces.append(backend.stats().last.trace("cond"))
        backend.disable()
        assert backend.config is config
        assert config.as_dict() == kept
    assert traces == ["ChChCh", "ChhhCh"]


def test_enabling_the_same_backend_again_sees_replaced_blocks() -> None:
    model = MODELS[FLUX].build()
    backend = CacheDiTBackend(CacheDiTConfig(**MUCH))
    backend.enable(model)
    loop(model)
    assert "transformer_blocks (6 blocks" in backend.stats().notes[0]
    backend.disable()
    model.transformer_blocks = torch.nn.ModuleList(list(model.transformer_blocks)[:1])
    plain = loop(model)[0]
    backend.enable(model)
    assert torch.equal(loop(model)[0], plain)
    assert "transformer_blocks (4 blocks" in backend.stats().notes[0]
    backend.disable()


def test_settings_and_off_for_a_while() -> None:
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=6))
    with holdover.enable(pipe, "cache_dit", **MUCH) as cache:
        held = run(pipe, **tiny.call(steps=6))
        with cache.using(enable_taylorseer=True, max_warmup_steps=3):
            run(pipe, **tiny.call(steps=6))
            assert cache.stats().last.trace("cond") == "CCChhC"
        with cache.off():
            assert torch.equal(run(pipe, **tiny.call(steps=6)), plain)
        assert torch.equal(run(pipe, **tiny.call(steps=6)), held)


def test_an_aborted_request_leaves_nothing_for_the_next() -> None:
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()

    def abort(pipe, step, timestep, tensors):
        if step == 3:
            raise KeyboardInterrupt
        return tensors

    with holdover.enable(pipe, "cache_dit", **MUCH) as cache:
        expected = run(pipe, **tiny.call(steps=6))
        with pytest.raises(KeyboardInterrupt):
            run(pipe, **tiny.call(steps=6, seed=5), callback_on_step_end=abort)
        assert torch.equal(run(pipe, **tiny.call(steps=6)), expected)
        assert cache.stats().last.trace("cond") == "ChhChh"


def test_nothing_is_kept_after_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the engine nor by the blocks that ran with the contexts."""
    managers: list[weakref.ref[StepContextManager]] = []
    at = BranchContexts.at

    def record(contexts, step) -> StepContextManager:
        manager = at(contexts, step)
        managers.append(weakref.ref(manager))
        return manager

    monkeypatch.setattr(BranchContexts, "at", record)
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", **MUCH, enable_taylorseer=True) as cache:
        run(pipe, **tiny.call(steps=6))
        assert cache.stats().peak_bytes > 0
        assert len(managers) == 6
        gc.collect()
        assert [manager for manager in managers if manager() is not None] == []


def test_taylorseer_keeps_more_than_the_last_step() -> None:
    def kept(**settings) -> int:
        model = MODELS[FLUX].build()
        with holdover.enable(model, "cache_dit", **MUCH, **settings) as cache:
            loop(model)
            return cache.stats().peak_bytes

    assert kept() < kept(enable_taylorseer=True) < kept(enable_taylorseer=True, taylorseer_order=2)


# Statistics and logs


def test_stats_have_the_shape_of_the_other_methods() -> None:
    tiny = PIPELINES["FluxPipeline"]
    found = []
    for method, settings in (("cache_dit", MUCH), ("mag_cache", {"mag_ratios": [1.0] * 6})):
        pipe = tiny.build()
        with holdover.enable(pipe, method, **settings) as cache:
            run(pipe, **tiny.call(steps=6))
            found.append(cache.stats())
    ours, others = found
    assert isinstance(ours, Stats)
    assert ours.as_dict().keys() == others.as_dict().keys()
    assert ours.as_dict()["last"][0].keys() == others.as_dict()["last"][0].keys()
    assert ours.method == "cache_dit"
    assert ours.last.settings == CacheDiTConfig(**MUCH).as_dict()
    assert ours.notes == ("transformer: cache-dit: transformer_blocks (5 blocks, Pattern_1)",)


def test_the_library_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import torch, holdover\n"
        "from tiny.models import MODELS\n"
        "model = MODELS['ChromaTransformer2DModel'].build()\n"
        "with holdover.enable(model, 'cache_dit'), torch.no_grad():\n"
        "    model(**MODELS['ChromaTransformer2DModel'].inputs())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="tests", timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "cache" not in done.stderr.lower()


def test_the_librarys_log_levels_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("cache_dit.caching.cache_interface")
    level = logger.level
    with quiet_library():
        assert logger.level == logging.ERROR
    assert logger.level == level
    monkeypatch.setenv("CACHE_DIT_LOG_LEVEL", "info")
    with quiet_library():
        assert logger.level == level


# What is refused

CONTROLNET = [
    "FluxTransformer2DModel[controlnet]",
    "FluxTransformer2DModel[controlnet_full]",
    "QwenImageTransformer2DModel[controlnet]",
    "QwenImageTransformer2DModel[controlnet_full]",
    "SanaTransformer2DModel[controlnet]",
    "SanaTransformer2DModel[controlnet_full]",
    "SD3Transformer2DModel[controlnet]",
    "ChromaTransformer2DModel[controlnet]",
    "ZImageTransformer2DModel[controlnet]",
]


@pytest.mark.parametrize("name", CONTROLNET)
def test_controlnet_is_refused_by_name_with_what_to_do(name: str) -> None:
    tiny = MODELS[name]
    model = tiny.build()
    with torch.no_grad(), holdover.enable(model, "cache_dit"):
        with pytest.raises(holdover.UnsupportedModelError, match=r"(?s)cannot cache \w+ with .*control.*Use tea_cache"):
            model(**tiny.inputs())


@pytest.mark.parametrize("name", CONTROLNET)
def test_controlnet_that_begins_late_is_refused_at_the_first_forward(name: str) -> None:
    """Its residuals are zeros at first, which hides what the model does with them."""
    tiny = MODELS[name]
    inputs = tiny.inputs()
    control = {key: zeros(value) for key, value in inputs.items() if "control" in key}
    model = tiny.build()
    with torch.no_grad(), holdover.enable(model, "cache_dit", residual_diff_threshold=0.0):
        with pytest.raises(holdover.UnsupportedModelError, match=r"(?s)cannot cache \w+ with .*control.*Use tea_cache"):
            model(**inputs | control)


def zeros(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeros(item) for key, item in value.items()}
    return [zeros(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_a_pipeline_whose_controlnet_begins_late_is_refused() -> None:
    tiny = PIPELINES["FluxControlNetPipeline"]
    pipe = tiny.build()
    late = {"control_guidance_start": 0.4}
    plain = run(pipe, **tiny.call(steps=6), **late)
    with holdover.enable(pipe, "cache_dit", residual_diff_threshold=0.0):
        with pytest.raises(holdover.UnsupportedModelError, match="with controlnet_block_samples"):
            run(pipe, **tiny.call(steps=6), **late)
    assert torch.equal(run(pipe, **tiny.call(steps=6), **late), plain)


def test_all_zero_inputs_that_do_no_harm_are_accepted() -> None:
    """A negative prompt of zeros, for example; the probe leaves nothing behind."""
    tiny = MODELS["QwenImageTransformer2DModel"]
    model, inputs = tiny.build(), tiny.inputs()
    inputs["encoder_hidden_states"] = torch.zeros_like(inputs["encoder_hidden_states"])
    with torch.no_grad():
        plain = first(model(**inputs))
        with holdover.enable(model, "cache_dit", **MUCH) as cache:
            for step in range(3):
                with model.cache_context("uncond", step_index=step):
                    output = first(model(**inputs))
            assert torch.allclose(output, plain, atol=1e-5)
            assert cache.stats().last.trace("uncond") == "Chh"


def test_a_model_that_takes_apart_the_lists_it_is_given() -> None:
    """The forwards that are made for the check get lists of their own."""
    from cache_dit import ForwardPattern

    from holdover.cache_dit_backend import CacheDiTAdapterConfig

    class Pops(torch.nn.Module):
        _cache_dit_adapter_config = CacheDiTAdapterConfig({"blocks": ForwardPattern.Pattern_3}, None, False)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, hidden_states, extra):
            hidden_states = hidden_states + extra.pop() + extra.pop()
            for block in self.blocks:
                hidden_states = block(hidden_states)
            return hidden_states

    model = Pops().eval()
    with torch.no_grad():
        plain = model(torch.ones(1, 4), [torch.ones(4), torch.zeros(4)])
        with holdover.enable(model, "cache_dit"):
            assert torch.equal(model(torch.ones(1, 4), [torch.ones(4), torch.zeros(4)]), plain)


def test_a_transformer_that_does_not_iterate_over_its_list_is_refused() -> None:
    from cache_dit import ForwardPattern

    from holdover.cache_dit_backend import CacheDiTAdapterConfig

    class Indexed(torch.nn.Module):
        _cache_dit_adapter_config = CacheDiTAdapterConfig({"blocks": ForwardPattern.Pattern_3}, None, False)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, hidden_states):
            for i in range(3):
                hidden_states = self.blocks[i](hidden_states)
            return hidden_states

    class Twice(Indexed):
        def forward(self, hidden_states):
            for block in [*self.blocks, *self.blocks]:
                hidden_states = block(hidden_states)
            return hidden_states

    for cls, message in ((Indexed, "does not iterate over blocks"), (Twice, "runs blocks twice")):
        model = cls().eval()
        with torch.no_grad(), holdover.enable(model, "cache_dit"):
            with pytest.raises(holdover.UnsupportedModelError, match=message):
                model(torch.ones(1, 4))


def test_an_error_of_the_plain_model_is_its_own() -> None:
    model = MODELS[FLUX].build()
    with torch.no_grad(), holdover.enable(model, "cache_dit"):
        with pytest.raises(TypeError, match="no_such_argument"):
            model(no_such_argument=1)
