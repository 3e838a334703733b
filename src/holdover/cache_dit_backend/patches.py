"""Changes to pipelines and transformers that cache-dit needs or makes: found, undone, and patched in for a forward.

The library patches classes and instances for good. Here a patch is in place only while a forward runs. What an enabler
has installed by calling the library itself is read and taken off again, so that the engine can run it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import cache_dit
from cache_dit.caching import BlockAdapter, CachedAdapter, CachedContextManager, FakeDiffusionPipeline
from torch import nn

from ..errors import EnableError, UnsupportedModelError

_HOOKED_FORWARD = "_old_forward"  # where accelerate keeps the forward that its hooks wrap
# What the library sets on a transformer or a pipeline besides patching it.
_MARKS = {
    "_context_manager",
    "_context_names",
    "_context_kwargs",
    "_forward_pattern",
    "_has_separate_cfg",
    "_is_cached",
}
_WRAPPED_FORWARD = "_original_forward"  # where the library keeps the forward that it wraps

Change: TypeAlias = tuple[nn.Module, str, Any]  # module, attribute, value


class ModuleState:
    """The attributes and children that the modules of some transformers have at one moment."""

    def __init__(self, transformers: Iterable[nn.Module]) -> None:
        modules = {id(module): module for transformer in transformers for module in transformer.modules()}
        self._before = [(module, dict(vars(module)), dict(module._modules)) for module in modules.values()]

    def changes(self) -> list[Change]:
        """What has been set since."""
        found: list[Change] = []
        for module, attributes, children in self._before:
            for now, then in ((vars(module), attributes), (module._modules, children)):
                found += [(module, n, v) for n, v in now.items() if n not in then or then[n] is not v]
        return found

    def restore(self) -> None:
        """Undo everything that has been set since."""
        for module, attributes, children in self._before:
            _restore(vars(module), attributes, attributes)
            _restore(module._modules, children, children)


class Patches:
    """Values that attributes of some modules have only while a forward runs."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._values: dict[nn.Module, dict[str, Any]] = {}
        for change in changes:
            self.add(*change)

    def add(self, module: nn.Module, name: str, value: Any) -> None:
        """Patch one attribute; a forward wrapped by an accelerate hook is patched inside the hook."""
        if name == "forward" and "forward" in vars(module):
            if _HOOKED_FORWARD not in vars(module):
                raise UnsupportedModelError(
                    f"cache-dit replaces the forward of {type(module).__name__}, but another hook has already replaced "
                    "it: remove the hook, or use tea_cache or mag_cache."
                )
            name = _HOOKED_FORWARD
        self._values.setdefault(module, {})[name] = value

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Put the values in place; on exit every module has exactly the attributes it had before."""
        before = {module: dict(vars(module)) for module in self._values}
        for module, values in self._values.items():
            vars(module).update(values)
        try:
            yield
        finally:
            for module, values in self._values.items():
                _restore(vars(module), before[module], values)

    @classmethod
    def record(cls, patch: Callable[[], object], transformer: nn.Module) -> Patches:
        """The changes that `patch()` makes to the transformer's modules; they are undone at once."""
        state = ModuleState([transformer])
        try:
            patch()
            changes = state.changes()
        finally:
            state.restore()
        return cls(changes)


def _restore(now: dict[str, Any], then: dict[str, Any], names: Iterable[str]) -> None:
    for name in now.keys() - then.keys():
        del now[name]
    now.update({name: then[name] for name in names if name in then})


# What an enabler does


class Installation(NamedTuple):
    """What an enabler has made the library cache, and how."""

    transformers: dict[str, nn.Module]  # by the path from the pipeline
    block_adapter: BlockAdapter
    adapter_cls: type[CachedAdapter]
    template: CachedContextManager  # with a context for each list of blocks
    patches: list[Change]  # what else was set on the transformers
    attributes: dict[str, Any]  # what else was set on the pipeline


class PipelineState:
    """A pipeline, its transformers and the classes that the library marks, at one moment."""

    def __init__(self, pipeline: Any, transformers: Mapping[str, nn.Module]) -> None:
        self._transformers = dict(transformers)
        self._modules = ModuleState(transformers.values())
        objects = (pipeline, type(pipeline), FakeDiffusionPipeline)
        self._objects = [(each, dict(getattr(each, "__dict__", {}))) for each in objects]

    def restore(self) -> None:
        """Undo everything that has been set since."""
        self._modules.restore()
        for target, before in self._objects:
            for name, value in dict(getattr(target, "__dict__", {})).items():
                if name not in before:
                    delattr(target, name)
                elif before[name] is not value:
                    setattr(target, name, before[name])

    def take_over(self, enabler: str) -> Installation | None:
        """What the library has installed since, which is undone; None if it has installed nothing."""
        found = {
            f"{name}.{path}".removesuffix("."): module
            for name, transformer in self._transformers.items()
            for path, module in transformer.named_modules()
            if _WRAPPED_FORWARD in vars(module) and _MARKS & vars(module).keys()
        }
        if not found:
            return None
        adapters = [_read_adapter(module) for module in found.values()]
        if (first := adapters[0]) is None or any(each is None or each[0] is not first[0] for each in adapters):
            raise EnableError(
                f"What {enabler} has made cache-dit {cache_dit.__version__} install cannot be taken over: end it with "
                "`return enable_cache_for_dit(pipeline, cache_config, block_adapter)`."
            )
        adapter, adapter_cls = first
        template: CachedContextManager = adapter.pipe._context_manager
        for blocks, name in zip(
            BlockAdapter.flatten(adapter.blocks), BlockAdapter.flatten(adapter.unique_blocks_name), strict=True
        ):
            if name not in template._cached_context_manager:
                template.new_context(**{**blocks._context_kwargs, "name": name})
        template._persistent_context = True  # so that `cache_dit.refresh_context` takes it
        patches = [change for change in self._modules.changes() if change[1] not in _MARKS | {_WRAPPED_FORWARD}]
        for module in found.values():
            patches = [change for change in patches if change[:2] != (module, "forward")]
            forward = vars(module)[_WRAPPED_FORWARD]
            if getattr(forward, "__func__", None) is not type(module).forward:  # a patch of the library's
                patches.append((module, "forward", forward))
        pipeline, before = self._objects[0]
        now = getattr(pipeline, "__dict__", {})
        attributes = {n: v for n, v in now.items() if n not in _MARKS and before.get(n, self) is not v}
        self.restore()
        return Installation(found, adapter, adapter_cls, template, patches, attributes)


def _read_adapter(transformer: nn.Module) -> tuple[BlockAdapter, type[CachedAdapter]] | None:
    """The block adapter and the adapter class in the closure of the library's forward; None if it has another form."""
    names: Mapping[str, Any] = {}
    forward: Any = getattr(vars(transformer).get("forward"), "func", None)
    if inspect.isfunction(forward):
        forward = inspect.getclosurevars(forward).nonlocals.get("new_forward")
    if inspect.isfunction(forward):
        names = inspect.getclosurevars(forward).nonlocals
    return (names["block_adapter"], names["cls"]) if {"block_adapter", "cls"} <= names.keys() else None
