"""Cache the results of a pipeline's `encode_prompt` for as long as calling it again would return the same.

The key of a call is made of its arguments and of everything the method reads from the pipeline, which is found in its
source: text encoders with their configs, tokenizers with their settings, and plain attributes. A call without a key
(images, tensors) bypasses the cache.

Weights are compared by identity, version counter and a sample of their values: edits through `.data`, for example when
a LoRA is fused, do not change the version counter. Not detected are an edit through `.data` that misses every sampled
value, a plain attribute of a module, a vocabulary replaced in place by one of the same size, and what encode_prompt
reaches through globals or closures.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import os
import re
import threading
import warnings
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sized
from concurrent.futures import Future
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from .errors import HoldoverWarning

_CACHE_MISS: Final = object()
_GIB: Final = 1 << 30
_ENABLE_VARIABLE: Final = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE"
_SIZE_VARIABLE: Final = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE"
_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")
_INSTALLED: Final = ("encode_prompt", "__getstate__")  # the attributes that the installation sets on a pipeline
_SELF_ATTRIBUTE: Final = re.compile(r"""\bself(?:\.|,\s*["'])(\w+)""")  # self.name, getattr(self, "name")
_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes, torch.dtype, torch.device})
# encode_prompt reads only a dtype or a size from these; their weights do not affect the embeddings.
_DENOISERS: Final = ("transformer", "unet")
# Where peft keeps, on each layer it wraps, the active and merged adapters and their scales.
_ADAPTERS: Final = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
# What a tokenizer keeps in containers and is small; its plain attributes are all part of the key.
_TOKENIZER: Final = (
    "tokenizer",
    "_tokenizer",
    "chat_template",
    "_special_tokens_map",
    "_extra_special_tokens",
    "_added_tokens_decoder",
)
# The rules of a `tokenizers.Tokenizer`. Its padding and truncation are set again by every call.
_RULES: Final = ("normalizer", "pre_tokenizer", "post_processor")


class _Entry(NamedTuple):
    value: Any
    nbytes: int


class PromptEmbedCache:
    """A thread-safe LRU cache of encode_prompt results, limited by number of entries and by bytes.

    Values are copied in and out, on their device and the current CUDA stream. `max_bytes=None` means no byte limit.
    """

    def __init__(self, max_size: int = 32, enabled: bool = True, *, max_bytes: int | None = _GIB) -> None:
        self.max_size = _positive("max_size", max_size)
        self.max_bytes = None if max_bytes is None else _positive("max_bytes", max_bytes)
        self.enabled = enabled
        self.hits = self.misses = self.bypassed = self._not_stored = self._bytes = 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._encoding: dict[Hashable, Future[_Entry | None]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """Return a copy of the value stored under `key`, or `_CACHE_MISS`."""
        with self._lock:
            entry = self._look_up(key)
            self.misses += entry is None
        return _CACHE_MISS if entry is None else _copy(entry.value, {})

    def put(self, key: Hashable, value: Any) -> None:
        """Store a copy of `value`, unless it exceeds the byte limit or cannot be copied."""
        entry = _make_entry(value)
        with self._lock:
            self._store(key, entry)

    def clear(self) -> None:
        """Drop all entries, including those being encoded; the counters are kept."""
        with self._lock:
            self._entries.clear()
            self._encoding, self._bytes = {}, 0

    def stats(self) -> dict[str, int]:
        """Return the counters, the size and the limits; `max_bytes` is -1 if there is no limit."""
        with self._lock:
            counters = {"hits": self.hits, "misses": self.misses, "bypassed": self.bypassed}
            counters |= {"not_stored": self._not_stored, "size": len(self._entries), "bytes": self._bytes}
            return counters | {"max_size": self.max_size, "max_bytes": self.max_bytes or -1}

    def get_or_encode(self, key: Hashable, encode: Callable[[], tuple[Any, bool]]) -> Any:
        """Return the value under `key`; of equal concurrent calls, one encodes and the others wait for it.

        `encode` returns the value and whether it may be stored. If it raises, the waiting calls try again.
        """
        while True:
            with self._lock:
                entry, running = self._look_up(key), self._encoding.get(key)
                if entry is None and running is None:
                    self.misses += 1
                    own = self._encoding[key] = Future()
                    break
            if entry is None and running is not None:
                entry = running.result()
                with self._lock:
                    self.hits += entry is not None
            if entry is not None:
                return _copy(entry.value, {})
        try:
            value, keep = encode()
            entry = _make_entry(value) if keep else None
            return value
        finally:
            with self._lock:
                # After a clear(), a result that was requested before it must not be stored.
                if self._encoding.get(key) is own:
                    del self._encoding[key]
                    self._store(key, entry)
            own.set_result(entry)

    def _look_up(self, key: Hashable) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self.hits += 1
        return entry

    def _store(self, key: Hashable, entry: _Entry | None) -> None:
        previous = self._entries.pop(key, None)
        self._bytes -= 0 if previous is None else previous.nbytes
        limit = self.max_bytes or float("inf")
        if entry is None or entry.nbytes > limit:
            self._not_stored += 1
            return
        self._entries[key] = entry
        self._bytes += entry.nbytes
        while len(self._entries) > self.max_size or self._bytes > limit:
            self._bytes -= self._entries.popitem(last=False)[1].nbytes


def install_prompt_embed_cache(
    pipeline: Any,
    *,
    max_size: int = 32,
    enabled: bool = True,
    model_tag: str | None = None,
    max_bytes: int | None = _GIB,
) -> PromptEmbedCache | None:
    """Cache `pipeline.encode_prompt` on this instance; return None if the pipeline has no such method.

    A second call changes nothing and returns the existing cache. `model_tag` becomes part of every key. Copies of the
    pipeline (`copy`, `deepcopy`, `pickle`) have no cache, so that they use their own encoders.
    """
    if not callable(getattr(pipeline, "encode_prompt", None)):
        return None
    installed = vars(pipeline).get("encode_prompt")
    if isinstance(installed, _CachedEncodePrompt):
        return installed.cache
    cache = PromptEmbedCache(max_size, enabled, max_bytes=max_bytes)
    cached = _CachedEncodePrompt(pipeline, cache, model_tag)
    # Not through __setattr__, which may write to the config of a DiffusionPipeline.
    vars(pipeline).update(zip(_INSTALLED, (cached, cached.getstate), strict=True))
    return cache


def uninstall_prompt_embed_cache(pipeline: Any) -> None:
    """Restore the original encode_prompt of `pipeline`; does nothing if it is not cached."""
    installed = vars(pipeline).get("encode_prompt")
    if isinstance(installed, _CachedEncodePrompt):
        installed.restore(vars(pipeline))


def resolve_prompt_embed_cache_config(enable: bool | None = None, max_size: int | None = None) -> tuple[bool, int]:
    """Return (enabled, max_size) from the environment, else from the arguments, else off and 32.

    OMNI_DIFFUSION_PROMPT_EMBED_CACHE (1/0, true/false, yes/no, on/off) and OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE (a
    positive integer) override the arguments; a value that is empty or cannot be read is ignored, the latter with a
    warning.
    """
    switch = _read_variable(_ENABLE_VARIABLE, lambda text: text in _ON + _OFF, f"one of {', '.join(_ON + _OFF)}")
    size = _read_variable(_SIZE_VARIABLE, lambda text: text.isdecimal() and int(text) > 0, "a positive integer")
    default = 32 if max_size is None else _positive("max_size", max_size)
    return switch in _ON if switch else bool(enable), int(size) if size else default


def _read_variable(name: str, is_valid: Callable[[str], bool], expected: str) -> str:
    """Return an environment variable in lower case; an empty string if it is unset or invalid."""
    text = os.environ.get(name, "").strip().lower()
    if not text or is_valid(text):
        return text
    warnings.warn(f"{name}={text!r} is ignored: it is not {expected}.", HoldoverWarning, stacklevel=3)
    return ""


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer")
    return value


class _CachedEncodePrompt:
    """Replaces encode_prompt on one pipeline; refers to it weakly, so that `del pipeline` frees it."""

    def __init__(self, pipeline: Any, cache: PromptEmbedCache, model_tag: str | None) -> None:
        method = pipeline.encode_prompt
        functools.update_wrapper(self, method)
        del self.__dict__["__wrapped__"]  # it would keep the pipeline alive
        self.__signature__ = inspect.signature(method)
        self.cache, self._model_tag = cache, model_tag
        self._pipeline = weakref.ref(pipeline) if type(pipeline).__weakrefoffset__ else lambda: pipeline
        is_bound = getattr(method, "__self__", None) is pipeline
        self._function = method.__func__ if is_bound else staticmethod(method)
        self._replaced = {name: vars(pipeline)[name] for name in _INSTALLED if name in vars(pipeline)}
        attributes = _attributes_read(type(pipeline), method)
        self._sets_lora_scale = "_lora_scale" in attributes
        self._attributes = sorted(attributes - {"_lora_scale", *_INSTALLED})
        self._identities: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = itertools.count()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = self._pipeline()
        if pipeline is None:
            raise ReferenceError("the pipeline of this encode_prompt is gone; keep a reference to it")
        original = self._function.__get__(pipeline)
        try:
            if not self.cache.enabled:
                raise TypeError("the cache is disabled")
            bound = self.__signature__.bind(*args, **kwargs)
            bound.apply_defaults()
            # encode_prompt stores a lora_scale argument on the pipeline before it reads the scale.
            given = bound.arguments.get("lora_scale")
            scale = vars(pipeline).get("_lora_scale") if given is None else given
            arguments = (self._model_tag, _freeze(bound.arguments), _freeze(scale))
            state = _PipelineState(pipeline, self._attributes, self.identity)
            key = (arguments, state.content, state.execution)
        except TypeError:  # no key
            with self.cache._lock:
                self.cache.bypassed += 1
            return original(*args, **kwargs)

        def encode() -> tuple[Any, bool]:
            value = original(*args, **kwargs)
            with contextlib.suppress(TypeError):
                return value, state.content == _PipelineState(pipeline, self._attributes, self.identity).content
            return value, False

        value = self.cache.get_or_encode(key, encode)
        if given is not None and self._sets_lora_scale:
            pipeline._lora_scale = given  # a hit must leave it on the pipeline as encode_prompt does
        return value

    def identity(self, value: Any) -> int:
        """Return a number that is never used for another object, unlike id(), which can be reused."""
        key, known = id(value), self._identities
        if key not in known:
            known[key] = weakref.ref(value, lambda _: known.pop(key, None)), next(self._count)
        return known[key][1]

    def restore(self, attributes: dict[str, Any]) -> None:
        """Restore in `attributes` what the installation replaced there."""
        attributes.update(self._replaced)
        for name in {*_INSTALLED} - self._replaced.keys():
            del attributes[name]

    def getstate(self) -> Any:
        """The pipeline's `__getstate__` for copy and pickle: its state without the cache."""
        pipeline: Any = self._pipeline()
        state = self._replaced.get("__getstate__", type(pipeline).__getstate__.__get__(pipeline))()
        if isinstance(state, dict) and state.get("encode_prompt") is self:
            self.restore(state := dict(state))
        return state


def _attributes_read(cls: type, method: Any) -> frozenset[str]:
    """Return the attributes of `self` that encode_prompt, and the methods and properties it uses, read."""
    names: set[str] = set()
    # All definitions in the base classes, because a method may call the one it overrides.
    pending = [method, *(vars(base).get("encode_prompt") for base in cls.__mro__)]
    while pending:
        member = pending.pop()
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        try:
            found = _SELF_ATTRIBUTE.findall(inspect.getsource(function)) if inspect.isfunction(function) else ()
        except OSError:  # without source, as in a console: all names the function uses, which include them
            found = function.__code__.co_names
        pending += [vars(base).get(name) for name in {*found} - names for base in cls.__mro__]
        names.update(found)
    return frozenset(names)


class _PipelineState:
    """Keys for what encode_prompt reads from a pipeline, and for the devices, dtype and rounding of its execution."""

    def __init__(self, pipeline: Any, attributes: list[str], identity: Callable[[Any], int]) -> None:
        self._devices: set[torch.device] = set()
        self._trainable = False
        self._identity = identity
        self._configs: set[int] = set()  # each is shared by many modules
        self._samples: dict[torch.dtype, list[Tensor]] = {}
        freeze = dict.fromkeys(_DENOISERS, lambda value: (identity(value), getattr(value, "dtype", None)))
        children = ("_parameters", "_buffers", "_modules") if isinstance(pipeline, nn.Module) else ()
        own = ChainMap(vars(pipeline), *(vars(pipeline)[name] for name in children))
        digest = hashlib.blake2b()
        with torch.no_grad():
            parts = [(n, _freeze(own[n], freeze.get(n, self._freeze_object))) for n in attributes if n in own]
            for samples in self._samples.values():  # one copy to the host for all tensors of a dtype
                joined = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu()
                digest.update(joined.view(torch.uint8).numpy().tobytes())
        if self._trainable and torch.is_grad_enabled():
            raise TypeError("the result has an autograd graph")
        self.content: Hashable = (*parts, digest.digest())
        device = getattr(pipeline, "_execution_device", torch.device("cpu"))
        types = sorted({each.type for each in (*self._devices, device)})
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types]
        current = torch.cuda.current_device() if "cuda" in types else None
        rounding = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        self.execution: Hashable = (device, current, *autocast, rounding, frozenset(self._devices))

    def _freeze_object(self, value: Any) -> Hashable:
        if isinstance(value, nn.Module):
            return tuple(part for module in value.modules() for part in self._freeze_module(module))
        if isinstance(value, Tensor):
            return self._freeze_tensor(value)
        if isinstance(value, AddedToken):
            return repr(value)
        if isinstance(value, Tokenizer):
            return tuple(_freeze_rule(getattr(value, name)) for name in _RULES)
        own = getattr(value, "__dict__", {}).items()
        settings = ((name, item) for name, item in own if name in _TOKENIZER or type(item) in _ATOMS)
        fields = tuple((name, _freeze(item, self._freeze_object)) for name, item in settings)
        return self._identity(value), len(value) if isinstance(value, Sized) else None, fields

    def _freeze_module(self, module: nn.Module) -> Iterator[Hashable]:
        if module.training:
            raise TypeError("in training mode the result may be random")
        own = vars(module)
        offloaded: Any = getattr(own.get("_hf_hook"), "weights_map", None)
        yield self._identity(module), self._identity(own["forward"]) if "forward" in own else None
        yield tuple((name, _freeze(own[name])) for name in _ADAPTERS if name in own)
        if "config" in own and id(own["config"]) not in self._configs:
            self._configs.add(id(own["config"]))
            yield _freeze(own["config"], self._freeze_config)
        for number, hook in (*module._forward_pre_hooks.items(), *module._forward_hooks.items()):
            # Hooks of transformers only record outputs, and are registered during the first call.
            if not getattr(hook, "__module__", "").startswith("transformers."):
                yield number
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:  # accelerate keeps offloaded weights elsewhere between calls
                tensor = offloaded[name]
            if tensor is not None:
                yield self._freeze_tensor(tensor)

    def _freeze_config(self, value: Any) -> Hashable:
        if hasattr(value, "to_dict"):  # a config of transformers, which may have configs inside it
            return type(value).__name__, _freeze(vars(value), self._freeze_config)
        return self._identity(value)

    def _freeze_tensor(self, tensor: Tensor) -> Hashable:
        self._trainable |= tensor.requires_grad
        self._devices.add(tensor.device)
        if type(tensor) in (Tensor, nn.Parameter) and tensor.numel():
            stride = tensor.numel() // 64 | 1  # about 64 values; an odd stride reaches every column
            sample = tensor.contiguous().as_strided(((tensor.numel() - 1) // stride + 1,), (stride,))
            self._samples.setdefault(tensor.dtype, []).append(sample)
        version = None if tensor.is_inference() else tensor._version
        return self._identity(tensor), version, tensor.dtype, tensor.shape


def _freeze(value: Any, freeze_other: Callable[[Any], Hashable] | None = None) -> Hashable:
    """Return a key that is equal only for equal values of equal types; `freeze_other` handles all other types."""
    kind = type(value)
    if kind in _ATOMS:
        return kind, value.hex() if kind is float else value  # 0.0 == -0.0
    if isinstance(value, PurePath):
        return kind, str(value)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if kind in (list, tuple):
        return kind, tuple(_freeze(item, freeze_other) for item in value)
    if isinstance(value, dict):
        items = ((_freeze(name, freeze_other), _freeze(item, freeze_other)) for name, item in value.items())
        return kind, frozenset(items)
    if freeze_other is None:
        raise TypeError(f"no key for a {kind.__name__}")
    return freeze_other(value)


def _freeze_rule(rule: Any) -> Hashable:
    """Return a key for a rule of a fast tokenizer: a digest of its JSON form."""
    try:
        return None if rule is None else hashlib.blake2b(rule.__getstate__()).digest()
    except Exception as error:  # a rule written in Python
        raise TypeError(f"no key for a {type(rule).__name__}: {error}") from None


def _make_entry(value: Any) -> _Entry | None:
    """Return an entry with a copy of `value` that works in any grad mode; None if it cannot be copied."""
    memo: dict[int, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        try:
            copied = _copy(value, memo)
        except Exception:  # of any kind: the class of the value may define how it is copied
            return None
    return _Entry(copied, sum(item.nbytes for item in memo.values() if isinstance(item, Tensor | np.ndarray)))


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; what occurs twice in `value` is copied once, and of a view only what it shows."""
    for tensor in _find_tensors(value, set()):
        memo[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(value, memo)


def _find_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of containers and objects; TypeError for one that must not be copied."""
    if id(value) in seen or type(value) in _ATOMS or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        raise TypeError(f"no copy of a {type(value).__name__}")
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.requires_grad:
            raise TypeError(f"no copy of a {type(value).__name__} of this kind")
        yield value
        return
    parts = list(value.values()) if isinstance(value, Mapping) else []
    parts += value if isinstance(value, list | tuple | set | frozenset) else []
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        yield from _find_tensors(part, seen)
