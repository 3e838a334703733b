"""Profiles: shipped ones are sourced, the right one is found, files round-trip, wrong files are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
from torch import nn

from holdover.errors import ProfileError
from holdover.profiles import (
    MagCacheDefaults,
    MagCacheProfile,
    MagCacheRatios,
    MethodProfile,
    TeaCacheFit,
    TeaCacheProfile,
    find,
    load,
    save,
    shipped,
)

TEA, MAG = shipped("tea_cache"), shipped("mag_cache")
EVERY: tuple[MethodProfile, ...] = (*TEA, *MAG)


def named(profile: MethodProfile) -> str:
    return profile.name


# What ships


@pytest.mark.parametrize("profile", EVERY, ids=named)
def test_a_shipped_profile_says_where_it_comes_from(profile: MethodProfile) -> None:
    source = dict(profile.source)
    if "measured" in source:
        assert source["measured"] == "holdover"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", source["date"])
        assert (Path(__file__).parents[1] / source["recipe"]).exists()
        return
    assert source["id"] == profile.name
    assert source["repo"]
    assert re.search(r":\d+$", source["path"])
    assert re.fullmatch(r"[0-9a-f]{40}", source.get("commit", "")) or re.search(r"wheel \d", source["repo"])


@pytest.mark.parametrize("profile", EVERY, ids=named)
def test_a_shipped_profile_is_for_a_class_and_for_pipelines_of_diffusers(profile: MethodProfile) -> None:
    vllm_omni = ("Bagel", "SenseNovaU1ForCausalLM", "HunyuanImage3Pipeline")  # models that diffusers does not have
    assert hasattr(diffusers, profile.transformer_class) or profile.transformer_class in vllm_omni
    own = ("EmojiPipeline", "EmojiMotionPipeline")
    assert all(hasattr(diffusers, name) or name in own for name in profile.pipelines)


@pytest.mark.parametrize("profile", [p for p in TEA if "measured" not in dict(p.source)], ids=named)
def test_published_polynomials_have_degree_four(profile: TeaCacheProfile) -> None:
    assert [branch for branch, _ in profile.fits] == [""]
    assert len(profile.fit("cond").coefficients) == 5
    assert profile.retained >= 1


@pytest.mark.parametrize("profile", MAG, ids=named)
def test_published_ratios_are_one_a_step_and_begin_with_one(profile: MagCacheProfile) -> None:
    for branch in ("", "cond", "uncond", "another"):
        ratios = profile.ratios(branch)
        assert len(ratios) == profile.num_inference_steps
        assert ratios[0] == 1.0


def test_names_are_unique_within_a_method() -> None:
    assert len({p.name for p in TEA}) == len(TEA)
    assert len({p.name for p in MAG}) == len(MAG)


def test_no_two_entries_are_the_same_numbers_for_the_same_model() -> None:
    assert len({(p.transformer_class, p.fits, p.match) for p in TEA}) == len(TEA) - 1  # sglang's two I2V entries
    assert len({(p.transformer_class, p.branches) for p in MAG}) == len(MAG)


def test_upstream_flux_never_holds_its_step_11() -> None:
    flux = next(p for p in MAG if p.name == "mc.flux1-dev")
    assert (flux.num_inference_steps, flux.never_hold) == (28, (11,))
    assert flux.defaults == MagCacheDefaults(0.24, 5, 0.1)


def test_shipped_profiles_are_read_once() -> None:
    assert shipped("tea_cache") is TEA


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ProfileError, match="Did you mean 'tea_cache'"):
        shipped("teacache")  # type: ignore[call-overload]


# Which one is found


def fake(kind: str, **config: Any) -> Any:
    """An instance of a class of that name with that config."""
    return type(kind, (nn.Module,), {"config": config})()


def pipeline(kind: str = "SomePipeline", scheduler: Any = None, **config: Any) -> Any:
    return type(kind, (), {"config": config, "scheduler": scheduler})()


FLUX, WAN, COG = "FluxTransformer2DModel", "WanTransformer3DModel", "CogVideoXTransformer3DModel"
T2V_13, T2V_14 = {"num_layers": 30, "in_channels": 16}, {"num_layers": 40, "in_channels": 16}
I2V_14, TI2V_5 = {"num_layers": 40, "in_channels": 36}, {"num_layers": 30, "in_channels": 48}
LCM = type("FlowMatchLCMScheduler", (), {"config": {"shift": 3.0}})()
LCM_6 = type("FlowMatchLCMScheduler", (), {"config": {"shift": 6.0}})()


@pytest.mark.parametrize(
    ("method", "transformer", "pipe", "name"),
    [
        ("tea_cache", fake(FLUX), None, "tc.flux1-dev"),
        ("tea_cache", fake(FLUX), pipeline("FluxPipeline"), "tc.flux1-dev"),
        ("tea_cache", fake(FLUX), pipeline("FluxKontextPipeline"), "comfy.flux-kontext"),
        ("tea_cache", fake(WAN, **T2V_13), None, "tc.wan2.1-t2v-1.3B"),
        ("tea_cache", fake(WAN, **T2V_14), None, "tc.wan2.1-t2v-14B"),
        ("tea_cache", fake(WAN, **I2V_14), None, "tc.wan2.1-i2v-14B-480P"),
        ("tea_cache", fake(COG, num_layers=30, patch_size_t=None, in_channels=16), None, "tc.cogvideox-2b"),
        ("tea_cache", fake(COG, num_layers=42, patch_size_t=None, in_channels=16), None, "tc.cogvideox-5b"),
        (
            "tea_cache",
            fake(COG, num_layers=42, patch_size_t=None, in_channels=32),
            None,
            "tc.cogvideox-5b-i2v",
        ),
        ("tea_cache", fake(COG, num_layers=42, patch_size_t=2, in_channels=16), None, "tc.cogvideox1.5-5b"),
        (
            "tea_cache",
            fake(COG, num_layers=42, patch_size_t=2, in_channels=32),
            None,
            "tc.cogvideox1.5-5b-i2v",
        ),
        (
            "tea_cache",
            fake("Flux2Transformer2DModel", guidance_embeds=True),
            None,
            "vllm.Flux2Transformer2DModel",
        ),
        ("tea_cache", fake("Flux2Transformer2DModel", guidance_embeds=False), None, "vllm.Flux2Klein"),
        ("tea_cache", fake("HiDreamImageTransformer2DModel"), pipeline(), "tc.hidream-i1-full"),
        (
            "tea_cache",
            fake("HiDreamImageTransformer2DModel"),
            pipeline(scheduler=LCM),
            "comfy.hidream_i1_fast",
        ),
        (
            "tea_cache",
            fake("HiDreamImageTransformer2DModel"),
            pipeline(scheduler=LCM_6),
            "comfy.hidream_i1_dev",
        ),
        ("mag_cache", fake(FLUX), None, "mc.flux1-dev"),
        ("mag_cache", fake(FLUX), pipeline("FluxKontextPipeline"), "mc.flux1-kontext"),
        ("mag_cache", fake("QwenImageTransformer2DModel"), pipeline("QwenImagePipeline"), "mc.qwen-image"),
        (
            "mag_cache",
            fake("QwenImageTransformer2DModel"),
            pipeline("QwenImageEditPipeline"),
            "mc.qwen-image-edit",
        ),
        ("mag_cache", fake("HunyuanVideoTransformer3DModel"), None, "mc.hunyuanvideo-720p"),
        ("mag_cache", fake(WAN, **T2V_13), pipeline(boundary_ratio=None), "mc.wan2.1-t2v-1.3B"),
        ("mag_cache", fake(WAN, **T2V_14), pipeline(boundary_ratio=None), "mc.wan2.1-t2v-14B"),
        ("mag_cache", fake(WAN, **T2V_14), pipeline(boundary_ratio=0.875), "mc.wan2.2-t2v-A14B"),
        ("mag_cache", fake(WAN, **T2V_14), None, "mc.wan2.1-t2v-14B"),
        ("mag_cache", fake(WAN, **I2V_14), pipeline(boundary_ratio=None), "mc.wan2.1-i2v-480P"),
        ("mag_cache", fake(WAN, **I2V_14), pipeline(boundary_ratio=0.9), "mc.wan2.2-i2v-A14B"),
        ("mag_cache", fake(WAN, **TI2V_5), pipeline("WanPipeline"), "mc.wan2.2-ti2v-5B-t2v"),
        ("mag_cache", fake(WAN, **TI2V_5), pipeline("WanImageToVideoPipeline"), "mc.wan2.2-ti2v-5B-i2v"),
        ("mag_cache", fake("WanVACETransformer3DModel", num_layers=30), None, "mc.wan2.1-vace-1.3B"),
        ("mag_cache", fake("WanVACETransformer3DModel", num_layers=40), None, "mc.wan2.1-vace-14B"),
        # none agrees and none is without constraints: the class's first
        ("tea_cache", fake(WAN, num_layers=2, in_channels=4), None, "tc.wan2.1-t2v-1.3B"),
    ],
)
def test_the_variant_is_found_by_config_and_pipeline(method: Any, transformer: Any, pipe: Any, name: str) -> None:
    found = find(method, transformer, pipe)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("method", ["tea_cache", "mag_cache"])
def test_an_unmeasured_model_has_no_profile(method: Any) -> None:
    assert find(method, nn.Linear(1, 1)) is None


def test_a_subclass_is_known_by_its_base() -> None:
    base = type(fake(FLUX))
    found = find("tea_cache", type("MyFlux", (base,), {})())
    assert found is not None
    assert found.name == "tc.flux1-dev"


def test_a_profile_asked_for_by_name_wins() -> None:
    found = find("tea_cache", fake(FLUX), name="tc.wan2.1-t2v-14B-ret")
    assert found is not None
    assert (found.signal, found.retained) == ("e0", 5)


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ProfileError, match=r"no mag_cache profile 'mc\.flux1'.*Did you mean"):
        find("mag_cache", fake(FLUX), name="mc.flux1")
    with pytest.raises(ProfileError, match=r"For FluxTransformer2DModel there are tc\.flux1-dev, comfy"):
        find("tea_cache", fake(FLUX), name="?")


def test_a_file_can_be_asked_for_by_its_path(tmp_path: Path) -> None:
    save(MINE, tmp_path / "mine.json")
    assert find("mag_cache", nn.Identity(), name=str(tmp_path / "mine.json")) == MINE
    with pytest.raises(ProfileError, match="is a mag_cache profile; a tea_cache profile is needed"):
        find("tea_cache", nn.Identity(), name=str(tmp_path / "mine.json"))


# Branches


def test_a_branch_without_ratios_of_its_own_has_the_conditional_ones() -> None:
    assert MINE.ratios("uncond") == (1.0, 0.8, 0.7)
    assert MINE.ratios("third") == MINE.ratios("cond") == (1.0, 0.9, 1e-3)
    assert FITTED.fit("uncond") == FITTED.fit("other") == TeaCacheFit((1.0, 0.0))
    assert FITTED.fit("cond").r_squared == 0.5


MINE = MagCacheProfile(
    name="mine",
    model="a model",
    transformer_class="FluxTransformer2DModel",
    num_inference_steps=3,
    branches=(
        ("uncond", MagCacheRatios((1.0, 0.8, 0.7))),
        ("cond", MagCacheRatios((1.0, 0.9, 1e-3), stds=(0.0, 0.1, 0.2), cosine_distances=(0.0, 1 / 3, 0.1))),
    ),
    noise=(1.0, 2 / 3, 0.1),
    never_hold=(1,),
    defaults=MagCacheDefaults(0.1, 3, None),
    match=(("num_layers", 2), ("guidance_embeds", True), ("shift", 1.5), ("image_dim", None), ("kind", "x")),
    pipelines=("FluxPipeline",),
    source=(("tool", "holdover"), ("date", "2025-01-01")),
    notes="ünïcode “notes”",
)
FITTED = TeaCacheProfile(
    name="fitted",
    model="a model",
    transformer_class="FluxTransformer2DModel",
    signal="modulated",
    fits=(
        ("", TeaCacheFit((1.0, 0.0))),
        ("cond", TeaCacheFit((0.1, -2e-17, 3.0), 0.01, 0.3, r_squared=0.5, monotone=False, pairs=270)),
    ),
    retained=0,
    thresholds=(0.2,),
)


# Files


@pytest.mark.parametrize("profile", [*EVERY, MINE, FITTED], ids=named)
def test_what_is_saved_is_what_is_loaded(profile: MethodProfile, tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    save(profile, path)
    assert load(path) == profile
    assert hash(load(path)) == hash(profile)
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    save(FITTED, tmp_path / "p.json")
    values = json.loads((tmp_path / "p.json").read_text())
    assert (values["format"], values["version"], values["method"]) == ("holdover-profile", 1, "tea_cache")


def test_only_profiles_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="SimpleNamespace is not a profile"):
        save(SimpleNamespace(), tmp_path / "p.json")  # type: ignore[arg-type]


def changed(profile: MethodProfile, **entries: Any) -> Callable[[Path], None]:
    """Write the profile's file with some entries replaced, or removed if the value is `...`."""

    def write(path: Path) -> None:
        save(profile, path)
        values = {**json.loads(path.read_text()), **entries}
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return write


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content)

    return write


def truncated(path: Path) -> None:
    save(MINE, path)
    path.write_text(path.read_text()[:200])


RATIOS = {"ratios": [1.0, 0.9, 0.8]}


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "No profile could be read"),
        (text("not json"), "is not JSON"),
        (text(""), "truncated"),
        (truncated, "truncated"),
        (lambda path: path.write_bytes(b"\x80\x04\x95\xff"), "not even text"),
        (text("[" * 100_000), "is not JSON"),
        (text('{"format": ' + "1" * 5000 + "}"), "is not JSON"),
        (text("[1, 2]"), "not a holdover profile"),
        (text('{"coefficients": [1.0]}'), "not a holdover profile"),
        (changed(MINE, format="other"), "not a holdover profile"),
        (changed(MINE, version=2), "version 2; this holdover reads version 1"),
        (changed(MINE, version=...), "version None"),
        (changed(MINE, version=True), "version True"),
        (changed(MINE, method="plan"), "method 'plan'"),
        (changed(MINE, method=["mag_cache"]), "known are tea_cache, mag_cache"),
        (changed(MINE, method="tea_cache"), "has no entry"),
        (changed(MINE, name=3), "name must be text, not a whole number"),
        (changed(MINE, nmae="x"), "no entry 'nmae'. Did you mean 'name'"),
        (changed(MINE, branches=...), "lacks branches"),
        (changed(MINE, branches=[]), "branches must be an object, not a list"),
        (changed(MINE, branches={}), "has no branches"),
        (changed(MINE, branches={"": []}), "must be an object, not a list"),
        (changed(MINE, branches={"": {"ratios": []}}), "has no ratios"),
        (changed(MINE, branches={"": {"ratios": [1.0, 0.9]}}), "2 ratios for 3 steps"),
        (changed(MINE, branches={"": {"ratios": [1.0, 0.9, 0.0]}}), "above 0"),
        (
            changed(MINE, branches={"": {"ratios": [1.0, 0.9, "0.8"]}}),
            r"ratios\[2\] must be a number, not text",
        ),
        (changed(MINE, branches={"": {"ratios": [1.0, 0.9, True]}}), "must be a number, not true or false"),
        (changed(MINE, branches={"": {"ratios": [1.0, 0.9, float("nan")]}}), "NaN; only finite"),
        (changed(MINE, branches={"": {"ratios": [1.0, 0.9, float("inf")]}}), "Infinity; only finite"),
        (changed(MINE, branches={"": {"ratios": [1.0, 0.9, 10**400]}}), "must be a finite number"),
        (changed(MINE, branches={"": RATIOS | {"stds": [0.1]}}), "1 stds for 3 ratios"),
        (changed(MINE, noise=[1.0]), "1 noise levels for 3 steps"),
        (changed(MINE, never_hold=[3]), "never_hold is outside"),
        (changed(MINE, never_hold=[0.5]), r"never_hold\[0\] must be a whole number, not a number"),
        (changed(MINE, num_inference_steps=3.0), "num_inference_steps must be a whole number"),
        (
            changed(MINE, defaults={"threshold": "high"}),
            "defaults.threshold must be a number or null, not text",
        ),
        (changed(MINE, match={"num_layers": [1]}), "match.num_layers must be .*, not a list"),
        (changed(MINE, transformer_class=""), "names no transformer class"),
        (changed(FITTED, fits={}), "has no fit"),
        (changed(FITTED, fits={"": {"coefficients": []}}), "has no coefficients"),
        (changed(FITTED, fits={"": {"coefficients": [1.0], "low": 2.0, "high": 1.0}}), "range is empty"),
        (changed(FITTED, signal=""), "names no signal"),
        (changed(FITTED, retained=-1), "retains -1 steps"),
        (changed(FITTED, notes=None), "notes must be text, not null"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(write: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write(path)
    with pytest.raises(ProfileError, match=reason) as error:
        load(path)
    assert "p.json" in str(error.value)


def test_a_number_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    save(FITTED, tmp_path / "p.json")
    content = (tmp_path / "p.json").read_text().replace('"thresholds": [0.2]', '"thresholds": [1e999]')
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ProfileError, match=r"thresholds\[0\] must be a finite number"):
        load(tmp_path / "p.json")


def test_a_profile_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ProfileError, match="4 steps"):
        replace(MINE, num_inference_steps=4)
    with pytest.raises(ProfileError, match="finite"):
        TeaCacheFit((1.0, float("inf")))
    with pytest.raises(ProfileError, match="finite"):
        replace(MINE, match=(("shift", float("nan")),))
