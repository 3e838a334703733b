"""The prompt-embedding cache as it is documented: each test is named after an item and uses it as described."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from transformers.modeling_outputs import BaseModelOutput

import holdover
from holdover.errors import HoldoverWarning
from holdover.prompt_embed_cache import (
    _CACHE_MISS,
    PromptEmbedCache,
    install_prompt_embed_cache,
    resolve_prompt_embed_cache_config,
    uninstall_prompt_embed_cache,
)

ENABLE, SIZE = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE", "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE"
Embeds = namedtuple("Embeds", ["prompt", "mask"])


class Log:
    """What a pipeline was asked for."""

    def __init__(self) -> None:
        self.prompts: list[str] = []


class Pipeline:
    """Encodes a prompt as its bytes; `make` decides what is returned."""

    def __init__(self, make: Callable[[torch.Tensor], Any] = lambda embeds: embeds) -> None:
        self.log = Log()
        self.make = make

    @property
    def calls(self) -> list[str]:
        return self.log.prompts

    def encode_prompt(self, prompt: str, scale: Any = 1.0, prompt_embeds: torch.Tensor | None = None) -> Any:
        self.log.prompts.append(prompt)
        embeds = torch.tensor(list(prompt.encode()), dtype=torch.float32) * float(scale)
        return self.make(embeds) if prompt_embeds is None else prompt_embeds


def install(pipeline: Any, **options: Any) -> PromptEmbedCache:
    cache = install_prompt_embed_cache(pipeline, **options)
    assert cache is not None
    return cache


# PromptEmbedCache


def test_PromptEmbedCache_is_thread_safe() -> None:
    cache, barrier = PromptEmbedCache(max_size=4), threading.Barrier(4)

    def use(thread: int) -> bool:
        barrier.wait()
        right = True
        for i in range(200):
            key = (thread * i) % 7
            cache.put(key, torch.full((2,), float(key)))
            found = cache.get(key)
            right &= found is _CACHE_MISS or found.tolist() == [key, key]
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
    assert cache.stats()["size"] <= 4
    assert cache.hits + cache.misses == 800


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, t + 1),
    "none": lambda t: None,
    "tuple with none": lambda t: (t, None, [t + 1]),
    "named tuple": lambda t: Embeds(t, t > 0),
    "dict": lambda t: {"embeds": t},
    "OrderedDict": lambda t: OrderedDict(b=t, a=t + 1),
    "ModelOutput of transformers": lambda t: BaseModelOutput(last_hidden_state=t, hidden_states=(t, t + 1)),
    "BaseOutput of diffusers": lambda t: Transformer2DModelOutput(sample=t),
    "array": lambda t: t.numpy() + 1,
    "tuple of arrays": lambda t: (t.numpy() + 1, t),
}


def same(a: Any, b: Any) -> bool:
    """Same types all the way down, and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) and len(a) == len(b) if isinstance(a, tuple | list) else a == b


def parts(value: Any) -> list[Any]:
    """The tensors and arrays in a value."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [part for item in inside for part in parts(item)]


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS.keys())
def test_PromptEmbedCache_stores_whatever_encode_prompt_returns(make: Callable[[torch.Tensor], Any]) -> None:
    pipeline = Pipeline(make)
    expected = pipeline.encode_prompt("apple")
    cache = install(pipeline)
    pipeline.calls.clear()
    results = [pipeline.encode_prompt("apple") for _ in range(3)]
    assert pipeline.calls == ["apple"]
    assert (cache.hits, cache.stats()["not_stored"]) == (2, 0)
    assert all(same(result, expected) for result in results)
    for part in parts(results[1]):
        part.fill(9) if isinstance(part, np.ndarray) else part.fill_(9)
    assert same(pipeline.encode_prompt("apple"), expected)  # no caller can change what is stored


def test_PromptEmbedCache_attributes_of_a_stored_output() -> None:
    """A hit has the attributes of the class too."""
    pipeline = Pipeline(RESULTS["ModelOutput of transformers"])
    install(pipeline)
    first, second = pipeline.encode_prompt("apple"), pipeline.encode_prompt("apple")
    assert torch.equal(second.last_hidden_state, first.last_hidden_state)
    assert second["hidden_states"] is second.hidden_states


def test_PromptEmbedCache_evicts_the_least_recently_used() -> None:
    cache = PromptEmbedCache(max_size=2)
    for key in "ab":
        cache.put(key, key.upper())
    assert cache.get("a") == "A"
    cache.put("c", "C")
    assert cache.get("b") is _CACHE_MISS
    assert [cache.get(key) for key in "ac"] == ["A", "C"]


def test_bypassed() -> None:
    """Calls without a key: tensors, images, embeddings that are given."""
    pipeline = Pipeline()
    cache = install(pipeline)
    given = torch.ones(1)
    assert pipeline.encode_prompt("apple", prompt_embeds=given) is given
    assert pipeline.encode_prompt("apple", scale=torch.ones(())) is not None
    assert (cache.bypassed, cache.misses, cache.hits) == (2, 0, 0)


def test_enabled() -> None:
    pipeline = Pipeline()
    cache = install(pipeline, enabled=False)
    assert cache.enabled is False
    pipeline.encode_prompt("apple")
    pipeline.encode_prompt("apple")
    assert len(pipeline.calls) == 2
    cache.enabled = True  # settable, with effect
    pipeline.encode_prompt("apple")
    pipeline.encode_prompt("apple")
    assert len(pipeline.calls) == 3


def test_hits_and_misses() -> None:
    pipeline = Pipeline()
    cache = install(pipeline)
    assert (cache.hits, cache.misses) == (0, 0)
    for prompt in ("apple", "pear", "apple", "apple"):
        pipeline.encode_prompt(prompt)
    assert (cache.hits, cache.misses) == (2, 2)


def test_max_size() -> None:
    assert PromptEmbedCache().max_size == 32
    pipeline = Pipeline()
    cache = install(pipeline, max_size=3)
    for prompt in "abcde":
        pipeline.encode_prompt(prompt)
    assert cache.stats()["size"] == 3
    cache.max_size = 1  # settable, with effect at the next entry
    pipeline.encode_prompt("f")
    assert cache.stats()["size"] == 1


def test_clear() -> None:
    pipeline = Pipeline()
    cache = install(pipeline)
    pipeline.encode_prompt("apple")
    cache.clear()
    pipeline.encode_prompt("apple")
    assert (len(pipeline.calls), cache.hits, cache.stats()["size"]) == (2, 0, 1)


def test_get_returns_a_sentinel_for_a_miss() -> None:
    cache = PromptEmbedCache()
    assert cache.get("a") is _CACHE_MISS
    cache.put("a", None)
    assert cache.get("a") is None


def test_put_replaces() -> None:
    cache = PromptEmbedCache()
    cache.put("a", 1)
    cache.put("a", 2)
    assert cache.get("a") == 2
    assert cache.stats()["size"] == 1


def test_stats() -> None:
    pipeline = Pipeline()
    cache = install(pipeline, max_size=5)
    for prompt in ("apple", "apple", "pear"):
        pipeline.encode_prompt(prompt)
    expected = {"size": 2, "max_size": 5, "hits": 1, "misses": 2, "bypassed": 0}
    assert cache.stats() | expected == cache.stats()
    assert all(type(value) is int for value in cache.stats().values())


# install_prompt_embed_cache


def test_install_prompt_embed_cache_by_argument() -> None:
    """Results are cached by the arguments, however they are passed; numpy's numbers are arguments like others."""
    pipeline = Pipeline()
    cache = install(pipeline)
    first = pipeline.encode_prompt("apple", np.float32(2.0))
    assert torch.equal(pipeline.encode_prompt(scale=np.float32(2.0), prompt="apple"), first)
    assert (cache.hits, cache.misses, cache.bypassed) == (1, 1, 0)
    pipeline.encode_prompt("apple", np.float32(3.0))
    assert cache.misses == 2


def test_install_prompt_embed_cache_is_idempotent() -> None:
    pipeline = Pipeline()
    cache = install(pipeline, max_size=4)
    wrapped = pipeline.encode_prompt
    assert install_prompt_embed_cache(pipeline, max_size=8) is cache
    assert pipeline.encode_prompt is wrapped
    assert cache.max_size == 4


def test_install_prompt_embed_cache_returns_none_without_encode_prompt() -> None:
    assert install_prompt_embed_cache(object()) is None


def test_install_prompt_embed_cache_model_tag() -> None:
    """The tag is part of the key: entries of another model under the same cache would differ by it."""
    keys = []
    for tag in ("a", "b", None):
        pipeline = Pipeline()
        cache = install(pipeline, model_tag=tag)
        pipeline.encode_prompt("apple")
        keys += list(cache._entries)
    assert len(set(keys)) == 3
    assert holdover.install_prompt_embed_cache is install_prompt_embed_cache


# resolve_prompt_embed_cache_config


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (ENABLE, SIZE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_resolve_prompt_embed_cache_config_defaults(env: pytest.MonkeyPatch) -> None:
    assert resolve_prompt_embed_cache_config() == (False, 32)
    assert resolve_prompt_embed_cache_config(True, 7) == (True, 7)


@pytest.mark.parametrize(("text", "enabled"), [("1", True), ("true", True), ("0", False), ("false", False)])
def test_OMNI_DIFFUSION_PROMPT_EMBED_CACHE(env: pytest.MonkeyPatch, text: str, enabled: bool) -> None:
    env.setenv(ENABLE, text)
    assert resolve_prompt_embed_cache_config(enable=not enabled) == (enabled, 32)


def test_OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE(env: pytest.MonkeyPatch) -> None:
    env.setenv(SIZE, "5")
    assert resolve_prompt_embed_cache_config(True, 7) == (True, 5)


@pytest.mark.parametrize(
    ("name", "text"), [(ENABLE, "maybe"), (ENABLE, "2"), (SIZE, "many"), (SIZE, "0"), (SIZE, "-3")]
)
def test_a_variable_that_cannot_be_read_is_ignored_with_a_warning(
    env: pytest.MonkeyPatch, name: str, text: str
) -> None:
    env.setenv(name, text)
    with pytest.warns(HoldoverWarning, match=rf"^{name}='{text}' is ignored: it is not (one of|a positive)") as warned:
        assert resolve_prompt_embed_cache_config(True, 7) == (True, 7)
    assert warned[0].filename == __file__


# uninstall_prompt_embed_cache


def test_uninstall_prompt_embed_cache() -> None:
    pipeline = Pipeline()
    before = dict(vars(pipeline))
    cache = install(pipeline)
    uninstall_prompt_embed_cache(pipeline)
    assert vars(pipeline) == before
    assert pipeline.encode_prompt.__func__ is Pipeline.encode_prompt
    pipeline.encode_prompt("apple")
    pipeline.encode_prompt("apple")
    assert (len(pipeline.calls), cache.misses) == (2, 0)
    uninstall_prompt_embed_cache(pipeline)  # not wrapped: nothing happens
