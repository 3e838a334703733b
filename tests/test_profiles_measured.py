"""Measured profiles as files: written completely or not at all, loaded equal, refused with the reason if wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save as serialized
from safetensors.torch import save_file

from holdover import HoldoverError, Profile, ProfileError, WriteError
from holdover.profiles import (
    Certificate,
    MagCacheProfile,
    MagCacheRatios,
    MeasuredPlan,
    ModelIdentity,
    ProfileFacts,
    TeaCacheFit,
    TeaCacheProfile,
)
from holdover.profiles.files import compute_digest, encode

STEPS = 6
NOISE = tuple(np.linspace(1.0, 1 / STEPS, STEPS).tolist())
PLAN = {"noise": NOISE, "scheduler": "S", "computed": [0, 2], "weights": [1.0], "origin": "polished", "psnr": 1.0}


def facts(**changes) -> ProfileFacts:
    kind = {"name": "x", "model": "M", "transformer_class": "M"}
    made = ProfileFacts(
        name="tiny",
        pipeline="TinyPipeline",
        scheduler="FlowMatchEulerDiscreteScheduler",
        noise=NOISE,
        models=(("transformer", ModelIdentity("M", "0123456789abcdef", "bfloat16", ("style",))),),
        prompts=2,
        prompts_hash="ffff",
        date="2026-01-31",
        versions=(("holdover", "0.1.0"), ("torch", "2.13")),
        guidance=3.5,
        call=(("height", 64), ("negative_prompt", "grey"), ("flag", True)),
        scale=NOISE,
        carry=NOISE,
        starts=(0, 3),
        psnr_offset=-1.25,
        surprise=(0.5, 2.0),
        tea_cache=(("transformer", TeaCacheProfile(**kind, signal="s", fits=(("", TeaCacheFit((1.0, 0.0))),))),),
        mag_cache=(
            (
                "transformer",
                MagCacheProfile(**kind, num_inference_steps=2, branches=(("cond", MagCacheRatios((1.0, 0.9))),)),
            ),
        ),
        schedules=(
            MeasuredPlan(NOISE, "S", (0, 2, 4), (1.0, -0.5, 1.5), "polished", 41.5, timestep_factors=(0.99, 1.0, 1.01)),
        ),
        certificates=(Certificate("psnr>=40", (0, 2), NOISE, 0.95, 0.9, 60, 1, "eeee", "S", "ffff", 3.5, ("style",)),),
        qualities=(("high", "psnr>=42"), ("draft", "ssim>=0.9")),
    )
    return dataclasses.replace(made, **changes)


def profile(**changes) -> Profile:
    random = np.random.default_rng(0)
    given = {
        "facts": facts(),
        "grams": random.normal(size=(2, STEPS, STEPS)),
        "growth": random.normal(size=(2, STEPS + 1)),
        "seams": {"transformer": random.normal(size=(2, STEPS, STEPS))},
    }
    return Profile(**given | changes)


@pytest.fixture
def saved(tmp_path) -> Path:
    return profile().save(tmp_path / "deep" / "tiny.safetensors")


def head_of(path: Path) -> tuple[dict, dict]:
    """The whole safetensors header, and holdover's own entry in it."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header, json.loads(header["__metadata__"]["holdover"])


def rewritten(path: Path, text: str | None, arrays: dict | None = None) -> Path:
    own = {"grams": profile().grams, "growth": profile().growth, "seam.transformer": profile().seams["transformer"]}
    path.write_bytes(serialized(own if arrays is None else arrays, None if text is None else {"holdover": text}))
    return path


def test_what_is_saved_is_loaded(saved):
    loaded = Profile.load(saved)
    assert loaded == profile()
    assert hash(loaded) == hash(profile())
    assert loaded.facts == facts()
    assert np.array_equal(loaded.grams, profile().grams)
    assert np.array_equal(loaded.growth, profile().growth)
    assert np.array_equal(loaded.seams["transformer"], profile().seams["transformer"])


def test_a_profile_with_the_least_in_it_is_saved_and_loaded(tmp_path):
    fields = {f.name: f.default for f in dataclasses.fields(ProfileFacts) if f.default is not dataclasses.MISSING}
    bare = profile(facts=facts(**fields), seams={})
    assert Profile.load(bare.save(tmp_path / "bare.safetensors")).facts == bare.facts


def test_a_file_from_before_there_were_qualities_has_the_same_digest(tmp_path):
    plain = profile(facts=facts(qualities=()))
    own = head_of(plain.save(tmp_path / "plain.safetensors"))[1]
    assert "qualities" not in own["facts"]
    assert plain.digest == own["digest"] != profile().digest
    assert plain.with_quality("draft", "ssim>=0.9").with_quality("high", "psnr>=42") == profile()


def test_any_difference_makes_it_another_profile():
    others = [
        profile(facts=facts(guidance=3.6)),
        profile(grams=np.nextafter(profile().grams, 9.0)),
        profile(growth=profile().growth + 1),
        profile(seams={}),
        profile(seams={"transformer_2": profile().seams["transformer"]}),
    ]
    assert len({profile(), *others}) == 6
    assert profile() != "tiny"


def test_nothing_in_the_file_is_pickled(saved):
    data = saved.read_bytes()
    header, own = head_of(saved)
    assert set(header) == {"__metadata__", "grams", "growth", "seam.transformer"}
    assert own["facts"]["name"] == "tiny"
    assert b"numpy" not in data
    assert b"pickle" not in data


def test_an_older_file_is_replaced_and_nothing_else_is_left(saved):
    changed = profile(facts=facts(name="newer"))
    changed.save(saved)
    assert Profile.load(saved) == changed
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_save_that_fails_leaves_the_older_file(saved):
    saved.with_name(f"{saved.name}.new").symlink_to("/dev/full")
    with pytest.raises(WriteError, match=r"Cannot write .*\.safetensors: No space left on device\."):
        profile(facts=facts(name="newer")).save(saved)
    assert Profile.load(saved) == profile()
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    with pytest.raises(WriteError, match="Cannot write"):
        profile().save(saved / "inside.safetensors")


@pytest.mark.parametrize("name", ["tiny.json", "tiny", "tiny.pt"])
def test_the_suffix_is_asked_for(tmp_path, name):
    with pytest.raises(ProfileError, match=r"saved as a \.safetensors file"):
        profile().save(tmp_path / name)


def test_a_truncated_file_is_refused_wherever_it_is_cut(saved):
    data = saved.read_bytes()
    for length in (0, 4, 8, 200, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        with pytest.raises(ProfileError, match="truncated"):
            Profile.load(saved)


def test_one_wrong_byte_anywhere_is_a_profile_error(saved):
    data = saved.read_bytes()
    places = np.random.default_rng(0).choice(len(data), 120, replace=False)
    for place in sorted({*places.tolist(), 0, 8, len(data) - 1}):
        saved.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        with pytest.raises(ProfileError):
            Profile.load(saved)


def test_a_changed_array_is_damage(saved):
    data = bytearray(saved.read_bytes())
    data[-20] ^= 1
    saved.write_bytes(bytes(data))
    with pytest.raises(ProfileError, match="do not match its digest"):
        Profile.load(saved)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[]", "not a holdover profile"),
        ("null", "not a holdover profile"),
        ('{"format": "another", "facts": {}}', "not a holdover profile"),
        ('{"format": "holdover-measured-profile", "version": 1, "facts": []}', "not a holdover profile"),
        ('{"format": "holdover-measured-profile", "version": 1, "facts": {}}', "lacks name"),
        (None, "not a holdover profile"),
    ],
)
def test_facts_that_are_none(saved, text, said):
    with pytest.raises(ProfileError, match=said):
        Profile.load(rewritten(saved, text))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_named(saved, version):
    _, own = head_of(saved)
    with pytest.raises(ProfileError, match=f"version {version!r}; this holdover reads version 1"):
        Profile.load(rewritten(saved, json.dumps({**own, "version": version})))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("name", 3, r"facts\.name must be text|\.name must be text"),
        ("noise", "all", r"\.noise must be a list"),
        ("guidance", float("inf"), "finite"),
        ("promts", 3, "Did you mean 'prompts'"),
        ("models", [], r"\.models must be an object"),
        ("qualities", {"hihg": "psnr>=40"}, "no quality 'hihg'. Did you mean 'high'"),
        ("qualities", {"high": "pnsr>=40"}, "no metric 'pnsr'. Did you mean 'psnr'"),
        ("qualities", {"high": 40}, r"\.qualities\.high must be text"),
        ("schedules", [PLAN | {"timestep_factors": [1.0]}], "1 timestep_factors for 2 computed steps"),
        ("schedules", [PLAN | {"timestep_factors": [1.0, -0.1]}], "timestep_factors of a plan must be 0.5 to 2"),
    ],
)
def test_a_wrong_fact_is_named(saved, name, value, said):
    _, own = head_of(saved)
    own["facts"][name] = value
    with pytest.raises(ProfileError, match=said):
        Profile.load(rewritten(saved, json.dumps(own)))


def test_a_missing_array_is_named(saved):
    header = profile()
    kept = {"growth": header.growth}
    own = {**head_of(saved)[1], "digest": compute_digest(encode(header.facts), kept)}
    with pytest.raises(ProfileError, match="lacks the array 'grams'"):
        Profile.load(rewritten(saved, json.dumps(own), kept))


def test_weights_of_a_model_are_not_a_profile(tmp_path):
    """The most likely mistake: a checkpoint, in a dtype that numpy does not have."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4, 4, dtype=torch.bfloat16)}, path)
    with pytest.raises(ProfileError, match="not a holdover profile"):
        Profile.load(path)
    save_file({"weight": torch.zeros(4, 4)}, path)
    with pytest.raises(ProfileError, match="not a holdover profile"):
        Profile.load(path)


def test_something_that_is_no_file(tmp_path):
    with pytest.raises(ProfileError, match="No such file"):
        Profile.load(tmp_path / "none.safetensors")
    with pytest.raises(ProfileError, match="could be read|truncated"):
        Profile.load(tmp_path)
    (tmp_path / "text.safetensors").write_text("a profile, I promise")
    with pytest.raises(ProfileError, match="not a profile"):
        Profile.load(tmp_path / "text.safetensors")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"effort": "banana"}, "its effort is 'banana'"),
        ({"prompts": -4}, "measured on -4 prompts"),
        ({"psnr_offset": 1e308}, "psnr_offset is 1e"),
        ({"schedules": [{"computed": (0, 99)}]}, r"a plan computes \(0, 99\) of 6 steps"),
        ({"schedules": [{"computed": (2, 0)}]}, "a plan computes"),
        ({"schedules": [{"depth": 0}]}, "a plan has depth 0"),
        ({"schedules": [{"weights": (float("inf"),)}]}, "must be finite"),
        ({"certificates": [{"share": 7.0}]}, "the share of a certificate is 7.0"),
        ({"certificates": [{"target": "lips>=3"}]}, "no metric 'lips'"),
        ({"certificates": [{"computed": ()}]}, "a certificate computes"),
    ],
)
def test_facts_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ProfileError, match=said):
        dataclasses.replace(facts(), **{key: with_each(key, value) for key, value in changes.items()})


def with_each(name, value):
    """The first schedule or certificate with other values; anything else as it is."""
    kinds = {"schedules": facts().schedules, "certificates": facts().certificates}
    return tuple(dataclasses.replace(kinds[name][0], **one) for one in value) if name in kinds else value


@pytest.mark.parametrize("name", ["grams", "growth"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(name, value):
    array = getattr(profile(), name).copy()
    array.flat[3] = value
    with pytest.raises(ProfileError, match="not finite"):
        profile(**{name: array})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grams": np.zeros((2, STEPS, STEPS + 1))}, "Gram matrices do not fit"),
        ({"grams": np.zeros((0, STEPS, STEPS))}, "Gram matrices do not fit"),
        ({"grams": np.zeros((STEPS, STEPS))}, "Gram matrices do not fit"),
        ({"grams": np.float64(1.0)}, "Gram matrices do not fit"),
        ({"growth": np.zeros((2, STEPS))}, "growth does not fit"),
        ({"growth": np.zeros((1, STEPS + 1))}, "growth does not fit"),
        ({"facts": facts(noise=())}, "no steps"),
        ({"facts": facts(scale=(1.0,), carry=(0.0,))}, "scale and carry do not fit"),
        ({"facts": facts(carry=())}, "scale and carry do not fit"),
        ({"facts": facts(scale=(*NOISE[:-1], 0.0), carry=NOISE)}, "scale and carry do not fit"),
        ({"facts": facts(starts=())}, "starts are not ascending steps from 0"),
        ({"facts": facts(starts=(1,))}, "starts are not ascending steps from 0"),
        ({"facts": facts(starts=(0, 3, 3))}, "starts are not ascending steps from 0"),
        ({"facts": facts(starts=(0, STEPS))}, "starts are not ascending steps from 0"),
        (
            {"seams": {"transformer": np.zeros((2, STEPS, STEPS + 1))}},
            "residuals' Gram matrices of 'transformer'",
        ),
        ({"seams": {"transformer": np.zeros(3)}}, "residuals' Gram matrices of 'transformer'"),
        ({"seams": {"transformer": np.full((2, STEPS, STEPS), np.nan)}}, "not finite"),
    ],
)
def test_arrays_that_do_not_fit(changes, said):
    with pytest.raises(ProfileError, match=said):
        profile(**changes)


def test_a_profile_error_is_a_value_error_of_ours():
    assert issubclass(ProfileError, (HoldoverError, ValueError))


def test_a_certificate_in_plain_words():
    certificate = facts().certificates[0]
    assert str(certificate) == (
        "for prompts like these, 95% of images meet psnr>=40, with 90% confidence; 60 prompts tried, 1 below"
    )


def test_a_profile_says_what_it_is():
    assert repr(profile()) == "<Profile 'tiny': M, 2 generations of 6 steps>"
