"""Remember what `encode_prompt` returned, for as long as it would return the same again.

A call's key is its arguments, bound and typed, and what the method reads from the pipeline (found in its
source): a text encoder counts with its weights, adapters, hooks and modes, a tokenizer with its vocabulary
size and settings. What has no key (images, tensors, unknown objects, training encoders) passes by, counted.

Weights are told apart by identity, version counter and a sample of values, because edits through `.data`,
such as those of a LoRA being fused, move no counter. What this module does not know:
- a sparse edit through `.data` that misses every sampled value (edits under `no_grad` are always seen);
- a tokenizer's rules exchanged in place, and what encode_prompt reaches through globals or closures;
- CUDA streams: an entry is copied on the current stream of whoever stores or reads it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import os
import re
import threading
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sized
from concurrent.futures import Future
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

_CACHE_MISS: Final = object()
_ENABLE: Final = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE"
_SIZE: Final = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE"
_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")
_INSTALLED: Final = ("encode_prompt", "__getstate__")
_ON_SELF: Final = re.compile(r"""\bself(?:\.|,\s*["'])(\w+)""")  # self.name, getattr(self, "name")
_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes, torch.dtype, torch.device})
# encode_prompt asks these only for a dtype or a size; their weights never reach the embeddings.
_DENOISERS: Final = ("transformer", "unet")
# How peft keeps, on each layer it wraps, which adapters are on, how strongly, and which are merged.
_ADAPTERS: Final = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
_TOKENIZER: Final = ("tokenizer", "padding_side", "truncation_side", "model_max_length", "chat_template")


class _Entry(NamedTuple):
    value: Any
    nbytes: int


class PromptEmbedCache:
    """A thread-safe least-recently-used store of encode_prompt results, bounded by entries and by bytes.

    Values are copied in and out, so no caller shares memory with the cache or another caller; copies stay on
    the device of the original. `max_bytes=None` means no byte limit.
    """

    def __init__(self, max_size: int = 32, enabled: bool = True, *, max_bytes: int | None = 1 << 30) -> None:
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
        return _CACHE_MISS if entry is None else _copied(entry.value, {})

    def put(self, key: Hashable, value: Any) -> None:
        """Store a copy of `value`, unless it exceeds the byte budget or holds what cannot be copied."""
        entry = _private(value)
        with self._lock:
            self._store(key, entry)

    def clear(self) -> None:
        """Drop every entry, and those still being encoded; the counters go on."""
        with self._lock:
            self._entries.clear()
            self._encoding = {}
            self._bytes = 0

    def stats(self) -> dict[str, int]:
        """Return the counters and the occupancy; `max_bytes` is -1 without a limit."""
        with self._lock:
            counters = {"hits": self.hits, "misses": self.misses, "bypassed": self.bypassed}
            counters |= {"not_stored": self._not_stored, "size": len(self._entries), "bytes": self._bytes}
            return counters | {"max_size": self.max_size, "max_bytes": self.max_bytes or -1}

    def get_or_encode(self, key: Hashable, encode: Callable[[], tuple[Any, bool]]) -> Any:
        """Return the value under `key`; of equal calls at the same time one encodes and the others wait.

        `encode` returns the value and whether it may be kept. When it raises, nothing is kept, its caller
        gets the exception, and those who waited start over.
        """
        while True:
            with self._lock:
                entry, theirs = self._look_up(key), self._encoding.get(key)
                if entry is None and theirs is None:
                    self.misses += 1
                    mine = self._encoding[key] = Future()
                    break
            if entry is None and theirs is not None:
                entry = theirs.result()
                with self._lock:
                    self.hits += entry is not None
            if entry is not None:
                return _copied(entry.value, {})
        try:
            value, keep = encode()
            entry = _private(value) if keep else None
            return value
        finally:
            with self._lock:
                # Not after clear(): what was asked for before it must not come back.
                if self._encoding.get(key) is mine:
                    del self._encoding[key]
                    self._store(key, entry)
            mine.set_result(entry)

    def _look_up(self, key: Hashable) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self.hits += 1
        return entry

    def _store(self, key: Hashable, entry: _Entry | None) -> None:
        previous = self._entries.pop(key, None)
        self._bytes -= 0 if previous is None else previous.nbytes
        budget = self.max_bytes or float("inf")
        if entry is None or entry.nbytes > budget:
            self._not_stored += 1
            return
        self._entries[key] = entry
        self._bytes += entry.nbytes
        while len(self._entries) > self.max_size or self._bytes > budget:
            self._bytes -= self._entries.popitem(last=False)[1].nbytes


def install_prompt_embed_cache(
    pipeline: Any,
    *,
    max_size: int = 32,
    enabled: bool = True,
    model_tag: str | None = None,
    max_bytes: int | None = 1 << 30,
) -> PromptEmbedCache | None:
    """Cache `pipeline.encode_prompt` on this instance; None if it has none.

    A second call changes nothing and returns the cache already there. `model_tag` becomes part of every key.
    Copies of the pipeline (`copy`, `deepcopy`, `pickle`) have no cache, so that they use their own encoders.
    """
    if not callable(getattr(pipeline, "encode_prompt", None)):
        return None
    installed = vars(pipeline).get("encode_prompt")
    if isinstance(installed, _CachedEncodePrompt):
        return installed.cache
    cache = PromptEmbedCache(max_size, enabled, max_bytes=max_bytes)
    cached = _CachedEncodePrompt(pipeline, cache, model_tag)
    # Past __setattr__, which in a DiffusionPipeline may write to the config.
    vars(pipeline).update(zip(_INSTALLED, (cached, cached.state_without_cache), strict=True))
    return cache


def uninstall_prompt_embed_cache(pipeline: Any) -> None:
    """Give `pipeline` back the encode_prompt it had; nothing happens if it is not cached."""
    installed = vars(pipeline).get("encode_prompt")
    if isinstance(installed, _CachedEncodePrompt):
        installed.take_off(vars(pipeline))


def resolve_prompt_embed_cache_config(
    enable: bool | None = None,
    max_size: int | None = None,
) -> tuple[bool, int]:
    """Return (enabled, max_size): what the environment says, else the argument, else off and 32.

    OMNI_DIFFUSION_PROMPT_EMBED_CACHE (1/0, true/false, yes/no, on/off) and
    OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE (a positive integer) win over the arguments; empty says nothing.
    """
    switch, size = (os.environ.get(name, "").strip().lower() for name in (_ENABLE, _SIZE))
    if switch and switch not in _ON + _OFF:
        raise ValueError(f"{_ENABLE}={switch!r} is not one of {', '.join(_ON + _OFF)}")
    if size and not (size.isdecimal() and int(size) > 0):
        raise ValueError(f"{_SIZE}={size!r} is not a positive integer")
    wanted = 32 if max_size is None else _positive("max_size", max_size)
    return switch in _ON if switch else bool(enable), int(size) if size else wanted


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer")
    return value


class _CachedEncodePrompt:
    """Stands in for encode_prompt on one pipeline; holds it weakly, so that `del pipeline` frees it."""

    def __init__(self, pipeline: Any, cache: PromptEmbedCache, model_tag: str | None) -> None:
        method = pipeline.encode_prompt
        functools.update_wrapper(self, method)
        del self.__dict__["__wrapped__"]  # it would hold the pipeline
        self.__signature__ = inspect.signature(method)
        self.cache, self._model_tag = cache, model_tag
        self._owner = weakref.ref(pipeline) if type(pipeline).__weakrefoffset__ else lambda: pipeline
        mine = getattr(method, "__self__", None) is pipeline
        self._function = method.__func__ if mine else staticmethod(method)
        self._replaced = {name: vars(pipeline)[name] for name in _INSTALLED if name in vars(pipeline)}
        reads = _attributes_read(type(pipeline), method)
        self._leaves_lora_scale = "_lora_scale" in reads
        self._reads = sorted(reads - {"_lora_scale", *_INSTALLED})
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = itertools.count()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = self._owner()
        if pipeline is None:
            raise ReferenceError("the pipeline of this encode_prompt is gone; keep a reference to it")
        original = self._function.__get__(pipeline)
        try:
            if not self.cache.enabled:
                raise TypeError("switched off")
            bound = self.__signature__.bind(*args, **kwargs)
            bound.apply_defaults()
            # A lora_scale that is given replaces the standing one before anything reads it.
            given = bound.arguments.get("lora_scale")
            scale = vars(pipeline).get("_lora_scale") if given is None else given
            asked = (self._model_tag, _freeze(bound.arguments), _freeze(scale))
            state = _State(pipeline, self._reads, self.number)
            key = (asked, state.content, _surroundings(pipeline, state.devices))
        except TypeError:
            with self.cache._lock:
                self.cache.bypassed += 1
            return original(*args, **kwargs)

        def encode() -> tuple[Any, bool]:
            value = original(*args, **kwargs)
            with contextlib.suppress(TypeError):
                return value, state.content == _State(pipeline, self._reads, self.number).content
            return value, False

        value = self.cache.get_or_encode(key, encode)
        if given is not None and self._leaves_lora_scale:
            pipeline._lora_scale = given  # encode_prompt leaves it behind, so a hit must too
        return value

    def number(self, value: Any) -> int:
        """Return a number that no other object ever has; an id() comes back once its object is gone."""
        place, known = id(value), self._known
        if place not in known:
            known[place] = weakref.ref(value, lambda _: known.pop(place, None)), next(self._count)
        return known[place][1]

    def take_off(self, attributes: dict[str, Any]) -> None:
        """Put back into `attributes` what the installation replaced there."""
        attributes.update(self._replaced)
        for name in {*_INSTALLED} - self._replaced.keys():
            del attributes[name]

    def state_without_cache(self) -> Any:
        """Answer copy and pickle, which ask the instance for `__getstate__`."""
        pipeline: Any = self._owner()
        state = self._replaced.get("__getstate__", type(pipeline).__getstate__.__get__(pipeline))()
        if isinstance(state, dict) and state.get("encode_prompt") is self:
            self.take_off(state := dict(state))
        return state


def _attributes_read(kind: type, method: Any) -> frozenset[str]:
    """Return the names that encode_prompt, and the methods and properties it uses, look up on `self`."""
    names: set[str] = set()
    # Every definition along the bases, because a method may call the one it overrides.
    todo = [method, *(vars(base).get("encode_prompt") for base in kind.__mro__)]
    while todo:
        member = todo.pop()
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        try:
            found = _ON_SELF.findall(inspect.getsource(function)) if inspect.isfunction(function) else ()
        except OSError:  # typed at a prompt: all names it uses, more than enough
            found = function.__code__.co_names
        todo += [vars(base).get(name) for name in {*found} - names for base in kind.__mro__]
        names.update(found)
    return frozenset(names)


class _State:
    """What encode_prompt reads from a pipeline; `devices` apart, because offloading moves encoders."""

    def __init__(self, pipeline: Any, reads: list[str], number: Callable[[Any], int]) -> None:
        self.trainable = False
        self.devices: set[torch.device] = set()
        self._number = number
        self._samples: dict[torch.dtype, list[Tensor]] = {}
        kinds = dict.fromkeys(_DENOISERS, lambda value: (number(value), getattr(value, "dtype", None)))
        held = ("_parameters", "_buffers", "_modules") if isinstance(pipeline, nn.Module) else ()
        own = ChainMap(vars(pipeline), *(vars(pipeline)[name] for name in held))
        digest = hashlib.blake2b()
        with torch.no_grad():
            parts = [(n, _freeze(own[n], kinds.get(n, self._object))) for n in reads if n in own]
            for samples in self._samples.values():  # one copy to the host for all tensors of a dtype
                joined = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu()
                digest.update(joined.view(torch.uint8).numpy().tobytes())
        if self.trainable and torch.is_grad_enabled():
            raise TypeError("the result belongs to a graph")
        self.content: Hashable = (*parts, digest.digest())

    def _object(self, value: Any) -> Hashable:
        if isinstance(value, nn.Module):
            return tuple(part for module in value.modules() for part in self._module(module))
        if isinstance(value, Tensor):
            return self._tensor(value)
        own = getattr(value, "__dict__", {})
        fields = tuple((name, _freeze(own[name], self._object)) for name in _TOKENIZER if name in own)
        return self._number(value), len(value) if isinstance(value, Sized) else None, fields

    def _module(self, module: nn.Module) -> Iterator[Hashable]:
        if module.training:
            raise TypeError("dropout draws anew at each call")
        own = vars(module)
        elsewhere: Any = getattr(own.get("_hf_hook"), "weights_map", None)
        yield self._number(module), self._number(own["forward"]) if "forward" in own else None
        yield tuple((name, _freeze(own[name])) for name in _ADAPTERS if name in own)
        for number, hook in (*module._forward_pre_hooks.items(), *module._forward_hooks.items()):
            # Those of transformers only record, and appear during the first call.
            if not getattr(hook, "__module__", "").startswith("transformers."):
                yield number
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:  # accelerate keeps the values elsewhere between calls
                tensor = elsewhere[name]
            if tensor is not None:
                yield self._tensor(tensor)

    def _tensor(self, tensor: Tensor) -> Hashable:
        self.trainable |= tensor.requires_grad
        self.devices.add(tensor.device)
        if type(tensor) in (Tensor, nn.Parameter) and tensor.numel():
            step = tensor.numel() // 64 | 1  # some 64 values, and by an odd step, to meet every column
            sample = tensor.contiguous().as_strided(((tensor.numel() - 1) // step + 1,), (step,))
            self._samples.setdefault(tensor.dtype, []).append(sample)
        version = None if tensor.is_inference() else tensor._version
        return self._number(tensor), version, tensor.dtype, tensor.shape


def _surroundings(pipeline: Any, devices: set[torch.device]) -> Hashable:
    """Return what else decides device, dtype and rounding of the result."""
    execution = getattr(pipeline, "_execution_device", torch.device("cpu"))
    kinds = sorted({device.type for device in (*devices, execution)})
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    current = torch.cuda.current_device() if "cuda" in kinds else None
    rounding = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    return execution, current, *autocast, rounding, frozenset(devices)


def _freeze(value: Any, other: Callable[[Any], Hashable] | None = None) -> Hashable:
    """Return a key equal only for equal values of equal types; `other` answers for unknown types."""
    kind = type(value)
    if kind in _ATOMS:
        return kind, value.hex() if kind is float else value  # 0.0 and -0.0 are equal
    if isinstance(value, PurePath):
        return kind, str(value)
    if kind in (list, tuple):
        return kind, tuple(_freeze(item, other) for item in value)
    if isinstance(value, dict):
        return kind, frozenset((_freeze(name, other), _freeze(item, other)) for name, item in value.items())
    if other is None:
        raise TypeError(f"no key for a {kind.__name__}")
    return other(value)


def _private(value: Any) -> _Entry | None:
    """Return an entry that shares nothing with `value` and suits any grad mode; None if there can be none."""
    memo: dict[int, Any] = {}
    with contextlib.suppress(TypeError, torch.OutOfMemoryError), torch.inference_mode(False), torch.no_grad():
        return _Entry(_copied(value, memo), sum(t.nbytes for t in memo.values() if isinstance(t, Tensor)))
    return None


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return `value` with every tensor and container new; one that occurs twice stays one."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) not in memo:
        if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.requires_grad:
            memo[id(value)] = value.detach().clone()
        elif kind in (list, tuple):
            memo[id(value)] = kind(_copied(item, memo) for item in value)
        elif kind is dict:
            memo[id(value)] = {name: _copied(item, memo) for name, item in value.items()}
        else:
            raise TypeError(f"no copy of a {kind.__name__}")
    return memo[id(value)]
