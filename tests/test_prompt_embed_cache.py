"""The prompt-embedding cache: never a stale result, never shared memory, never two encodings of one call."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import string
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from diffusers import (
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from PIL import Image
from tokenizers import normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from holdover.errors import HoldoverWarning
from holdover.prompt_embed_cache import (
    _CACHE_MISS,
    PromptEmbedCache,
    install_prompt_embed_cache,
    resolve_prompt_embed_cache_config,
    uninstall_prompt_embed_cache,
)

ENABLE = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE"
SIZE = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE"


@pytest.fixture(autouse=True)
def _one_thread_no_grad() -> Iterator[None]:
    """One thread, because the machine is shared; no_grad, because so do pipelines call encode_prompt."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# --- a pipeline small enough to see through -------------------------------------------------------


class Encoder(nn.Module):
    """Looks bytes up in a table, counts its calls, and can be made slow, failing or busy."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 4)
        self.activation: nn.Module = nn.Identity()
        self.register_buffer("shift", torch.zeros(4))
        self.calls = 0
        self.during: Callable[[], Any] | None = None

    def forward(self, text: str) -> Tensor:
        self.calls += 1
        if self.during is not None:
            self.during()
        return self.activation(self.table(torch.tensor(list(text.encode())))) + self.shift


class Tokenizer:
    """Stands for any object that encode_prompt uses."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix


class Pipeline:
    """What the cache needs of a diffusers pipeline: an encode_prompt that reads attributes."""

    def __init__(self) -> None:
        self.text_encoder = Encoder().eval()
        self.tokenizer = Tokenizer()
        self.template = "{}"
        self._lora_scale = 1.0
        self._guidance_scale = 1.0

    def encode_prompt(
        self,
        prompt: Any,
        scale: Any = 1.0,
        extra: Any = None,
        prompt_embeds: Tensor | None = None,
        lora_scale: float | None = None,
        **options: Any,
    ) -> Any:
        """Encode."""
        if lora_scale is not None:
            self._lora_scale = lora_scale
        text = f"{prompt!r}{scale!r}{extra!r}{sorted(options.items())}"
        text = self.tokenizer.prefix + self._in_template(text)
        embeds = self.text_encoder(text) if prompt_embeds is None else prompt_embeds
        embeds = embeds * self._lora_scale
        return embeds, [embeds.sum(0), {"mask": torch.ones(2)}], None

    def _in_template(self, text: str) -> str:
        return self.template.format(text)


class Returning:
    """A pipeline whose encode_prompt returns what `make` makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def encode_prompt(self, prompt: str) -> Any:
        return self.make()


def installed(pipeline: Any, **options: Any) -> PromptEmbedCache:
    cache = install_prompt_embed_cache(pipeline, **options)
    assert cache is not None
    return cache


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


def same(a: Any, b: Any) -> bool:
    """Same structure, bits, dtypes and None in the same places."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def plain(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
    """What the pipeline's own class would answer now."""
    return type(pipeline).encode_prompt(pipeline, *args, **kwargs)


def counts(cache: PromptEmbedCache) -> tuple[int, int, int]:
    return cache.hits, cache.misses, cache.bypassed


# --- the store ------------------------------------------------------------------------------------


def test_a_stored_value_is_found_and_an_unknown_key_is_a_miss() -> None:
    cache = PromptEmbedCache()
    assert cache.get("a") is _CACHE_MISS
    cache.put("a", (torch.arange(3), None))
    assert same(cache.get("a"), (torch.arange(3), None))
    assert cache.stats() == {
        "hits": 1,
        "misses": 1,
        "bypassed": 0,
        "not_stored": 0,
        "size": 1,
        "max_size": 32,
        "bytes": 24,
        "max_bytes": 1 << 30,
    }


def test_none_is_a_value() -> None:
    cache = PromptEmbedCache()
    cache.put("a", None)
    assert cache.get("a") is None
    assert counts(cache) == (1, 0, 0)


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = PromptEmbedCache(max_size=2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, _CACHE_MISS, 3]


def test_clear_drops_entries_and_keeps_counters() -> None:
    cache = PromptEmbedCache()
    cache.put("a", torch.ones(2))
    cache.get("a")
    cache.clear()
    assert cache.get("a") is _CACHE_MISS
    assert (cache.stats()["size"], cache.stats()["bytes"], cache.hits) == (0, 0, 1)


def test_the_byte_budget_evicts_in_addition_to_the_entry_count() -> None:
    cache = PromptEmbedCache(max_size=10, max_bytes=100)
    for key in "abc":
        cache.put(key, torch.zeros(10))  # 40 bytes each
    assert cache.get("a") is _CACHE_MISS
    assert cache.get("c") is not _CACHE_MISS
    assert cache.stats()["bytes"] == 80


def test_an_entry_over_the_byte_budget_is_not_stored_and_evicts_nothing() -> None:
    cache = PromptEmbedCache(max_bytes=100)
    cache.put("a", torch.zeros(10))
    cache.put("b", torch.zeros(100))
    assert cache.get("b") is _CACHE_MISS
    assert cache.get("a") is not _CACHE_MISS
    assert cache.stats()["not_stored"] == 1


def test_an_entry_over_the_byte_budget_replaces_no_stale_one() -> None:
    cache = PromptEmbedCache(max_bytes=100)
    cache.put("a", torch.zeros(10))
    cache.put("a", torch.zeros(100))
    assert cache.get("a") is _CACHE_MISS
    assert cache.stats()["bytes"] == 0


def test_a_view_of_a_large_tensor_costs_only_what_it_shows() -> None:
    cache = PromptEmbedCache(max_bytes=100)
    cache.put("a", torch.zeros(1000)[:10])
    assert cache.stats()["bytes"] == 40


def test_without_a_byte_limit_everything_is_stored() -> None:
    cache = PromptEmbedCache(max_bytes=None)
    cache.put("a", torch.zeros(100))
    assert cache.get("a") is not _CACHE_MISS
    assert cache.stats()["max_bytes"] == -1


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "3"])
@pytest.mark.parametrize("name", ["max_size", "max_bytes"])
def test_limits_must_be_positive_integers(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=name):
        PromptEmbedCache(**{name: wrong})


operation = st.tuples(st.sampled_from(["put", "get", "clear"]), st.integers(0, 5), st.integers(0, 12))


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(operation), st.integers(1, 4), st.integers(1, 64))
def test_any_sequence_of_operations_keeps_the_limits_and_never_lies(ops: Any, size: int, budget: int) -> None:
    cache, last = PromptEmbedCache(size, max_bytes=budget), dict[int, int]()
    for operation, key, length in ops:
        if operation == "put":
            cache.put(key, torch.full((length,), length, dtype=torch.int32))
            last[key] = length
        elif operation == "get":
            found = cache.get(key)
            assert found is _CACHE_MISS or found.tolist() == [last[key]] * last[key]
        else:
            cache.clear()
            last.clear()
        stats = cache.stats()
        assert stats["size"] <= size
        assert stats["bytes"] <= budget
        if operation == "put":
            assert (cache.get(key) is _CACHE_MISS) == (length * 4 > budget)


# --- keys -----------------------------------------------------------------------------------------

LOOKALIKES = [
    (True, 1),
    (1, 1.0),
    (True, 1.0),
    ("1", 1),
    (0.0, -0.0),
    (None, "None"),
    (b"a", "a"),
    (["a"], ("a",)),
    ([True], [1]),
    ({"a": 1}, {"a": 1.0}),
    ({"a": ["b"]}, {"a": ("b",)}),
    (["a", "b"], ["b", "a"]),
    ([["a"], "b"], ["a", ["b"]]),
    (torch.float16, torch.bfloat16),
    (torch.device("cpu"), "cpu"),
    (np.float64(1), 1.0),
    (np.float64(1), np.float32(1)),
    (np.int64(1), np.int64(2)),
    (np.str_("a"), "a"),
    (np.datetime64(1, "D"), np.datetime64(1, "s")),
]


@pytest.mark.parametrize(("first", "second"), LOOKALIKES)
def test_values_of_different_type_are_different_keys(first: Any, second: Any) -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.encode_prompt("a", extra=first)
    pipeline.encode_prompt("a", extra=second)
    assert counts(cache) == (0, 2, 0)
    pipeline.encode_prompt("a", extra=copy.deepcopy(first))
    assert counts(cache) == (1, 2, 0)


def test_every_spelling_of_a_call_is_the_same_key() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.encode_prompt("a", 1.0, None, u=1, v=2)
    pipeline.encode_prompt(prompt="a", v=2, u=1)
    pipeline.encode_prompt("a", extra=None, u=1, scale=1.0, v=2, prompt_embeds=None)
    assert counts(cache) == (2, 1, 0)
    pipeline.encode_prompt("a", 2.0, u=1, v=2)
    assert counts(cache) == (2, 2, 0)


def test_a_prompt_list_changed_after_the_call_is_another_key() -> None:
    pipeline, prompts = Pipeline(), ["a"]
    cache = installed(pipeline)
    pipeline.encode_prompt(prompts)
    prompts.append("b")
    assert same(pipeline.encode_prompt(prompts), plain(pipeline, ["a", "b"]))
    assert cache.hits == 0


def test_the_same_prompt_in_another_pipeline_or_under_another_tag_is_encoded_there() -> None:
    first, second = Pipeline(), Pipeline()
    one, two = installed(first, model_tag="m"), installed(second, model_tag="m")
    first.encode_prompt("a")
    assert same(second.encode_prompt("a"), plain(second, "a"))
    assert (one.misses, two.misses) == (1, 1)


class Text(str):
    """A str subclass, which may carry more than its text."""


UNKEYABLE = {
    "image": lambda: Image.new("RGB", (2, 2)),
    "generator": torch.Generator,
    "object": object,
    "tensor": lambda: torch.ones(1),
    "list of tensors": lambda: [torch.ones(1)],
    "array": lambda: np.ones(1),
    "set": lambda: {1},
    "str subclass": lambda: Text("a"),
}


@pytest.mark.parametrize("make", UNKEYABLE.values(), ids=UNKEYABLE.keys())
def test_an_argument_without_a_key_bypasses(make: Callable[[], Any]) -> None:
    pipeline, extra = Pipeline(), make()
    cache = installed(pipeline)
    for _ in range(2):
        assert same(pipeline.encode_prompt("a", extra=extra), plain(pipeline, "a", extra=extra))
    assert counts(cache) == (0, 0, 2)
    assert pipeline.text_encoder.calls == 4


def test_given_prompt_embeds_bypass_and_are_not_replaced() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    given = torch.full((1, 4), 7.0)
    assert torch.equal(pipeline.encode_prompt("a", prompt_embeds=given)[0], given)
    assert counts(cache) == (0, 1, 1)


def test_a_wrong_call_fails_as_without_a_cache() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    with pytest.raises(TypeError, match="prompt"):
        pipeline.encode_prompt()  # type: ignore[call-arg]
    assert counts(cache) == (0, 0, 1)


# --- state ----------------------------------------------------------------------------------------


def edit_in_place(p: Pipeline) -> None:
    p.text_encoder.table.weight.mul_(2)


def edit_one_value(p: Pipeline) -> None:
    p.text_encoder.table.weight[ord("a"), 1] = 5.0


def edit_through_data(p: Pipeline) -> None:
    p.text_encoder.table.weight.data += 1


def edit_under_inference_mode(p: Pipeline) -> None:
    with torch.inference_mode():
        p.text_encoder.table.weight.add_(1)


def swap_data(p: Pipeline) -> None:
    p.text_encoder.table.weight.data = torch.randn(256, 4)


def load_weights(p: Pipeline) -> None:
    p.text_encoder.load_state_dict(Encoder().state_dict())


def replace_parameter(p: Pipeline) -> None:
    p.text_encoder.table.weight = nn.Parameter(torch.randn(256, 4))


def replace_layer(p: Pipeline) -> None:
    p.text_encoder.table = nn.Embedding(256, 4).eval()


def replace_activation(p: Pipeline) -> None:
    p.text_encoder.activation = nn.Tanh().eval()


def replace_encoder(p: Pipeline) -> None:
    p.text_encoder = Encoder().eval()


def edit_buffer(p: Pipeline) -> None:
    p.text_encoder.shift.add_(1)


def convert_dtype(p: Pipeline) -> None:
    p.text_encoder.to(torch.float64)


def hook_output(p: Pipeline) -> None:
    p.text_encoder.table.register_forward_hook(lambda module, args, output: output * 3)


def override_forward(p: Pipeline) -> None:
    p.text_encoder.table.forward = lambda ids: torch.ones(len(ids), 4)  # type: ignore[method-assign]


def replace_tokenizer(p: Pipeline) -> None:
    p.tokenizer = Tokenizer("x")


def change_tokenizer(p: Pipeline) -> None:
    p.tokenizer.prefix = "y"


def change_template(p: Pipeline) -> None:
    p.template = "say {}"


def change_standing_lora_scale(p: Pipeline) -> None:
    p._lora_scale = 0.5


CHANGES = [
    edit_in_place,
    edit_one_value,
    edit_through_data,
    edit_under_inference_mode,
    swap_data,
    load_weights,
    replace_parameter,
    replace_layer,
    replace_activation,
    replace_encoder,
    edit_buffer,
    convert_dtype,
    hook_output,
    override_forward,
    replace_tokenizer,
    change_tokenizer,
    change_template,
    change_standing_lora_scale,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_stale_result_after(change: Callable[[Pipeline], None]) -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    old = pipeline.encode_prompt("a")
    change(pipeline)
    new = pipeline.encode_prompt("a")
    assert same(new, plain(pipeline, "a"))
    assert not same(new, old)
    assert counts(cache) == (0, 2, 0)
    assert same(pipeline.encode_prompt("a"), new)
    assert counts(cache) == (1, 2, 0)


def test_no_stale_result_with_weights_that_are_inference_tensors() -> None:
    pipeline = Pipeline()
    with torch.inference_mode():
        pipeline.text_encoder = Encoder().eval()
    assert pipeline.text_encoder.table.weight.is_inference()
    cache = installed(pipeline)
    with torch.inference_mode():
        pipeline.encode_prompt("a")
        pipeline.encode_prompt("a")
        pipeline.text_encoder.table.weight.mul_(2)
        assert same(pipeline.encode_prompt("a"), plain(pipeline, "a"))
    assert counts(cache) == (1, 2, 0)


def test_no_stale_result_after_a_parameter_is_replaced_by_one_that_differs_where_no_sample_is_taken() -> None:
    pipeline = Pipeline()
    weight = torch.randn(256, 4)
    pipeline.text_encoder.table.weight = nn.Parameter(weight.clone())
    cache = installed(pipeline)
    version = pipeline.text_encoder.table.weight._version
    pipeline.encode_prompt("a")
    weight[ord("a"), 1] = 5.0
    pipeline.text_encoder.table.weight = nn.Parameter(weight.clone())
    assert pipeline.text_encoder.table.weight._version == version
    assert same(pipeline.encode_prompt("a"), plain(pipeline, "a"))
    assert cache.misses == 2


def test_no_stale_result_after_a_conversion_between_types_with_the_same_bytes() -> None:
    pipeline = Pipeline()
    pipeline.text_encoder.to(torch.float16).table.weight.zero_()
    installed(pipeline)
    pipeline.encode_prompt("a")
    pipeline.text_encoder.table.to(torch.bfloat16)
    assert same(pipeline.encode_prompt("a"), plain(pipeline, "a"))


def test_no_stale_result_when_a_new_parameter_lies_where_the_old_one_lay() -> None:
    pipeline = Pipeline()
    installed(pipeline, max_size=100)
    weights = torch.zeros(30, 256, 4)
    weights[:, ord("a"), 1] = torch.arange(30.0)  # where no sample is taken
    places = set()
    for weight in weights:
        del pipeline.text_encoder.table.weight
        pipeline.text_encoder.table.weight = nn.Parameter(weight)
        places.add(id(pipeline.text_encoder.table.weight))
        assert same(pipeline.encode_prompt("a"), plain(pipeline, "a"))
    assert len(places) < 30


def test_going_back_to_an_earlier_state_is_a_hit() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    first = pipeline.encode_prompt("a")
    pipeline.template = "say {}"
    pipeline.encode_prompt("a")
    pipeline.template = "{}"
    assert same(pipeline.encode_prompt("a"), first)
    assert counts(cache) == (1, 2, 0)


def test_what_encode_prompt_does_not_read_does_not_matter() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    pipeline._guidance_scale = 7.5
    pipeline.encode_prompt("a")
    assert counts(cache) == (1, 1, 0)


def test_autocast_is_part_of_the_key() -> None:
    pipeline = Returning(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    cache = installed(pipeline)
    assert pipeline.encode_prompt("a").dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipeline.encode_prompt("a").dtype == torch.bfloat16
    assert counts(cache) == (0, 2, 0)


def test_the_default_dtype_is_part_of_the_key() -> None:
    pipeline = Returning(lambda: torch.ones(2))
    installed(pipeline)
    pipeline.encode_prompt("a")
    torch.set_default_dtype(torch.float64)
    try:
        assert pipeline.encode_prompt("a").dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_hit_leaves_the_lora_scale_behind_as_encoding_does() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    first = pipeline.encode_prompt("a", lora_scale=0.5)
    pipeline.encode_prompt("a", lora_scale=0.25)
    assert same(pipeline.encode_prompt("a", lora_scale=0.5), first)
    assert pipeline._lora_scale == 0.5
    assert counts(cache) == (1, 2, 0)


def test_weights_that_change_while_encoding_leave_nothing_behind() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.text_encoder.during = lambda: pipeline.text_encoder.shift.add_(1)
    pipeline.encode_prompt("a")
    assert cache.stats()["size"] == 0
    assert cache.stats()["not_stored"] == 1


def test_weights_offloaded_by_accelerate_are_followed_where_they_rest() -> None:
    pipeline = Pipeline()
    accelerate.cpu_offload(pipeline.text_encoder, execution_device=torch.device("cpu"))
    assert pipeline.text_encoder.table.weight.is_meta
    cache = installed(pipeline)
    first = pipeline.encode_prompt("a")
    assert same(pipeline.encode_prompt("a"), first)
    assert counts(cache) == (1, 1, 0)
    pipeline.text_encoder.table._hf_hook.weights_map["weight"].mul_(2)
    assert same(pipeline.encode_prompt("a"), plain(pipeline, "a"))
    assert counts(cache) == (1, 2, 0)


# --- modes ----------------------------------------------------------------------------------------


def test_an_encoder_in_training_mode_bypasses() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    pipeline.text_encoder.table.train()
    pipeline.encode_prompt("a")
    assert counts(cache) == (0, 1, 1)
    pipeline.text_encoder.eval()
    pipeline.encode_prompt("a")
    assert counts(cache) == (1, 1, 1)


def test_autograd_with_a_trainable_encoder_bypasses_and_reaches_the_weights() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    with torch.enable_grad():
        pipeline.encode_prompt("a")[0].sum().backward()
    assert pipeline.text_encoder.table.weight.grad is not None
    assert counts(cache) == (0, 1, 1)


def test_autograd_with_a_frozen_encoder_is_cached() -> None:
    pipeline = Pipeline()
    pipeline.text_encoder.requires_grad_(False)
    cache = installed(pipeline)
    with torch.enable_grad():
        pipeline.encode_prompt("a")
        pipeline.encode_prompt("a")
    assert counts(cache) == (1, 1, 0)


def test_a_result_with_a_graph_is_not_stored() -> None:
    leaf = torch.ones(2, requires_grad=True)
    pipeline = Returning(lambda: leaf * 2)
    cache = installed(pipeline)
    with torch.enable_grad():
        assert all(pipeline.encode_prompt("a").requires_grad for _ in range(2))
    assert counts(cache) == (0, 2, 0)


def test_an_entry_made_under_inference_mode_works_under_autograd() -> None:
    pipeline = Pipeline()
    pipeline.text_encoder.requires_grad_(False)
    cache = installed(pipeline)
    with torch.inference_mode():
        assert pipeline.encode_prompt("a")[0].is_inference()
    stored = [tensor for entry in cache._entries.values() for tensor in tensors(entry.value)]
    assert [tensor.is_inference() for tensor in stored] == [False] * 3
    with torch.enable_grad():
        embeds = pipeline.encode_prompt("a")[0]
        weight = torch.ones_like(embeds, requires_grad=True)
        (embeds * weight).sum().backward()
    assert cache.hits == 1
    assert not embeds.is_inference()
    assert torch.equal(weight.grad, embeds)


def test_an_entry_made_under_autograd_works_under_inference_mode() -> None:
    pipeline = Pipeline()
    pipeline.text_encoder.requires_grad_(False)
    cache = installed(pipeline)
    with torch.enable_grad():
        first = pipeline.encode_prompt("a")
    with torch.inference_mode():
        again = pipeline.encode_prompt("a")
        assert again[0].is_inference()
        again[0].mul_(0)
    assert same(pipeline.encode_prompt("a"), first)
    assert cache.hits == 2


def test_switched_off_it_goes_straight_through_and_counts() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline, enabled=False)
    pipeline.encode_prompt("a")
    pipeline.encode_prompt("a")
    assert (counts(cache), pipeline.text_encoder.calls) == ((0, 0, 2), 2)
    cache.enabled = True
    pipeline.encode_prompt("a")
    pipeline.encode_prompt("a")
    assert (counts(cache), pipeline.text_encoder.calls) == ((1, 1, 2), 3)


# --- memory ---------------------------------------------------------------------------------------


def spoil(value: Any) -> None:
    for tensor in tensors(value):
        tensor.fill_(-1)
    value[1].append("more")
    value[1][1]["mask"] = None


def test_a_result_edited_in_place_does_not_change_the_cache() -> None:
    pipeline = Pipeline()
    want = plain(pipeline, "a")
    cache = installed(pipeline)
    for _ in range(3):  # the one that encodes, and two that are served
        got = pipeline.encode_prompt("a")
        assert same(got, want)
        spoil(got)
    assert counts(cache) == (2, 1, 0)


def test_no_two_callers_share_storage() -> None:
    pipeline = Pipeline()
    installed(pipeline)
    results = [pipeline.encode_prompt("a") for _ in range(3)]
    pointers = [tensor.data_ptr() for result in results for tensor in tensors(result)]
    assert len(pointers) == 9
    assert len(set(pointers)) == 9


def test_what_is_put_and_then_edited_stays_as_it_was_put() -> None:
    cache, value = PromptEmbedCache(), [torch.zeros(2), {"k": [torch.zeros(2)]}]
    cache.put("a", value)
    value[1]["k"][0].add_(1)
    value.append(torch.ones(1))
    assert same(cache.get("a"), [torch.zeros(2), {"k": [torch.zeros(2)]}])


def test_a_tensor_returned_twice_comes_back_as_one_tensor() -> None:
    def twice() -> tuple[Tensor, Tensor]:
        tensor = torch.ones(2)
        return tensor, tensor

    pipeline = Returning(twice)
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    first, second = pipeline.encode_prompt("a")
    assert first is second
    assert cache.stats()["bytes"] == 8


class Unwilling:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("there is only one of me")


@pytest.mark.parametrize("make", [threading.Lock, Unwilling, lambda: [nn.Linear(2, 2)], lambda: {"encoder": Encoder()}])
def test_a_result_that_cannot_be_copied_is_passed_on_and_not_stored(make: Callable[[], Any]) -> None:
    pipeline = Returning(make)
    cache = installed(pipeline)
    assert pipeline.encode_prompt("a") is not pipeline.encode_prompt("a")
    assert (cache.stats()["size"], cache.stats()["not_stored"], cache.misses) == (0, 2, 2)


# --- threads --------------------------------------------------------------------------------------


def at_once(count: int, call: Callable[[], Any]) -> list[Any]:
    """Call from `count` threads that start together; a list of results and exceptions."""
    barrier = threading.Barrier(count)

    def run(_: int) -> Any:
        barrier.wait()
        try:
            with torch.no_grad():  # grad mode belongs to the thread
                return call()
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(count, thread_name_prefix="at_once") as pool:
        return list(pool.map(run, range(count), timeout=300))


def until_waiting(count: int) -> None:
    """Return when so many of the threads wait for the result of the one that encodes."""
    until = time.monotonic() + 120
    while sum(map(is_waiting, threading.enumerate())) < count and time.monotonic() < until:
        time.sleep(0.01)


def is_waiting(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0) if thread.name.startswith("at_once") else None
    while frame is not None and frame.f_code is not Future.result.__code__:
        frame = frame.f_back
    return frame is not None


def test_equal_calls_at_once_encode_once() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.text_encoder.during = lambda: until_waiting(7)
    results = at_once(8, lambda: pipeline.encode_prompt("a"))
    assert pipeline.text_encoder.calls == 1
    assert counts(cache) == (7, 1, 0)
    assert all(same(result, results[0]) for result in results)
    assert len({tensor.data_ptr() for result in results for tensor in tensors(result)}) == 24


def test_different_calls_at_once_do_not_wait_for_each_other() -> None:
    pipeline, prompts = Pipeline(), iter("ab")
    installed(pipeline)
    together = threading.Barrier(2)  # passes only if both encode at the same time
    pipeline.text_encoder.during = lambda: together.wait(120)
    results = at_once(2, lambda: pipeline.encode_prompt(next(prompts)))
    assert not any(isinstance(result, Exception) for result in results)


def test_equal_calls_at_once_share_a_result_too_large_to_store() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline, max_bytes=1)
    pipeline.text_encoder.during = lambda: until_waiting(3)
    results = at_once(4, lambda: pipeline.encode_prompt("a"))
    assert all(same(result, results[0]) for result in results)
    assert pipeline.text_encoder.calls == 1
    assert cache.stats()["size"] == 0


def test_when_the_encoding_call_raises_those_who_wait_try_themselves() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)

    def fail_once() -> None:
        calls = pipeline.text_encoder.calls
        until_waiting(4 - calls)
        if calls == 1:
            raise RuntimeError("out of luck")

    pipeline.text_encoder.during = fail_once
    results = at_once(4, lambda: pipeline.encode_prompt("a"))
    failed = [result for result in results if isinstance(result, RuntimeError)]
    assert len(failed) == 1
    assert pipeline.text_encoder.calls == 2
    assert cache.stats()["size"] == 1


def test_an_encoder_that_always_raises_leaves_no_one_waiting_and_nothing_cached() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)

    def fail() -> None:
        raise RuntimeError("no")

    pipeline.text_encoder.during = fail
    results = at_once(4, lambda: pipeline.encode_prompt("a"))
    assert all(isinstance(result, RuntimeError) for result in results)
    assert cache.stats()["size"] == 0
    pipeline.text_encoder.during = None
    assert same(pipeline.encode_prompt("a"), plain(pipeline, "a"))


def test_what_was_being_encoded_when_the_cache_was_cleared_is_not_stored() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.text_encoder.during = cache.clear
    pipeline.encode_prompt("a")
    assert cache.stats()["size"] == 0


# --- installing -----------------------------------------------------------------------------------


def test_only_the_instance_is_touched() -> None:
    method, pipeline, other = Pipeline.encode_prompt, Pipeline(), Pipeline()
    installed(pipeline)
    assert Pipeline.encode_prompt is method
    assert "encode_prompt" not in vars(other)


def test_installing_twice_returns_the_same_cache_and_wraps_once() -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    wrapped = vars(pipeline)["encode_prompt"]
    assert install_prompt_embed_cache(pipeline, max_size=1) is cache
    assert vars(pipeline)["encode_prompt"] is wrapped
    assert cache.max_size == 32


def test_a_pipeline_without_encode_prompt_gets_no_cache() -> None:
    tokenizer = Tokenizer()
    assert install_prompt_embed_cache(tokenizer) is None
    assert vars(tokenizer) == {"prefix": ""}


def test_a_pipeline_that_is_a_module_is_followed_too() -> None:
    class ModulePipeline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text_encoder = Encoder()

        def encode_prompt(self, prompt: str) -> Any:
            return self.text_encoder(prompt)

    pipeline = ModulePipeline().eval()
    cache = installed(pipeline)
    old = pipeline.encode_prompt("a")
    pipeline.text_encoder.table.weight.mul_(2)
    assert torch.equal(pipeline.encode_prompt("a"), old * 2)
    pipeline.text_encoder = Encoder().eval()
    assert same(pipeline.encode_prompt("a"), plain(pipeline, "a"))
    assert counts(cache) == (0, 3, 0)
    assert "encode_prompt" not in vars(copy.deepcopy(pipeline))


def test_a_pipeline_that_allows_no_weak_reference_is_cached_too() -> None:
    calls: list[str] = []
    pipeline = SimpleNamespace(encode_prompt=lambda prompt: calls.append(prompt))
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    pipeline.encode_prompt(prompt="a")
    assert (calls, counts(cache)) == (["a"], (1, 1, 0))


def test_signature_name_and_docstring_are_unchanged() -> None:
    pipeline = Pipeline()
    signature = inspect.signature(pipeline.encode_prompt)
    installed(pipeline)
    assert inspect.signature(pipeline.encode_prompt) == signature
    assert pipeline.encode_prompt.__name__ == "encode_prompt"
    assert pipeline.encode_prompt.__doc__ == "Encode."


def test_limits_given_at_installation_reach_the_cache() -> None:
    cache = installed(Pipeline(), max_size=3, max_bytes=5, enabled=False)
    assert (cache.max_size, cache.max_bytes, cache.enabled) == (3, 5, False)


def test_uninstalling_restores_the_same_objects_in_the_same_order() -> None:
    pipeline = Pipeline()
    before = [(name, id(value)) for name, value in vars(pipeline).items()]
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    uninstall_prompt_embed_cache(pipeline)
    assert [(name, id(value)) for name, value in vars(pipeline).items()] == before
    pipeline.encode_prompt("a")
    assert counts(cache) == (0, 1, 0)


def test_uninstalling_restores_an_encode_prompt_that_was_already_on_the_instance() -> None:
    pipeline = Pipeline()
    log: list[str] = []

    @functools.wraps(pipeline.encode_prompt)
    def logging(prompt: str, **kwargs: Any) -> Any:
        log.append(prompt)
        return plain(pipeline, prompt, **kwargs)

    pipeline.encode_prompt = logging  # type: ignore[method-assign]
    before = dict(vars(pipeline))
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    edit_in_place(pipeline)
    pipeline.encode_prompt("a")
    assert (log, cache.misses) == (["a", "a"], 2)
    uninstall_prompt_embed_cache(pipeline)
    assert list(vars(pipeline).items()) == list(before.items())
    assert vars(pipeline)["encode_prompt"] is logging


def test_uninstalling_what_is_not_installed_does_nothing() -> None:
    pipeline = Pipeline()
    before = dict(vars(pipeline))
    uninstall_prompt_embed_cache(pipeline)
    assert vars(pipeline) == before


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda p: pickle.loads(pickle.dumps(p))}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_a_copy_uses_its_own_encoders(make: Callable[[Pipeline], Pipeline]) -> None:
    pipeline = Pipeline()
    cache = installed(pipeline)
    pipeline.encode_prompt("a")
    twin = make(pipeline)
    twin.text_encoder = Encoder().eval()
    calls = pipeline.text_encoder.calls
    assert same(twin.encode_prompt("a"), plain(twin, "a"))
    assert not same(twin.encode_prompt("a"), pipeline.encode_prompt("a"))
    assert pipeline.text_encoder.calls == calls
    assert counts(cache) == (1, 1, 0)
    assert vars(twin).keys() == vars(Pipeline()).keys()
    assert installed(twin) is not cache


def test_a_copy_keeps_an_encode_prompt_that_was_already_on_the_instance() -> None:
    pipeline = Pipeline()
    own = pipeline.encode_prompt = lambda prompt: prompt  # type: ignore[method-assign,assignment,misc]
    installed(pipeline)
    assert vars(copy.copy(pipeline))["encode_prompt"] is own


def test_deleting_the_pipeline_frees_it_and_the_cache_at_once() -> None:
    pipeline = Pipeline()
    installed(pipeline)
    pipeline.encode_prompt("a")
    method, gone = pipeline.encode_prompt, weakref.ref(pipeline)
    entries = weakref.ref(method.cache)  # type: ignore[attr-defined]
    gc.disable()
    try:
        del pipeline
        assert gone() is None
        with pytest.raises(ReferenceError, match="gone"):
            method("a")
        del method
        assert entries() is None
    finally:
        gc.enable()


# --- configuration --------------------------------------------------------------------------------


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(ENABLE, raising=False)
    monkeypatch.delenv(SIZE, raising=False)
    return monkeypatch


def test_without_environment_the_arguments_decide(env: pytest.MonkeyPatch) -> None:
    assert resolve_prompt_embed_cache_config() == (False, 32)
    assert resolve_prompt_embed_cache_config(True, 7) == (True, 7)
    assert resolve_prompt_embed_cache_config(enable=False, max_size=1) == (False, 1)


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "Yes", "on", " 1 "])
@pytest.mark.parametrize("enable", [None, True, False])
def test_the_environment_switches_on(env: pytest.MonkeyPatch, value: str, enable: bool | None) -> None:
    env.setenv(ENABLE, value)
    assert resolve_prompt_embed_cache_config(enable) == (True, 32)


@pytest.mark.parametrize("value", ["0", "false", "False", "NO", "off"])
def test_the_environment_switches_off(env: pytest.MonkeyPatch, value: str) -> None:
    env.setenv(ENABLE, value)
    assert resolve_prompt_embed_cache_config(True) == (False, 32)


def test_the_environment_wins_over_the_size_argument(env: pytest.MonkeyPatch) -> None:
    env.setenv(SIZE, "5")
    assert resolve_prompt_embed_cache_config(True, 7) == (True, 5)


def test_an_empty_environment_says_nothing(env: pytest.MonkeyPatch) -> None:
    env.setenv(ENABLE, "")
    env.setenv(SIZE, " ")
    assert resolve_prompt_embed_cache_config(True, 7) == (True, 7)


@pytest.mark.parametrize(("name", "value"), [(ENABLE, "truee"), (ENABLE, "-1"), (SIZE, "1.5"), (SIZE, "1_000")])
def test_a_malformed_variable_is_ignored_with_what_is_right(env: pytest.MonkeyPatch, name: str, value: str) -> None:
    env.setenv(name, value)
    right = {ENABLE: "one of 1, true, yes, on, 0, false, no, off", SIZE: "a positive integer"}[name]
    with pytest.warns(HoldoverWarning, match=rf"^{name}='{value}' is ignored: it is not {right}\.$"):
        assert resolve_prompt_embed_cache_config(True, 7) == (True, 7)


def test_a_wrong_size_argument_is_an_error(env: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_size=0"):
        resolve_prompt_embed_cache_config(True, 0)


# --- diffusers pipelines with tiny encoders -------------------------------------------------------


def clip_tokenizer() -> CLIPTokenizer:
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *string.ascii_lowercase,
        *(c + "</w>" for c in string.ascii_lowercase),
    ]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=16)


def t5_tokenizer() -> T5TokenizerFast:
    words = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase]
    return T5TokenizerFast(vocab=[(word, -1.0) for word in words], extra_ids=0)


def qwen_tokenizer() -> Qwen2Tokenizer:
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return Qwen2Tokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])


def clip(kind: Any = CLIPTextModel) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "projection_dim": 16, "max_position_embeddings": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return kind(CLIPTextConfig(**sizes, **layers, **tokens)).eval()


def t5(kind: Any = T5EncoderModel, config: Any = T5Config) -> Any:
    return kind(config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)).eval()


def qwen() -> Any:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    tokens = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 2}
    text = {"hidden_size": 16, "intermediate_size": 16, "rope_parameters": rope, **layers, **tokens}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).eval()


def flux() -> FluxPipeline:
    encoders = {"text_encoder": clip(), "text_encoder_2": t5()}
    tokenizers = {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()}
    return FluxPipeline(scheduler=None, vae=None, transformer=None, **encoders, **tokenizers)


def sd3() -> StableDiffusion3Pipeline:
    encoders = {
        "text_encoder": clip(CLIPTextModelWithProjection),
        "text_encoder_2": clip(CLIPTextModelWithProjection),
        "text_encoder_3": t5(),
    }
    tokenizers = {
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "tokenizer_3": t5_tokenizer(),
    }
    return StableDiffusion3Pipeline(scheduler=None, vae=None, transformer=None, **encoders, **tokenizers)


def qwen_image() -> QwenImagePipeline:
    parts = {"text_encoder": qwen(), "tokenizer": qwen_tokenizer()}
    return QwenImagePipeline(scheduler=None, vae=None, transformer=None, **parts)


def wan() -> WanPipeline:
    encoder = t5(UMT5EncoderModel, UMT5Config)
    return WanPipeline(tokenizer=t5_tokenizer(), text_encoder=encoder, vae=None, scheduler=None)


def pixart() -> PixArtSigmaPipeline:
    parts = {"text_encoder": t5(), "tokenizer": t5_tokenizer()}
    return PixArtSigmaPipeline(vae=None, transformer=None, scheduler=None, **parts)


SHORT = {"max_sequence_length": 24}
FAMILIES = {
    "Flux": (flux, SHORT),
    "StableDiffusion3": (sd3, {"prompt_2": None, "prompt_3": "pear", **SHORT}),
    "QwenImage": (qwen_image, {"max_sequence_length": 300}),
    "Wan": (wan, {"negative_prompt": "blurred", **SHORT}),
    "PixArtSigma": (pixart, {"negative_prompt": "blurred", **SHORT}),
}


@pytest.mark.parametrize(("build", "options"), FAMILIES.values(), ids=FAMILIES.keys())
def test_the_second_equal_call_of_a_diffusers_pipeline_is_a_hit(build: Any, options: dict[str, Any]) -> None:
    pipeline = build()
    want = copy.deepcopy(pipeline).encode_prompt("red apple", **options)
    cache = installed(pipeline)
    first = pipeline.encode_prompt("red apple", **options)
    second = pipeline.encode_prompt(prompt="red apple", **options)
    assert counts(cache) == (1, 1, 0)
    assert tensors(want)
    assert same(first, want)
    assert same(second, want)
    other = pipeline.encode_prompt("green apple", **options)
    assert not same(other, want)


@pytest.mark.parametrize(("build", "options"), FAMILIES.values(), ids=FAMILIES.keys())
def test_a_diffusers_pipeline_is_followed_and_given_back(build: Any, options: dict[str, Any]) -> None:
    pipeline = build()
    before = [(name, id(value)) for name, value in vars(pipeline).items()]
    cache = installed(pipeline)
    old = pipeline.encode_prompt("red apple", **options)
    weight = pipeline.text_encoder.get_input_embeddings().weight
    weight.data += torch.randn_like(weight)
    assert same(pipeline.encode_prompt("red apple", **options), plain(pipeline, "red apple", **options))
    assert not same(pipeline.encode_prompt("red apple", **options), old)
    assert counts(cache) == (1, 2, 0)
    uninstall_prompt_embed_cache(pipeline)
    assert [(name, id(value)) for name, value in vars(pipeline).items()] == before


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_diffusers_pipeline_uses_its_own_encoders(make: Callable[[Any], Any]) -> None:
    pipeline = wan()
    cache = installed(pipeline)
    pipeline.encode_prompt("apple", **SHORT)
    twin = make(pipeline)
    twin.text_encoder = t5(UMT5EncoderModel, UMT5Config)
    assert same(twin.encode_prompt("apple", **SHORT), plain(twin, "apple", **SHORT))
    assert not same(twin.encode_prompt("apple", **SHORT), plain(pipeline, "apple", **SHORT))
    assert counts(cache) == (0, 1, 0)


def test_given_prompt_embeds_of_a_diffusers_pipeline_bypass() -> None:
    pipeline = flux()
    cache = installed(pipeline)
    given = {"prompt_embeds": torch.ones(1, 3, 16), "pooled_prompt_embeds": torch.ones(1, 16)}
    assert pipeline.encode_prompt("apple", **given)[0] is given["prompt_embeds"]
    assert counts(cache) == (0, 0, 1)


def test_what_the_denoising_loop_leaves_on_the_pipeline_does_not_matter() -> None:
    pipeline = flux()
    cache = installed(pipeline)
    pipeline.encode_prompt("apple", **SHORT)
    pipeline._guidance_scale, pipeline._num_timesteps, pipeline._interrupt = 3.5, 28, False
    pipeline.scheduler = object()
    pipeline.encode_prompt("apple", **SHORT)
    assert counts(cache) == (1, 1, 0)


def test_of_the_denoiser_only_the_dtype_matters() -> None:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    inputs = {"in_channels": 4, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    pipeline = flux()
    pipeline.transformer = FluxTransformer2DModel(**sizes, **inputs, axes_dims_rope=(4, 4, 8))
    cache = installed(pipeline)
    pipeline.encode_prompt("apple", **SHORT)
    for parameter in pipeline.transformer.parameters():
        parameter.mul_(2)
    pipeline.encode_prompt("apple", **SHORT)
    assert counts(cache) == (1, 1, 0)
    pipeline.transformer.to(torch.bfloat16)
    pipeline.encode_prompt("apple", **SHORT)
    assert counts(cache) == (1, 2, 0)


def test_clip_skip_is_part_of_the_key() -> None:
    pipeline = sd3()
    cache = installed(pipeline)
    results = [pipeline.encode_prompt("apple", None, None, clip_skip=skip, **SHORT) for skip in (None, 1)]
    assert not same(*results)
    assert cache.misses == 2


def replace_rule(name: str, rule: Any) -> Callable[[Any], None]:
    return lambda tokenizer: setattr(tokenizer.backend_tokenizer, name, rule)


TOKENIZER_CHANGES: dict[str, Callable[[Any], Any]] = {
    "token added": lambda t: t.add_tokens(["pie"]),
    "pad token": lambda t: setattr(t, "pad_token", "a"),
    "pad token id": lambda t: setattr(t, "pad_token_id", 7),
    "padding side": lambda t: setattr(t, "padding_side", "left"),
    "normalizer": replace_rule("normalizer", normalizers.Replace("p", "q")),
    "post-processor": replace_rule("post_processor", processors.TemplateProcessing("a $A", special_tokens=[("a", 4)])),
}


@pytest.mark.parametrize("change", TOKENIZER_CHANGES.values(), ids=TOKENIZER_CHANGES.keys())
def test_a_change_of_the_tokenizer_is_seen(change: Callable[[Any], Any]) -> None:
    pipeline = pixart()
    cache = installed(pipeline)
    old = pipeline.encode_prompt("apple pie", **SHORT)
    assert same(pipeline.encode_prompt("apple pie", **SHORT), old)
    change(pipeline.tokenizer)
    new = pipeline.encode_prompt("apple pie", **SHORT)
    assert same(new, plain(pipeline, "apple pie", **SHORT))
    assert not same(new, old)
    assert counts(cache) == (1, 2, 0)


def test_a_rule_written_in_python_bypasses() -> None:
    """It has no form that could be compared."""

    class Split:
        def pre_tokenize(self, text: Any) -> None: ...

    pipeline = pixart()
    cache = installed(pipeline)
    pipeline.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Split())
    pipeline.encode_prompt("apple", **SHORT)
    pipeline.encode_prompt("apple", **SHORT)
    assert counts(cache) == (0, 0, 2)


def test_the_config_of_the_text_encoder_is_seen() -> None:
    pipeline = flux()
    cache = installed(pipeline)
    pipeline.encode_prompt("apple", **SHORT)
    pipeline.text_encoder.config._attn_implementation = "eager"
    assert same(pipeline.encode_prompt("apple", **SHORT), plain(pipeline, "apple", **SHORT))
    pipeline.encode_prompt("apple", **SHORT)
    assert counts(cache) == (1, 2, 0)


# --- LoRA -----------------------------------------------------------------------------------------


def add_lora(pipeline: FluxPipeline, name: str = "a") -> None:
    """Load an adapter that does something: random, where peft would begin with zero."""
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    pipeline.text_encoder.add_adapter(config, name)
    pipeline.text_encoder.eval()  # new layers come in training mode


LORA_STEPS: dict[str, Callable[[FluxPipeline], None]] = {
    "loaded": add_lora,
    "scaled": lambda p: p.set_adapters(["a"], [0.25]),
    "disabled": lambda p: p.disable_lora(),
    "enabled": lambda p: p.enable_lora(),
    "second loaded": lambda p: add_lora(p, "b"),
    "both": lambda p: p.set_adapters(["a", "b"], [0.5, 2.0]),
    "fused": lambda p: p.fuse_lora(components=["text_encoder"]),
    "unfused": lambda p: p.unfuse_lora(components=["text_encoder"]),
    "deleted": lambda p: p.delete_adapters("b"),
    "unloaded": lambda p: p.unload_lora_weights(),
}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_the_cache_follows_a_lora_through_its_life() -> None:
    pipeline = flux()
    cache = installed(pipeline, max_size=100)
    encode = functools.partial(pipeline.encode_prompt, "apple", **SHORT)
    results = {"bare": encode()}
    for name, step in LORA_STEPS.items():
        step(pipeline)
        results[name] = encode()
        assert same(results[name], plain(pipeline, "apple", **SHORT)), name
        hits = cache.hits
        assert same(encode(), results[name]), name
        assert cache.hits == hits + 1, name
    assert not same(results["loaded"], results["bare"])
    assert not same(results["scaled"], results["loaded"])
    assert same(results["disabled"], results["bare"])
    assert same(results["enabled"], results["scaled"])
    assert not same(results["both"], results["scaled"])
    assert cache.bypassed == 0


def test_a_lora_fused_and_unloaded_between_two_calls_is_not_missed() -> None:
    """Nothing of it remains but weights that were changed through `.data`, which moves no version counter."""
    pipeline = flux()
    cache = installed(pipeline)
    weight = pipeline.text_encoder.get_submodule("encoder.layers.0.self_attn.q_proj").weight
    old, version = pipeline.encode_prompt("apple", **SHORT), weight._version
    add_lora(pipeline)
    pipeline.fuse_lora(components=["text_encoder"])
    pipeline.unload_lora_weights()
    now = pipeline.text_encoder.get_submodule("encoder.layers.0.self_attn.q_proj").weight
    assert (now is weight, now._version) == (True, version)
    new = pipeline.encode_prompt("apple", **SHORT)
    assert same(new, plain(pipeline, "apple", **SHORT))
    assert not same(new, old)
    assert cache.misses == 2


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_going_back_and_forth_between_two_adapters_hits() -> None:
    pipeline = flux()
    add_lora(pipeline, "a")
    add_lora(pipeline, "b")
    cache = installed(pipeline)
    results = []
    for name in ("a", "b", "a", "b"):
        pipeline.set_adapters([name], [1.0])
        results.append(pipeline.encode_prompt("apple", **SHORT))
    assert counts(cache) == (2, 2, 0)
    assert same(results[0], results[2])
    assert same(results[1], results[3])
    assert not same(results[0], results[1])


def test_the_lora_scale_argument_is_part_of_the_key() -> None:
    pipeline = flux()
    add_lora(pipeline)
    cache = installed(pipeline)
    for scale in (0.5, 2.0, 0.5):
        got = pipeline.encode_prompt("apple", lora_scale=scale, **SHORT)
        assert same(got, plain(pipeline, "apple", lora_scale=scale, **SHORT))
        assert pipeline._lora_scale == scale
    assert counts(cache) == (1, 2, 0)


def test_an_adapter_in_training_mode_bypasses() -> None:
    pipeline = flux()
    add_lora(pipeline)
    cache = installed(pipeline)
    pipeline.text_encoder.train()
    pipeline.encode_prompt("apple", **SHORT)
    assert counts(cache) == (0, 0, 1)
