"""Calling pipelines: their keywords, prompts from a list or a file, and hashes of prompts."""

from __future__ import annotations

import pytest
import torch

import holdover
from holdover.plan.calls import built_in_prompts, hash_prompts, keywords_of, prompts_from_file
from holdover.teacache import estimate_coefficients
from tiny.pipelines import PIPELINES
from tiny.prompted import prompted_flux

from .profiled import keywords


def test_the_keywords_of_a_pipeline():
    class Plain:
        def __call__(self, prompt, steps): ...

    class Named(Plain):
        def __call__(self, prompt, size=1, **options): ...

    class Open:
        def __call__(self, prompt, **options): ...

    assert keywords_of(Plain()) == ({"self", "prompt", "steps"}, False)
    assert keywords_of(Named()) == ({"self", "prompt", "size", "steps"}, False)
    assert keywords_of(Open()) == ({"self", "prompt"}, True)


def test_prompts_with_images_have_the_same_hash_twice():
    """The hash depends on the content of an image, not on where it lies in memory."""
    tiny = PIPELINES["WanImageToVideoPipeline"]
    assert hash_prompts([keywords(tiny)]) == hash_prompts([keywords(tiny)])
    large = torch.zeros(100, 100)
    other = large.clone()
    other[50, 50] = 1.0
    assert hash_prompts([{"prompt_embeds": large}]) != hash_prompts([{"prompt_embeds": other}])


def test_built_in_prompts_and_prompts_from_a_file(tmp_path):
    pipe = prompted_flux()
    prompts = built_in_prompts(pipe)
    assert len(prompts) == len(set(prompts)) >= 24
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two  \n")
    assert prompts_from_file(path) == ["one", "two"]
    for wrong, said in ((tmp_path / "none.txt", "No such file"), (tmp_path, "directory")):
        with pytest.raises(holdover.ConfigError, match=said):
            prompts_from_file(wrong)
    path.write_text("\n \n")
    with pytest.raises(holdover.ConfigError, match="no prompts"):
        prompts_from_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(holdover.ConfigError, match="not text"):
        prompts_from_file(path)


def test_lists_of_prompts_have_different_hashes():
    assert hash_prompts(["a", "b"]) != hash_prompts(["a\nb"])
    assert hash_prompts(["a", "b"]) != hash_prompts(["b", "a"])


def test_one_prompt_is_a_list_of_one():
    pipe, short = prompted_flux(), {"num_inference_steps": 3, "effort": "quick", "progress": False}
    profile = holdover.calibrate(pipe, "red apple", **short)
    assert profile.facts.prompts == 1
    assert profile.facts.prompts_hash == hash_prompts(["red apple"])
    assert holdover.calibrate(pipe, {"prompt": "red apple"}, **short).facts.prompts == 1
    assert estimate_coefficients(pipe, "red apple", num_inference_steps=4).source


def test_a_typo_in_the_keywords_of_a_prompt_is_an_error():
    with pytest.raises(holdover.ConfigError, match="takes no 'promt'. Did you mean 'prompt'?"):
        holdover.calibrate(
            prompted_flux(), [{"promt": "red apple"}], num_inference_steps=3, effort="quick", progress=False
        )
