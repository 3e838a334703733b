"""Puts a cache on a transformer, its block lists and a scheduler, and takes it off without a trace.

Only instances are touched, and each keeps its class: `type(pipe.transformer)` and `type(pipe.scheduler)` are the plain
classes while a cache is on. There are three ways in, one for each kind of object:

- A scheduler gets two methods overridden on the instance.
- A transformer is entered through `_compiled_call_impl`, the slot in which `nn.Module` keeps what to call in place of
  its own forward. It lies outside every forward hook, so a held step does not onload offloaded weights, and outside the
  compiled graph.
- A block list is a ModuleList that the model iterates, and `__iter__` is looked up on the class. The list therefore has
  a private subclass of its class for the duration of one forward, and no longer.

Copies and pickles of a transformer or scheduler are plain: its `__getstate__` leaves out what was set here.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

from ..errors import EnableError
from ..models.inputs import ForwardSignature, get_module_class, unwrap_module
from ..models.registry import find_extractor, get_family
from ..models.trace import find_block_lists
from .parallel import SequenceSplits, find_groups
from .storage import RecentDict, map_output

if TYPE_CHECKING:
    from .blocks import BlockPass
    from .engine import Engine
    from .verify import ReplayReport

_MISSING: Any = object()
_NO_SPLITS = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class ContextHint:
    """What diffusers' `cache_context`, or the guider of a pipeline, says about the forwards inside it.

    `variant` is set by guiders: the name of the pass if the guider changes the model for some, by skipping layers or
    perturbing their attention, else "".
    """

    name: str | None = None
    step_index: int | None = None
    num_inference_steps: int | None = None
    variant: str | None = None


NO_HINT = ContextHint()


class ThreadContext(threading.local):
    """What belongs to the thread that calls a transformer: the `cache_context` or guider's pass it is in."""

    hint = NO_HINT


class PlainState:
    """The `__getstate__` of an instance with overrides: a copy or pickle of it is a plain instance."""

    def __init__(self, instance: Any, overrides: Overrides, outer: PlainState | None = None) -> None:
        self._instance, self.overrides, self._outer = instance, overrides, outer

    def overrides_name(self, name: str) -> bool:
        """Whether an attribute of the instance is overridden."""
        is_ours = any(owner is self._instance and name == own for owner, own, *_ in self.overrides.entries)
        return is_ours or (self._outer is not None and self._outer.overrides_name(name))

    def __call__(self) -> Any:
        plain_class: Any = type(self._instance)
        state = plain_class.__getstate__(self._instance) if self._outer is None else self._outer()
        return self.overrides.remove_from(state, self._instance) if isinstance(state, dict) else state


class Overrides:
    """Attributes set on instances, restored together: all or nothing."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, str, Any, Any]] = []  # instance, name, previous value, ours

    def set(self, instance: Any, name: str, value: Any) -> None:
        """Set one attribute of an instance; what it had is kept."""
        state = vars(instance).get("__getstate__")
        outer = state if isinstance(state, PlainState) else None
        if outer is None or outer.overrides is not self:
            if outer is not None and outer.overrides_name(name):
                raise EnableError(
                    f"There already is a holdover cache here (on a {type(instance).__name__}): disable() it first."
                )
            self._replace(instance, "__getstate__", PlainState(instance, self, outer))
        self._replace(instance, name, value)

    def _replace(self, instance: Any, name: str, value: Any) -> None:
        self.entries.append((instance, name, vars(instance).get(name, _MISSING), value))
        vars(instance)[name] = value

    def remove_from(self, state: dict[str, Any], instance: Any) -> dict[str, Any]:
        """A copy of an instance's attributes as they are without the overrides."""
        plain = dict(state)
        for owner, name, previous, ours in reversed(self.entries):
            if owner is instance and plain.get(name) is ours:
                plain[name] = previous
        return {name: value for name, value in plain.items() if value is not _MISSING}

    def renew(self, instance: Any, name: str) -> None:
        """Set ours again over a value that was set meanwhile; that value is what is restored in the end."""
        index = next(i for i, entry in enumerate(self.entries) if entry[0] is instance and entry[1] == name)
        ours = self.entries[index][3]
        self.entries[index] = (instance, name, vars(instance)[name], ours)
        vars(instance)[name] = ours

    def restore(self) -> None:
        """Restore all instances, newest first; one that cannot be restored does not keep the others."""
        failed = []
        for entry in reversed(self.entries):
            owner, name, previous, ours = entry
            if vars(owner).get(name) is not ours:
                failed.append(entry)
            elif previous is _MISSING:
                del vars(owner)[name]
            else:
                vars(owner)[name] = previous
        self.entries = failed[::-1]
        if failed:
            owner, name, _, _ = failed[0]
            raise EnableError(
                f"`{name}` of this {type(owner).__name__} was replaced after the cache was enabled: "
                "undo that first, then disable() again."
            )


class Observed:
    """An object, such as a scheduler, whose methods one or more caches observe. It keeps none of them alive."""

    def __init__(self, target: Any) -> None:
        self._observers: list[weakref.ref[Any]] = []
        self._overrides = Overrides()
        for name, method in self.make_methods(target).items():
            method.__dict__["observed"] = self
            self._overrides.set(target, name, method)

    def make_methods(self, target: Any) -> dict[str, Callable[..., Any]]:
        """The methods that replace those of the observed object, by name."""
        raise NotImplementedError

    @classmethod
    def observe(cls, target: Any, observer: Any) -> Self:
        """Let a cache observe an object, together with those that do already."""
        known = (getattr(method, "observed", None) for method in vars(target).values())
        observed = next((each for each in known if isinstance(each, cls)), None) or cls(target)
        observed._observers.append(weakref.ref(observer))
        return observed

    def leave(self, observer: Any) -> None:
        """End the observation by one cache; the last one restores the object."""
        self._observers = [reference for reference in self._observers if reference() not in (None, observer)]
        if not self._observers:
            self._overrides.restore()

    def living(self) -> list[Any]:
        """The observers that are still there."""
        return [observer for reference in self._observers if (observer := reference()) is not None]


def find_engine(module: nn.Module) -> Engine | None:
    """The engine of the cache that is on a transformer, or of a hook that is registered on it, if there is one."""
    reference = getattr(vars(module).get("_compiled_call_impl"), "cached_transformer", None)
    cached: CachedTransformer | None = None if reference is None else reference()
    registry: Any = vars(module).get("_diffusers_hook")
    hooks = () if registry is None else registry.hooks.values()
    found = (cached, *hooks)
    engine: Engine | None = next((one.engine for one in found if getattr(one, "engine", None) is not None), None)
    return engine


def iter_registries(module: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield every part of a module that has diffusers' hooks, with the registry of its hooks."""
    for part in module.modules():
        registry = vars(part).get("_diffusers_hook")
        if registry is not None:
            yield part, registry


def refuse_other_caches(module: nn.Module) -> None:
    """Raise where a cache of diffusers or of the cache-dit library is on a transformer.

    diffusers' hooks that keep state all belong to caches; cache-dit marks the transformers whose forward it wraps.
    """
    found = [
        (type(hook).__name__, "transformer.disable_cache()")
        for _, registry in iter_registries(module)
        for hook in registry.hooks.values()
        if hook._is_stateful and type(hook).__module__.startswith("diffusers.")
    ]
    if vars(module).get("_is_cached") is True:
        found.append(("cache-dit", "cache_dit.disable_cache(pipe)"))
    for cache, remedy in found:
        raise EnableError(
            f"There is another cache on this {type(module).__name__} ({cache}), and two caches on one transformer give "
            f"wrong images. Call {remedy} first, or disable the holdover cache."
        )


class CachedTransformer:
    """One transformer with a cache on it.

    `module` is what the pipeline calls, `core` the model inside wrappers (torch.compile, FSDP, DDP). `running` is the
    pass that answers the block calls of the forward that runs now.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.core: nn.Module = unwrap_module(module)
        self.family = get_family(self.core)
        self.extractor = find_extractor(self.core)
        self.inputs = ForwardSignature(self.core, self.family.conditioning)
        self.lists = find_block_lists(self.core)
        self.paths: RecentDict[Any, Any] = RecentDict()
        self.context = ThreadContext()
        self.running: BlockPass | None = None
        self.groups = find_groups(module, None)
        self.engine: Any = None  # while it is installed
        self.report: ReplayReport | None = None
        self.notes: set[str] = set()
        self._splits = SequenceSplits()
        self._compiled_call: Callable[..., Any] | None = None  # made by `module.compile()`
        inner = None if self.core is module else self.core._compiled_call_impl
        self.compiled = "_orig_mod" in module._modules or inner is not None  # as a whole; blocks do not count

    @property
    def class_name(self) -> str:
        return get_module_class(self.core).__name__

    def call_eager(self, *args: Any, **kwargs: Any) -> Any:
        """Call the transformer uncompiled."""
        return self.core._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def eager_call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A call in which every block call reaches the proxies: not a compiled one, which need not make them."""
        return self.call_eager if self.compiled else plain

    def install(self, overrides: Overrides, engine: Engine) -> None:
        """Enter the transformer's calls and contexts; `overrides` takes everything off again."""
        module, plain_compile, always_compiled = self.module, self.module.compile, self.compiled
        cached_transformer = weakref.ref(self)  # a copy of the module takes this function along
        self.engine = engine
        self._compiled_call = vars(module).get("_compiled_call_impl")

        @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
        def call(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            compiler: Any = set_eval_frame(None)  # Dynamo must not trace the engine
            try:
                cached = cached_transformer()
                if cached is None or vars(this).get("_compiled_call_impl") != types.MethodType(call, cached.module):
                    return _call_traced(this._call_impl, compiler)(*args, **kwargs)  # a copy, or after disable()
                cached.compiled = compiler is not None or always_compiled or cached._compiled_call is not None
                plain: Any = cached._compiled_call or this._call_impl
                if cached.compiled:
                    plain = _call_traced(plain, compiler)
                with cached.engine.lock:
                    return cached.engine.forward(cached, plain, args, kwargs)
            finally:
                set_eval_frame(compiler)

        def compile(*args: Any, **kwargs: Any) -> None:
            plain_compile(*args, **kwargs)
            self._compiled_call = vars(module)["_compiled_call_impl"]
            overrides.renew(module, "_compiled_call_impl")

        call.__name__ = "__call__"
        call.cached_transformer = cached_transformer
        entry = types.MethodType(call, module)
        overrides.set(module, "_compiled_call_impl", entry)
        overrides.set(module, "__call__", entry)  # what `torch.compile(module)` wraps
        overrides.set(module, "compile", compile)
        overrides.set(self.core, "cache_context", self._observe_context(getattr(self.core, "cache_context", None)))

    def _observe_context(self, plain: Callable[..., Any] | None) -> Callable[..., Any]:
        """diffusers' `cache_context`, observed; models that lack it get it."""

        @contextlib.contextmanager
        def cache_context(name: str, **where: Any) -> Iterator[None]:
            outer = self.context.hint
            step, steps = where.get("step_index"), where.get("num_inference_steps")
            self.context.hint = ContextHint(name, step, steps, outer.variant)
            try:
                with plain(name, **where) if plain is not None else contextlib.nullcontext():
                    yield
            finally:
                self.context.hint = outer

        return cache_context

    def run(self, pass_: BlockPass, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the transformer's own forward while a pass answers its block calls."""
        outer, self.running = self.running, pass_
        split = self.groups.sequence is not None
        traced = pass_.traceable and self.compiled and not split and plain != self.call_eager
        replaced: list[tuple[nn.ModuleList, type, Any]] = []
        try:
            with self._splits.take_over(b for blocks in self.lists.values() for b in blocks) if split else _NO_SPLITS:
                for name, blocks in self.lists.items():
                    if pass_.lists is not None and name not in pass_.lists:
                        continue
                    modules: list[Any] = list(blocks._modules.values())
                    kept = pass_.proxies.get((name, traced))
                    proxies: Any = kept[1] if kept and kept[0] == modules else pass_.make_proxies(name, modules, traced)
                    items = self._splits.wrap(proxies, modules) if split else proxies
                    replaced.append((blocks, type(blocks), vars(blocks).get("_holdover_proxies")))
                    vars(blocks)["_holdover_proxies"] = (items, traced)
                    blocks.__class__ = _PROXIED.get(type(blocks)) or _proxied_class(type(blocks))
                output = plain(*args, **kwargs)
            if traced:
                pass_.clone_stored()
            return output
        finally:
            self.running = outer
            for blocks, plain_class, previous in replaced:
                blocks.__class__ = plain_class
                del vars(blocks)["_holdover_proxies"]
                if previous is not None:
                    vars(blocks)["_holdover_proxies"] = previous


def _call_traced(plain: Any, compiler: Any) -> Callable[..., Any]:
    """A compiled call with Dynamo on again. Its outputs are copied: CUDA graphs reuse their memory."""

    def call(*args: Any, **kwargs: Any) -> Any:
        outer = set_eval_frame(compiler)
        try:
            output = plain(*args, **kwargs)
        finally:
            set_eval_frame(outer)
        return map_output(output, torch.Tensor.clone)

    return call


_PROXIED: dict[type, Any] = {}  # ModuleList class -> the class its instances have during a forward


def _proxied_class(base: Any) -> Any:
    """A subclass whose instances are iterated as the proxies of their blocks; `base` itself where it is one."""
    if base in _PROXIED.values():
        return base

    def iterate(self: Any) -> Iterator[Any]:
        proxies, traced = self._holdover_proxies
        return iter(proxies) if traced or not torch.compiler.is_compiling() else _iterate_untraced(proxies)

    def get_item(self: Any, index: Any) -> Any:
        return list(iterate(self))[index] if isinstance(index, slice) else base.__getitem__(self, index)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made = _PROXIED[base] = type(base.__name__, (base,), {**names, "__iter__": iterate, "__getitem__": get_item})
    return made


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _iterate_untraced(proxies: Sequence[Any]) -> Iterator[Any]:
    return iter(proxies)
