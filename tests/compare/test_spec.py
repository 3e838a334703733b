"""Comparisons from Python, files and flags: frozen, checked, and an unknown key names the nearest."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdover.compare import Comparison, Custom, FewerSteps, MethodCandidate, from_mapping, parse_method
from holdover.errors import ConfigError


def test_images_are_every_prompt_with_every_seed() -> None:
    spec = Comparison(("a", "b"), seeds=(1, 2))
    assert spec.images == (("a", 1), ("a", 2), ("b", 1), ("b", 2))


def test_it_is_frozen_and_hashable() -> None:
    spec = Comparison(
        ["a"], [MethodCandidate("tea_cache", {"rel_l1_thresh": 0.1}.items())], arguments={"height": 64}.items()
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.steps = 3  # type: ignore[misc]
    assert hash(spec) == hash(dataclasses.replace(spec))


def test_settings_do_not_depend_on_order_or_candidates() -> None:
    one = Comparison(("a",), arguments=(("width", 64), ("height", 32)))
    two = Comparison(("a",), (MethodCandidate("none"),), arguments=(("height", 32), ("width", 64)))
    assert one.settings() == two.settings()
    assert one.settings()["arguments"] == {"height": 32, "width": 64}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("tea_cache", {}),
        ("tea_cache:rel_l1_thresh=0.15", {"rel_l1_thresh": 0.15}),
        ("mag_cache:mag_threshold=0.06, mag_max_skip_steps=3", {"mag_threshold": 0.06, "mag_max_skip_steps": 3}),
        ("mag_cache:mag_ratios=[1.0,0.9],mag_threshold=1", {"mag_ratios": [1.0, 0.9], "mag_threshold": 1}),
        ("tea_cache:profile=emoji", {"profile": "emoji"}),
    ],
)
def test_methods_as_text(text: str, settings: dict[str, Any]) -> None:
    method = parse_method(text)
    assert dict(method.settings) == settings


def test_labels() -> None:
    assert parse_method("mag_cache:mag_threshold=0.06,mag_max_skip_steps=3").label == "mag_cache 0.06 / 3"
    assert parse_method("mag_cache:mag_ratios=[1,1]").label == "mag_cache mag_ratios of 2"
    assert parse_method("mag_cache:calibrate=true").label == "mag_cache calibrate"
    assert MethodCandidate("none").label == "none"
    assert MethodCandidate("none", (), "mine").label == "mine"
    assert FewerSteps(9).label == "9 steps"
    assert FewerSteps(9, second_order=True).label == "9 steps, second order"


def test_a_mapping() -> None:
    values = {
        "prompts": ["apple"],
        "seeds": [1],
        "steps": 12,
        "guidance": 3,
        "arguments": {"height": 64},
        "methods": ["tea_cache:rel_l1_thresh=0.1", {"mag_cache": {"mag_threshold": 0.1}}, {"none": None}],
        "fewer_steps": [6],
    }
    spec = from_mapping(values)
    assert spec.steps == 12
    assert [candidate.label for candidate in spec.candidates] == [
        "tea_cache 0.1",
        "mag_cache 0.1",
        "none",
        "6 steps",
        "6 steps, second order",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": ["a"]}, "A comparison has no 'prompt'. Did you mean 'prompts'?"),
        ({"prompts": ["a"], "xyzzy": 1}, "has no 'xyzzy'. Known: prompts, seeds"),
        ({}, "needs prompts"),
        ({"prompts": "a"}, "prompts must be a list, not 'a'."),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": ["a", " "]}, "none may be empty"),
        ({"prompts": ["a"], "seeds": []}, "seeds must have at least 1 item"),
        ({"prompts": ["a"], "seeds": [-1]}, "seeds must be a whole number from 0 to 18446744073709551615, not -1."),
        ({"prompts": ["a"], "seeds": ["x"]}, "seeds must be a whole number from 0 to 18446744073709551615, not 'x'."),
        ({"prompts": ["a"], "steps": 0}, "steps must be a whole number of at least 1, not 0."),
        ({"prompts": ["a"], "batch_size": True}, "batch_size must be a whole number of at least 1, not True."),
        ({"prompts": ["a"], "guidance": "high"}, "guidance must be a finite number of at least 0, not 'high'."),
        ({"prompts": ["a"], "clock": "sun"}, "clock must be 'wall' or 'cpu', not 'sun'."),
        ({"prompts": ["a"], "baselines": "no"}, "baselines must be true or false, not 'no'."),
        ({"prompts": ["a"], "output": "pil"}, "output must be 'pt' or 'latent', not 'pil'."),
        ({"prompts": ["a"], "arguments": {"latents": 1}}, "'latents' is set by the comparison itself"),
        ({"prompts": ["a"], "arguments": 3}, "arguments must be a mapping"),
        ({"prompts": ["a"], "methods": ["teacache"]}, "Did you mean 'tea_cache'?"),
        ({"prompts": ["a"], "methods": [{"tea_cache": {"rel_l1_tresh": 1}}]}, "Did you mean 'rel_l1_thresh'?"),
        ({"prompts": ["a"], "methods": [3]}, "A method is written as"),
        ({"prompts": ["a"], "methods": ["none", "none"]}, "Two candidates are called 'none'"),
        ({"prompts": ["a"], "fewer_steps": [0]}, "fewer_steps must be a whole number"),
    ],
)
def test_an_error_names_the_key_and_the_allowed_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["tea_cache:rel_l1_thresh", "tea_cache:=3", "tea_cache:rel_l1_thresh=1,rel_l1_thresh=2"]
)
def test_settings_that_are_not_settings(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value|given twice"):
        parse_method(text)


def test_candidates_of_no_kind() -> None:
    with pytest.raises(ConfigError, match="A candidate is a MethodCandidate"):
        Comparison(("a",), ("tea_cache",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="label"):
        Custom(" ", lambda pipe: pipe)
    with pytest.raises(ConfigError, match="at least 1"):
        FewerSteps(0)
