"""vLLM-Omni's guide to MagCache: each test is named after an item of it and uses the item as the guide does."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdover
from holdover.base import DiffusionCacheConfig
from holdover.cli import app
from holdover.errors import ConfigError, EnableError, NotEnabledError, UnsupportedModelError
from holdover.loading import place_pipeline
from holdover.magcache import MagCacheBackend, MagCacheConfig
from holdover.magcache import backend as magcache_backend
from holdover.magcache.hook import apply_mag_cache_hook
from holdover.magcache.strategy import (
    FluxMagCacheStrategy,
    MagCacheStrategy,
    TransformerBlockMetadata,
    TransformerBlockRegistry,
    get_block_metadata,
    register_strategy,
    unregister_strategy,
)
from holdover.selector import get_cache_backend
from holdover.serve import Settings, launch
from holdover.serve.model import load_model
from holdover.serve.schemas import ImageRequest
from holdover.serve.settings import RaySettings
from holdover.serve.validation import ModelInfo, validate
from tiny.pipelines import PIPELINES, run
from tiny.prompted import prompted_flux

FLUX = "FluxTransformer2DModel"
STEPS = 8


@pytest.fixture(scope="module")
def pipe() -> Any:
    return PIPELINES["FluxPipeline"].build()


@pytest.fixture
def flux(pipe: Any) -> Iterator[Any]:
    """A tiny FLUX pipeline, as it was before the test."""
    transformer = pipe.transformer
    yield pipe
    with contextlib.suppress(NotEnabledError):
        holdover.disable(pipe)
    pipe.transformer = transformer


def generate(pipe: Any, steps: int = STEPS, seed: int = 0) -> torch.Tensor:
    return run(pipe, **PIPELINES["FluxPipeline"].call(steps=steps, seed=seed))


def trace(pipe: Any, steps: int = STEPS, **settings: Any) -> str:
    """The steps computed (C) and held (h) under these settings, in the one object that the guide uses."""
    backend = MagCacheBackend(DiffusionCacheConfig(**settings))
    backend.enable(pipe)
    generate(pipe, steps)
    backend.disable()
    return backend.stats().last.trace("cond")


# 3.1 Quick start


def test_quick_start(flux: Any) -> None:
    cache_config = DiffusionCacheConfig(
        mag_ratios=FluxMagCacheStrategy.FLUX_MAG_RATIOS,
        num_inference_steps=28,
        mag_threshold=0.24,
        mag_max_skip_steps=5,
        mag_retention_ratio=0.1,
    )
    backend = get_cache_backend("mag_cache", cache_config)
    assert isinstance(backend, MagCacheBackend)
    backend.enable(flux)
    generate(flux, 28)
    generation = backend.stats().last
    assert generation.trace("cond")[:3] == "CCC"
    assert generation.held["cond"] == 20
    assert "hhhhhh" not in generation.trace("cond")


def test_FLUX_MAG_RATIOS() -> None:
    ratios = FluxMagCacheStrategy.FLUX_MAG_RATIOS
    assert torch.equal(ratios, diffusers.hooks.mag_cache.FLUX_MAG_RATIOS)
    assert torch.equal(FluxMagCacheStrategy().mag_ratios, ratios)


# 3.2 Calibration mode


def calibrated(pipe: Any, caplog: pytest.LogCaptureFixture, **settings: Any) -> dict[str, list[float]]:
    """What a calibration logs, by label."""
    backend = MagCacheBackend(DiffusionCacheConfig(**settings, num_inference_steps=STEPS))
    backend.enable(pipe)
    with caplog.at_level(logging.INFO, "holdover"):
        generate(pipe)
    backend.disable()
    lines = [message.split(": ", 1) for message in caplog.messages if ": [" in message]
    return {label: json.loads(values) for label, values in lines}


@pytest.mark.parametrize("name", ["calibrate", "mag_calibrate"])
def test_calibrate(flux: Any, caplog: pytest.LogCaptureFixture, name: str) -> None:
    plain = generate(flux)
    backend = MagCacheBackend(DiffusionCacheConfig(**{name: True}, num_inference_steps=STEPS))
    backend.enable(flux)
    assert torch.equal(generate(flux), plain)
    backend.disable()
    assert backend.stats().held == 0
    assert list(calibrated(flux, caplog, **{name: True})) == ["norm_ratios", "norm_stds", "cos_dises"]


@pytest.fixture(scope="module")
def residuals(pipe: Any) -> list[torch.Tensor]:
    """The residual of the image stream at each step, by hooks on the first and the last block."""
    inputs: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    first, last = pipe.transformer.transformer_blocks[0], pipe.transformer.single_transformer_blocks[-1]
    hooks = (
        first.register_forward_pre_hook(lambda m, a, k: inputs.append(k["hidden_states"]), with_kwargs=True),
        last.register_forward_hook(lambda m, a, out: found.append(out[1] - inputs[-1])),
    )
    generate(pipe)
    for hook in hooks:
        hook.remove()
    return found


def test_norm_ratios(flux: Any, residuals: list[torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    norms = [residual.norm(dim=-1) for residual in residuals]
    expected = [1.0, *(float((now / before).mean()) for before, now in pairwise(norms))]
    measured = calibrated(flux, caplog, calibrate=True)["norm_ratios"]
    assert measured == pytest.approx(expected, abs=1.1e-5)
    assert "h" in trace(flux, mag_ratios=measured, mag_threshold=100.0)  # used directly as mag_ratios


def test_norm_stds(flux: Any, residuals: list[torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    """As in the authors' code: torch's standard deviation, which divides by one less than the number of tokens."""
    norms = [residual.norm(dim=-1) for residual in residuals]
    expected = [0.0, *(float((now / before).std()) for before, now in pairwise(norms))]
    assert calibrated(flux, caplog, calibrate=True)["norm_stds"] == pytest.approx(expected, abs=1.1e-5)


def test_cos_dises(flux: Any, residuals: list[torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    pairs = pairwise(residuals)
    expected = [0.0, *(float((1 - torch.cosine_similarity(now, before, dim=-1)).mean()) for before, now in pairs)]
    assert calibrated(flux, caplog, calibrate=True)["cos_dises"] == pytest.approx(expected, abs=1.1e-5)


def test_output_after_inference(
    flux: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line says what to do; a user who has not set up logging sees it all the same."""
    measured = calibrated(flux, caplog, calibrate=True)
    assert "DiffusionCacheConfig(mag_ratios=...)" in caplog.messages[-1]
    assert "norm_ratios" not in capsys.readouterr().err
    monkeypatch.setattr(magcache_backend, "logger", logging.Logger("without handlers"))
    calibrated(flux, caplog, calibrate=True)
    lines = capsys.readouterr().err.splitlines()
    assert [f"[INFO] {label}: {values}" for label, values in measured.items()] == lines[-4:-1]
    assert "DiffusionCacheConfig(mag_ratios=...)" in lines[-1]


# 4 Adapting new models


class MyTransformer2DModel(diffusers.FluxTransformer2DModel):
    """A custom model, registered by its class name."""


class MyModelMagCacheStrategy(MagCacheStrategy):
    """The minimal implementation of the guide."""

    @property
    def mag_ratios(self) -> torch.Tensor:
        # fmt: off
        return torch.tensor([
            1.0, 1.05, 1.08, 1.04, 1.06, 1.03, 1.02, 1.04,
            1.03, 1.02, 1.03, 1.02, 1.01, 1.02, 1.01, 1.02,
            1.01, 1.02, 1.01, 1.03, 1.00, 1.01, 1.01, 1.02,
            1.01, 1.00, 1.01, 1.01,
        ])
        # fmt: on


@pytest.fixture
def registered() -> Iterator[Any]:
    names = []

    def register(name: str, strategy: MagCacheStrategy) -> None:
        names.append(name)
        register_strategy(name, strategy)

    yield register
    for name in names:
        unregister_strategy(name)


def as_class(cls: type[nn.Module], transformer: nn.Module) -> nn.Module:
    """The same model as an instance of a subclass."""
    mine = cls.from_config(transformer.config)
    mine.load_state_dict(transformer.state_dict())
    return mine.eval()


def test_MagCacheStrategy_mag_ratios(flux: Any, registered: Any) -> None:
    flux.transformer = as_class(MyTransformer2DModel, flux.transformer)
    registered("MyTransformer2DModel", MyModelMagCacheStrategy())
    with holdover.enable(flux, "mag_cache") as cache:
        generate(flux, 28)
        assert any("MyModelMagCacheStrategy" in note for note in cache.stats().notes)
        mine = cache.stats().last.trace("cond")
    assert mine == trace(flux, 28, mag_ratios=MyModelMagCacheStrategy().mag_ratios)
    assert "h" in mine


class OtherRatios(MagCacheStrategy):
    @property
    def mag_ratios(self) -> torch.Tensor:
        return torch.full((STEPS,), 1.3)


def test_register_strategy_matches_the_exact_class_name_first(flux: Any, registered: Any) -> None:
    flux.transformer = as_class(MyTransformer2DModel, flux.transformer)
    registered(FLUX, OtherRatios())
    registered("MyTransformer2DModel", MyModelMagCacheStrategy())
    with holdover.enable(flux, "mag_cache") as cache:
        assert any("MyModelMagCacheStrategy" in note for note in cache.stats().notes)


class CrashingStrategy(MyModelMagCacheStrategy):
    """Right for another class: every residual method fails here."""

    def compute_residual(self, output: Any, head_input: torch.Tensor) -> torch.Tensor:
        raise TypeError("this model's blocks return something else")

    def register_block_metadata(self, block_class: type) -> TransformerBlockMetadata | None:
        return TransformerBlockMetadata(return_hidden_states_index=7)


def test_register_strategy_of_a_base_class_never_crashes_a_subclass(flux: Any, registered: Any) -> None:
    """A subclass gets the ratios; its residual is what tracing finds."""
    plain = trace(flux, mag_ratios=CrashingStrategy().mag_ratios)
    flux.transformer = as_class(MyTransformer2DModel, flux.transformer)
    registered(FLUX, CrashingStrategy())
    with holdover.enable(flux, "mag_cache") as cache:
        generate(flux)
        assert cache.stats().last.trace("cond") == plain
    flux.transformer = as_class(diffusers.FluxTransformer2DModel, flux.transformer)
    with holdover.enable(flux, "mag_cache"), pytest.raises(TypeError, match="something else"):
        generate(flux)  # for its own class it is followed, whatever it does


@pytest.mark.parametrize("strategy", [MyModelMagCacheStrategy, None, "MyModelMagCacheStrategy"])
def test_register_strategy_refuses_what_is_none(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="A strategy must be an instance of MagCacheStrategy"):
        register_strategy("MyTransformer2DModel", strategy)


def test_settings_come_before_a_strategy(flux: Any, registered: Any) -> None:
    registered(FLUX, MyModelMagCacheStrategy())
    settings = {"mag_threshold": 0.01, "mag_max_skip_steps": 9}
    assert trace(flux, mag_ratios=[1.0] * STEPS, **settings) == "C" + "h" * (STEPS - 1)


# 4.3 Models with special output format


class DualStreamStrategy(MagCacheStrategy):
    """The dual-stream implementation of the guide, with every call noted."""

    def __init__(self, metadata: TransformerBlockMetadata | None) -> None:
        self.metadata = metadata
        self.calls: list[str] = []
        self.block_classes: set[type] = set()

    def register_block_metadata(self, block_class: type) -> TransformerBlockMetadata | None:
        self.calls.append("metadata")
        self.block_classes.add(block_class)
        return self.metadata

    @property
    def mag_ratios(self) -> torch.Tensor:
        return torch.full((STEPS,), 1.01)

    def compute_residual(self, output: Any, head_input: torch.Tensor) -> torch.Tensor:
        self.calls.append("compute")
        if isinstance(output, tuple):
            decoder_output = output[1] if len(output) > 1 else output[0]
            return decoder_output - head_input
        return output - head_input

    def apply_residual_tuple(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, residual: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("apply")
        decoder_residual = residual[1] if isinstance(residual, tuple) else residual
        return hidden_states + decoder_residual, encoder_hidden_states


@pytest.mark.parametrize("metadata", [TransformerBlockMetadata(1, 0), None], ids=["declared", "default"])
def test_compute_residual_and_apply_residual_tuple(flux: Any, registered: Any, metadata: Any) -> None:
    strategy = DualStreamStrategy(metadata)
    registered(FLUX, strategy)
    with holdover.enable(flux, "mag_cache") as cache:
        image = generate(flux)
        generation = cache.stats().last
    unregister_strategy(FLUX)
    computed, held = generation.computed["cond"], generation.held["cond"]
    assert held > 0
    assert strategy.calls.count("compute") == computed
    assert strategy.calls.count("apply") == held + 1  # once to see that a held step replays a computed one
    with holdover.enable(flux, "mag_cache", mag_ratios=strategy.mag_ratios) as cache:
        traced = generate(flux)
        assert cache.stats().last.trace("cond") == generation.trace("cond")
    assert torch.allclose(image, traced, atol=1e-4)
    assert not torch.allclose(image, generate(flux), atol=1e-4)


def test_compute_residual_that_is_wrong_is_refused(flux: Any, registered: Any) -> None:
    class Wrong(DualStreamStrategy):
        def apply_residual_tuple(self, hidden_states: Any, encoder_hidden_states: Any, residual: Any) -> Any:
            return hidden_states - residual, encoder_hidden_states

    registered(FLUX, Wrong(None))
    with holdover.enable(flux, "mag_cache"), pytest.raises(UnsupportedModelError, match="does not replay"):
        generate(flux)


def test_MagCacheStrategy_defaults() -> None:
    strategy = MagCacheStrategy()
    hidden, encoder, residual = torch.full((1, 4, 2), 3.0), torch.ones(1, 2, 2), torch.full((1, 4, 2), 0.5)
    assert strategy.mag_ratios is None
    assert torch.equal(strategy.compute_residual(hidden + residual, hidden), residual)
    assert torch.equal(strategy.compute_residual((encoder, hidden + residual), hidden), residual)
    assert torch.equal(strategy.apply_residual(hidden, residual), hidden + residual)
    held, untouched = strategy.apply_residual_tuple(hidden, encoder, residual)
    assert torch.equal(held, hidden + residual)
    assert untouched is encoder
    both = strategy.apply_residual_tuple(hidden, encoder, (residual, encoder))
    assert torch.equal(both[0], hidden + residual)
    assert torch.equal(both[1], 2 * encoder)


# 4.4 Block registration and metadata


@pytest.mark.usefixtures("_block_registry")
@pytest.mark.parametrize("metadata", [TransformerBlockMetadata(1, 0), None], ids=["declared", "traced"])
def test_register_block_metadata(flux: Any, registered: Any, metadata: Any) -> None:
    """The strategy is asked for a class of blocks that is not registered, once; what it says is registered."""
    strategy, block = DualStreamStrategy(metadata), flux.transformer.transformer_blocks[0]
    registered(FLUX, strategy)
    plain_class = type(block)
    block.__class__ = mine = type("MyBlock", (plain_class,), {})
    try:
        with holdover.enable(flux, "mag_cache"):
            generate(flux)
    finally:
        block.__class__ = plain_class
    assert strategy.calls.count("metadata") == 1
    assert strategy.block_classes == {mine}
    found = TransformerBlockRegistry.get(mine)
    assert (found.return_hidden_states_index, found.return_encoder_hidden_states_index) == (1, 0)
    assert MagCacheStrategy().register_block_metadata(nn.Linear) is None


def new_block_class() -> type[nn.Module]:
    """A class that no one has registered."""
    return type("NewBlock", (nn.Linear,), {})


@pytest.fixture
def _block_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    TransformerBlockRegistry._register()
    monkeypatch.setattr(TransformerBlockRegistry, "_registry", dict(TransformerBlockRegistry._registry))


@pytest.mark.usefixtures("_block_registry")
def test_TransformerBlockRegistry_get(flux: Any) -> None:
    """A class that diffusers knows is looked up; the strategy is not asked."""
    block_class, strategy = type(flux.transformer.transformer_blocks[0]), DualStreamStrategy(None)
    found = get_block_metadata(block_class, strategy)
    assert found is TransformerBlockRegistry.get(block_class)
    assert (found.return_hidden_states_index, found.return_encoder_hidden_states_index) == (1, 0)
    assert strategy.calls == []


@pytest.mark.usefixtures("_block_registry")
def test_TransformerBlockRegistry_says_where_a_held_step_returns_its_streams(flux: Any, registered: Any) -> None:
    block_class = type(flux.transformer.transformer_blocks[0])
    wrong = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1)
    TransformerBlockRegistry.register(block_class, wrong)  # FLUX returns (encoder, hidden)
    registered(FLUX, DualStreamStrategy(None))
    with holdover.enable(flux, "mag_cache"), pytest.raises(RuntimeError, match="must match the size"):
        generate(flux)


@pytest.mark.usefixtures("_block_registry")
def test_auto_registration_with_strategy() -> None:
    block_class, metadata = new_block_class(), TransformerBlockMetadata(2, 1)
    with pytest.raises(ValueError, match="not registered"):
        TransformerBlockRegistry.get(block_class)
    assert get_block_metadata(block_class, DualStreamStrategy(metadata)) is metadata
    assert TransformerBlockRegistry.get(block_class) is metadata


@pytest.mark.usefixtures("_block_registry")
@pytest.mark.parametrize("strategy", [None, MagCacheStrategy()], ids=["none", "base"])
@pytest.mark.parametrize(
    ("output", "indices"),
    [(torch.ones(1), (0, None)), ((torch.ones(1), torch.ones(1)), (1, 0)), (None, (1, 0))],
    ids=["single", "tuple", "unknown"],
)
def test_default_indices(strategy: Any, output: Any, indices: tuple[int, int | None]) -> None:
    block_class = new_block_class()
    found = get_block_metadata(block_class, strategy, output)
    assert (found.return_hidden_states_index, found.return_encoder_hidden_states_index) == indices
    assert TransformerBlockRegistry.get(block_class) is found


# 5 Core parameters


def test_default_parameters() -> None:
    config = DiffusionCacheConfig()
    assert (config.mag_threshold, config.mag_max_skip_steps, config.mag_retention_ratio) == (0.24, 5, 0.1)
    assert (config.num_inference_steps, config.mag_ratios) == (28, None)


def test_mag_threshold(flux: Any) -> None:
    """Larger is faster: the error that may accumulate."""
    traces = {limit: trace(flux, mag_ratios=[1.05] * STEPS, mag_threshold=limit) for limit in (0.0, 0.06, 0.2)}
    assert traces == {0.0: "CCCCCCCC", 0.06: "ChChChCh", 0.2: "ChhChhCh"}


def test_mag_max_skip_steps(flux: Any) -> None:
    settings = {"mag_ratios": [1.0] * STEPS, "mag_retention_ratio": 0.0}
    assert trace(flux, mag_max_skip_steps=2, **settings) == "ChhChhCh"
    assert trace(flux, mag_max_skip_steps=5, **settings) == "ChhhhhCh"


def test_mag_retention_ratio(flux: Any) -> None:
    settings = {"mag_ratios": [1.0] * STEPS, "mag_max_skip_steps": STEPS}
    assert trace(flux, mag_retention_ratio=0.5, **settings) == "CCCChhhh"
    assert trace(flux, mag_retention_ratio=0.1, **settings) == "Chhhhhhh"


def test_num_inference_steps() -> None:
    """The steps of a loop without a scheduler: the retained ones are a fraction of them."""
    from tiny.models import MODELS, with_timestep

    tiny = MODELS[FLUX]
    net, inputs = tiny.build(), tiny.inputs()
    config = DiffusionCacheConfig(mag_ratios=[1.0], mag_retention_ratio=0.5, num_inference_steps=6)
    backend = MagCacheBackend(config)
    backend.enable(net)
    with torch.no_grad():
        for step in range(6):
            net(**with_timestep(tiny, inputs, 1 - step / 6))
    assert backend.stats().last.trace("1") == "CCChhh"
    backend.disable()


def test_mag_ratios(flux: Any) -> None:
    """One ratio per step: where the magnitude jumps, the step is computed."""
    jump = [1.0, 1.0, 1.0, 1.0, 1.5, 1.0, 1.0, 1.0]
    assert trace(flux, mag_ratios=jump, mag_retention_ratio=0.0) == "ChhhChhh"
    with pytest.raises(ConfigError, match="must be positive numbers"):
        DiffusionCacheConfig(mag_ratios=[1.0, -1.0])


# 6 Workflow, 7 Hook responsibilities


def test_workflow(flux: Any) -> None:
    """A held step runs no block and adds the residual of the last computed one; a computed step is the plain one."""
    runs: list[int] = []
    plain = generate(flux)
    hook = flux.transformer.transformer_blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))
    with holdover.enable(flux, "mag_cache", mag_ratios=[1.0] * STEPS, mag_max_skip_steps=1) as cache:
        image = generate(flux)
        runs.clear()
        assert torch.equal(generate(flux), image)
        assert cache.stats().last.trace("cond") == "ChChChCh"
    hook.remove()
    assert len(runs) == 4
    assert not torch.equal(image, plain)


def test_apply_mag_cache_hook_with_a_strategy(flux: Any) -> None:
    strategy = DualStreamStrategy(TransformerBlockMetadata(1, 0))
    runs: list[int] = []
    hook = flux.transformer.transformer_blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))
    apply_mag_cache_hook(flux.transformer, MagCacheConfig(num_inference_steps=STEPS), strategy)
    generate(flux)
    generate(flux)
    hook.remove()
    assert 0 < len(runs) < 2 * STEPS
    assert strategy.calls.count("apply") > 0


# 8 File structure


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("magcache", "MagCacheBackend MagCacheConfig MagCacheState MagCacheStrategy apply_mag_cache_hook"),
        ("magcache.backend", "MagCacheBackend"),
        ("magcache.config", "MagCacheConfig"),
        ("magcache.hook", "MagCacheHeadHook MagCacheBlockHook"),
        ("magcache.state", "MagCacheState"),
        ("magcache.strategy", "MagCacheStrategy FluxMagCacheStrategy"),
    ],
)
def test_file_structure(module: str, names: str) -> None:
    exec(f"from holdover.{module} import {', '.join(names.split())}", {})


# 9 Supported models


@pytest.mark.parametrize("name", ["FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline"])
def test_supported_models(name: str) -> None:
    """Ratios are found without being given, and the image of a held generation is finite."""
    tiny = PIPELINES[name]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", mag_threshold=10.0) as cache:
        image = run(pipe, **tiny.call(steps=STEPS))
        assert cache.stats().held > 0
    assert torch.isfinite(image).all()


# 10 Test: the command line and the request


def test_settings_of_the_command_line(flux: Any) -> None:
    text = '{"mag_threshold": 0.24, "mag_max_skip_steps": 5, "mag_retention_ratio": 0.1}'
    backend = get_cache_backend("mag_cache", DiffusionCacheConfig.from_json(text))
    assert backend is not None
    backend.enable(flux)
    generate(flux, 50)
    generation = backend.stats().last
    assert generation.steps == 50
    assert 0 < generation.computed["cond"] < 25


COMMAND = [
    *("serve", "emoji", "--port", "8004", "--tensor-parallel-size", "2", "--enable_cpu_offload"),
    *("--cache-backend", "mag_cache", "--cache-config", '{"mag_threshold": 0.24, "mag_max_skip_steps": 5}'),
]


def test_serve_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the guide, up to the name of the model; flags may be spelled with underscores, as there."""
    served: list[Settings] = []
    monkeypatch.setattr(launch, "serve", served.append)
    done = CliRunner().invoke(app, COMMAND)
    assert done.exit_code == 0, done.output
    assert served[0].enable_cpu_offload is True
    assert (served[0].tensor_parallel_size, served[0].port, served[0].cache_backend) == (2, 8004, "mag_cache")
    assert served[0].cache_settings == {"mag_threshold": 0.24, "mag_max_skip_steps": 5}


def test_serve_enable_cpu_offload() -> None:
    """The weights rest in host memory, and each model is loaded when it runs; without an accelerator it is refused."""
    settings = Settings(enable_cpu_offload=True, device="cpu")
    assert settings.offload == "model"
    with pytest.raises(ConfigError, match="moves weights between the host and an accelerator"):
        load_model(settings)
    pipeline = place_pipeline(prompted_flux(), settings, torch.device("cuda", 0))
    assert next(pipeline.transformer.parameters()).device.type == "cpu"
    assert pipeline.transformer._hf_hook.execution_device == torch.device("cuda", 0)


def test_serve_tensor_parallel_size() -> None:
    """Refused without as many GPUs; tests/parallel has a model that is served by two processes."""
    with pytest.raises(EnableError, match=r"tensor_parallel_size is 4096, but there are \d+ GPUs here"):
        load_model(Settings(tensor_parallel_size=4096))
    with pytest.raises(ConfigError, match="each replica has a GPU of its own"):
        RaySettings(tensor_parallel_size=2)


def test_request_of_the_guide() -> None:
    """The body of the guide's `curl`, on a server of FLUX with its cache as default."""
    body = {
        "prompt": "a dragon laying over the spine of the Green Mountains of Vermont",
        "size": "1024x1024",
        "num_inference_steps": 50,
        "cfg_scale": 4.0,
        "guidance_scale": 4.0,
        "seed": 42,
    }
    parameters = frozenset({"guidance_scale", "true_cfg_scale"})
    model = ModelInfo("flux", "FluxPipeline", FLUX, parameters, 28, (512, 512), 16, False, True)
    cache = MagCacheConfig(mag_threshold=0.24, mag_max_skip_steps=5, mag_retention_ratio=0.1)
    (image,) = validate(ImageRequest.model_validate(body), model, Settings(), cache)
    assert (image.size, image.steps, image.seed, image.cache) == ((1024, 1024), 50, 42, cache)
    assert dict(image.guidance) == {"guidance_scale": 4.0, "true_cfg_scale": 4.0}
