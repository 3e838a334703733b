"""TeaCache on real pipelines: signals, profiles, estimation, extractors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdover
from holdover.models.registry import get_family, unregister_extractor
from holdover.profiles import TeaCacheProfile, load
from holdover.teacache import CacheContext, estimate_coefficients
from holdover.teacache.estimate import fit_polynomial
from tiny.pipelines import PIPELINES, run

WITH_PROFILE = [
    "FluxPipeline",
    "Flux2Pipeline",
    "Flux2KleinPipeline",
    "QwenImagePipeline",
    "HunyuanVideoPipeline",
    "WanPipeline",
    "CogVideoXPipeline",
    "LTXPipeline",
    "MochiPipeline",
    "Lumina2Pipeline",
    "CosmosTextToWorldPipeline",
    "HiDreamImagePipeline",
    "ZImagePipeline",
    "LongCatImagePipeline",
    "StableAudioPipeline",
]


@pytest.mark.filterwarnings("ignore::holdover.errors.HoldoverWarning")
@pytest.mark.parametrize("name", WITH_PROFILE)
def test_published_coefficients_are_found_and_hold(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=12))
    with holdover.enable(pipe, "tea_cache", rel_l1_thresh=0.0):
        assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
    with holdover.enable(pipe, "tea_cache", rel_l1_thresh=1e9) as cache:
        held = run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
        assert "profile" in cache.stats().notes[0]
    assert torch.isfinite(held).all()
    for branch in generation.branches:
        trace = generation.trace(branch)
        assert trace[0] == trace[-1] == "C"
        assert "h" in trace


def test_sd3_has_a_signal_and_needs_coefficients():
    pipe = PIPELINES["StableDiffusion3Pipeline"].build()
    with pytest.raises(holdover.ConfigError, match="estimate_coefficients"):
        holdover.enable(pipe, "tea_cache")
    with holdover.enable(pipe, "tea_cache", coefficients=[1.0, 0.0]) as cache:
        assert "signal modulated" in cache.stats().notes[0]


@pytest.mark.parametrize(("name", "signal"), [("WanPipeline", "e"), ("WanPipeline", "e0"), ("CogVideoXPipeline", None)])
def test_timestep_only_signals_are_planned_as_they_would_be_read(name, signal):
    """The schedule made before step 0 is the one that reading the embedding at each step gives."""
    tiny = PIPELINES[name]
    pipe = tiny.build()
    settings = {"coefficients": [1.0, 0.0], "rel_l1_thresh": 1.0, "signal": signal}
    with holdover.enable(pipe, "tea_cache", **settings) as cache:
        run(pipe, **tiny.call(steps=12))
        planned = [v.computed for v in cache.stats().last.forwards]
        of_time = get_family(pipe.transformer).signal(signal).of_time
        rows = of_time(pipe.transformer, pipe.scheduler.timesteps).flatten(1)
    changes = ((rows[1:] - rows[:-1]).abs().mean(1) / rows[:-1].abs().mean(1)).tolist()
    expected, total = [True], 0.0
    for i, change in enumerate(changes, start=1):
        total += change
        computed = i == len(changes) or total >= 1.0
        expected.append(computed)
        total = 0.0 if computed else total
    branches = len(planned) // 12
    assert planned[::branches] == expected


def test_wan_signals_bring_their_own_coefficients_and_retention():
    tiny = PIPELINES["WanPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "tea_cache", signal="e0", rel_l1_thresh=1e9) as cache:
        assert "ret" in cache.stats().notes[0]
        run(pipe, **tiny.call(steps=12))
        assert cache.stats().last.trace("cond") == "CCCCChhhhhhC"
    with pytest.raises(holdover.ConfigError, match="Did you mean 'e'"):
        holdover.enable(pipe, "tea_cache", signal="e1")
    with pytest.raises(holdover.ConfigError, match="was measured with the signal"):
        holdover.enable(pipe, "tea_cache", signal="e0", profile="tc.wan2.1-t2v-1.3B")


def test_a_profile_by_name_and_an_unknown_one():
    pipe = PIPELINES["FluxPipeline"].build()
    with holdover.enable(pipe, "tea_cache", profile="comfy.flux-kontext", rel_l1_thresh=0.5) as cache:
        assert "comfy.flux-kontext" in cache.stats().notes[0]
    with pytest.raises(holdover.ProfileError, match="flux1-dev"):
        holdover.enable(pipe, "tea_cache", profile="tc.flux1-dve")


def test_estimated_coefficients_by_branch(tmp_path):
    tiny = PIPELINES["FluxPipeline[true_cfg]"]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=12))
    path = str(tmp_path / "flux.json")
    prompts = [tiny.call(steps=12, seed=seed) for seed in range(3)]
    profile = estimate_coefficients(pipe, prompts, path=path, return_dict=False)
    assert dict(profile.fits).keys() == {"", "cond", "uncond"}
    for branch, fit in profile.fits:
        assert 2 <= len(fit.coefficients) <= 5
        assert fit.pairs == (66 if branch == "" else 33)
        assert 0 < fit.low < fit.high
        assert fit.r_squared <= 1
    assert load(path) == profile
    assert isinstance(profile, TeaCacheProfile)
    assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
    with holdover.enable(pipe, "tea_cache", profile=path, rel_l1_thresh=1e9) as cache:
        run(pipe, **tiny.call(steps=12))
        assert cache.stats().last.trace("uncond") == "ChhhhhhhhhhC"


def test_estimation_on_any_model_uses_the_default_signal():
    tiny = PIPELINES["SanaPipeline"]
    pipe = tiny.build()
    profile = estimate_coefficients(pipe, [tiny.call(steps=10)], degree=1)
    assert profile.signal == "input"
    coefficients = profile.fit("").coefficients
    with holdover.enable(pipe, "tea_cache", coefficients=coefficients, rel_l1_thresh=1e9) as cache:
        run(pipe, **tiny.call(steps=10))
        assert cache.stats().held > 0


def test_estimation_after_a_failure_leaves_the_pipeline_alone():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with pytest.raises(TypeError):
        estimate_coefficients(pipe, [{"no_such_argument": 1}])
    with pytest.raises(holdover.ConfigError, match="prompt"):
        estimate_coefficients(pipe, [])
    holdover.enable(pipe, "mag_cache").disable()


def test_fit_recovers_a_polynomial():
    x = [i / 50 for i in range(1, 40)]
    y = [2 * v**3 - v**2 + 0.5 * v + 0.1 for v in x]
    fit = fit_polynomial(x, y, degree=3)
    assert fit.coefficients == pytest.approx((2.0, -1.0, 0.5, 0.1), abs=1e-9)
    assert fit.r_squared == pytest.approx(1.0)
    assert (fit.low, fit.high) == (x[0], x[-1])
    assert fit.monotone
    falling = fit_polynomial(x, [-v for v in y], degree=3)
    assert not falling.monotone
    assert len(falling.coefficients) == 2
    hump = fit_polynomial(x, [v * (0.9 - v) for v in x], degree=4)
    assert hump.monotone
    with pytest.raises(holdover.ConfigError, match="distinct"):
        fit_polynomial([0.1, 0.1], [1.0, 2.0])


class Unusual(nn.Module):
    """A transformer that keeps no list of blocks, so that tracing finds no stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.time = nn.Linear(4, 8), nn.Linear(1, 8)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        temb = self.time(timestep.reshape(-1, 1, 1))
        hidden = self.embed(hidden_states) + temb
        return self.head(hidden + torch.tanh(self.body(hidden)))


def extract(module: Unusual, hidden_states: torch.Tensor, timestep: torch.Tensor) -> CacheContext:
    temb = module.time(timestep.reshape(-1, 1, 1))
    hidden = module.embed(hidden_states) + temb
    return CacheContext(
        modulated_input=hidden,
        hidden_states=hidden,
        encoder_hidden_states=None,
        temb=temb,
        run_transformer_blocks=lambda: (hidden + torch.tanh(module.body(hidden)),),
        postprocess=module.head,
    )


def denoise(model, steps=12):
    latent = torch.linspace(-1, 1, 24).reshape(1, 6, 4)
    with torch.no_grad():
        for i in range(steps):
            latent = latent - model(latent, torch.tensor([1 - i / steps])) / steps
    return latent


@pytest.fixture
def registered():
    holdover.register_extractor("Unusual", extract)
    yield
    unregister_extractor("Unusual")


def test_without_an_extractor_the_whole_transformer_is_one_block():
    model = Unusual().eval()
    plain = denoise(model)
    with holdover.enable(model, "mag_cache", mag_ratios=[1.0] * 12, num_inference_steps=12) as cache:
        held = denoise(model)
        assert cache.stats().held > 5
        assert "the whole transformer" in str(cache.stats())
        with cache.using(mag_threshold=0.0):
            assert torch.equal(denoise(model), plain)
    assert not torch.equal(held, plain)


@pytest.mark.parametrize(
    ("method", "hold", "nothing"),
    [
        ("tea_cache", {"coefficients": [1.0, 0.0], "rel_l1_thresh": 1e9}, {"rel_l1_thresh": 0.0}),
        ("mag_cache", {"mag_ratios": [1.0] * 12, "num_inference_steps": 12}, {"mag_threshold": 0.0}),
    ],
)
def test_a_registered_extractor_makes_it_work(registered, method, hold, nothing):
    model = Unusual().eval()
    plain = denoise(model)
    with holdover.enable(model, method, **hold) as cache:
        held = denoise(model)
        assert cache.stats().held > 5
        with cache.using(**nothing):
            assert torch.equal(denoise(model), plain)
    assert torch.isfinite(held).all()
    assert torch.equal(denoise(model), plain)


def test_an_extractor_whose_postprocess_needs_more_is_refused():
    def leaky(module, hidden_states, timestep):
        context = extract(module, hidden_states, timestep)
        context.postprocess = lambda hidden: module.head(hidden) * torch.rand(())
        return context

    holdover.register_extractor("Unusual", leaky)
    model = Unusual().eval()
    with holdover.enable(model, "mag_cache", mag_ratios=[1.0] * 4):
        with pytest.raises(holdover.UnsupportedModelError, match="does not replay"):
            denoise(model)
    unregister_extractor("Unusual")


def test_a_wrong_context_is_refused_before_anything_is_held():
    holdover.register_extractor("Unusual", lambda module, *args: "no context")
    model = Unusual().eval()
    with holdover.enable(model, "mag_cache", mag_ratios=[1.0] * 4), pytest.raises(TypeError, match="CacheContext"):
        denoise(model)
    unregister_extractor("Unusual")


@pytest.mark.parametrize("named", ["auto", "QwenImageTransformer2DModel", "FluxTransformer2DModel"])
def test_the_type_of_the_transformer_is_its_own_unless_another_is_named(named):
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "tea_cache", transformer_type=named) as cache:
        assert cache.settings.transformer_type == "FluxTransformer2DModel"
        assert "profile tc.flux1-dev" in str(cache.stats())


def test_a_type_without_constants_is_named_in_the_error():
    pipe = PIPELINES["FluxPipeline"].build()
    with pytest.raises(holdover.ConfigError, match="No TeaCache coefficients ship for Flux9Transformer"):
        holdover.enable(pipe, "tea_cache", transformer_type="Flux9Transformer")
