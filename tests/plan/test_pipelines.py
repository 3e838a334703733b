"""On pipelines of every kind: all steps computed is bit-identical, and a plan is kept in every branch."""

from __future__ import annotations

import diffusers.guiders as g
import pytest
import torch

import holdover
from holdover.plan.generation import guidance_of
from holdover.plan.search import growing
from snapshots import denoiser, differences
from tiny.modular import GUIDERS, build, call
from tiny.modular import run as modular_run
from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import quiet

NAMES = [
    "FluxPipeline",
    "FluxPipeline[true_cfg]",
    "FluxImg2ImgPipeline",
    "FluxControlNetPipeline",
    "Flux2Pipeline",
    "ChromaPipeline",
    "HunyuanImagePipeline[interval]",
    "StableDiffusion3Pipeline",
    "StableDiffusion3Pipeline[skip_layers]",
    "StableDiffusion3Pipeline[cutoff]",
    "QwenImagePipeline",
    "PixArtSigmaPipeline",
    "SanaPipeline",
    "Lumina2Pipeline[cfg_trunc]",
    "ZImagePipeline[cfg_truncation]",
    "HiDreamImagePipeline",
    "WanPipeline[cutoff]",
    "WanPipeline[ti2v]",
    "WanPipeline[2.2]",
    "LTXPipeline",
    "CogVideoXPipeline[5b]",
    "HunyuanVideoPipeline",
    "MochiPipeline",
    "CosmosTextToWorldPipeline",
    "StableAudioPipeline",
]
STEPS = 8
BUDGET = 3
LATE = ("nothing to hold yet", "the inputs have another shape, dtype or device")


@pytest.fixture(scope="module", params=NAMES)
def built(request):
    tiny = PIPELINES[request.param]
    pipe = tiny.build()
    return tiny, pipe, run(pipe, **tiny.call(steps=STEPS))


def test_every_step_computed_is_bit_identical(built):
    tiny, pipe, plain = built
    with holdover.enable(pipe, "plan", schedule=tuple(range(STEPS))) as cache:
        assert torch.equal(run(pipe, **tiny.call(steps=STEPS)), plain)
        assert cache.stats().held == 0
        assert cache.stats().computed > 0


def test_a_plan_is_kept_in_every_branch_and_leaves_nothing_behind(built):
    tiny, pipe, plain = built
    before = denoiser(pipe)
    with pytest.warns(holdover.HoldoverWarning, match="This plan was not measured on this"):
        cache = holdover.enable(pipe, "plan", profile="none", budget=BUDGET)
    with cache:
        first, second = run(pipe, **tiny.call(steps=STEPS)), run(pipe, **tiny.call(steps=STEPS))
        generation = cache.stats().last
        assert "computed (growing window, nothing measured)" in str(cache.stats())
    assert differences(before, denoiser(pipe)) == []
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, plain)
    assert_kept(generation)


def assert_kept(generation):
    """Scheduled steps are computed and the others held, but that each branch and expert begins computed."""
    start = min(forward.step for forward in generation.forwards)
    expected = {start + step for step in growing(generation.steps, BUDGET)}
    begun = set()
    for forward in generation.forwards:
        starts = forward.transformer not in begun
        begun.add(forward.transformer)
        expected |= {forward.step} if starts else set()
        assert forward.computed == (forward.step in expected) or forward.reason in LATE


def test_guider():
    """A plan has the mix of the guider's passes; another scale is planned for, another guider is refused."""
    pipe = build("wan", g.ClassifierFreeGuidance(4.0))
    own = {k: v for k, v in call("wan", STEPS).items() if k not in ("num_inference_steps", "generator")}
    with quiet():
        profile = holdover.calibrate(pipe, [own] * 2, STEPS, effort="quick", progress=False)
        with pytest.raises(holdover.ConfigError, match="that of its guider"):
            holdover.calibrate(pipe, [own], STEPS, guidance_scale=2.0, effort="quick", progress=False)
    assert profile.facts.branches == ("pred_cond", "pred_uncond")
    assert profile.facts.mix == pytest.approx((4.0, -3.0), abs=1e-2)
    with holdover.enable(pipe, "plan", profile=profile, budget=3) as cache:
        modular_run(pipe, "wan", STEPS)
        assert [cache.stats().last.trace(branch).count("C") for branch in profile.facts.branches] == [3, 3]
        pipe.guider = pipe.guider.new(guidance_scale=2.0)
        modular_run(pipe, "wan", STEPS)
        for guider in (g.AdaptiveProjectedGuidance(4.0), g.ClassifierFreeGuidance(4.0, start=0.25)):
            pipe.guider = guider
            with pytest.raises(holdover.ProfileError, match="was measured with ClassifierFreeGuidance"):
                modular_run(pipe, "wan", STEPS)


def test_a_guider_is_known_by_its_settings_as_they_are(tmp_path):
    """Not as they were given: a setting that is changed later counts, another way to write the same one does not."""
    _, make, _ = GUIDERS["skip layers"]
    pipe = build("wan", make())
    first = guidance_of(pipe)
    pipe.guider.save_pretrained(tmp_path)
    for same in (type(pipe.guider).from_pretrained(tmp_path), make()):
        pipe.update_components(guider=same)
        assert guidance_of(pipe) == first
    pipe.guider.skip_layer_guidance_scale = 9.0
    assert guidance_of(pipe) != first
    names = []
    for start in (0, 0.0):
        pipe.update_components(guider=g.ClassifierFreeGuidance(4.0, start=start))
        names.append(guidance_of(pipe))
    assert names[0] == names[1]
    pipe.guider.guidance_rescale = 0.9
    assert guidance_of(pipe) != names[0]
