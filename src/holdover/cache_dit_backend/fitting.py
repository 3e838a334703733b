"""One transformer made ready for cache-dit: the block that stands for each list, and what runs inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cache_dit.caching import BlockAdapter, CachedAdapter, FakeDiffusionPipeline
from torch import nn

from ..errors import ConfigError, UnsupportedModelError
from ..runtime.unit import Unit
from .adapters import StepAdapter, declared_adapter, declared_adapter_cls, library_adapter, part_of
from .config import CacheDiTConfig
from .contexts import StepContextManager
from .library import context_settings, quiet
from .patches import Patches, captured

# Functors that only make up for a list with one element: here lists keep their length and their elements.
_FOR_SWAPPED_LISTS = ("FluxPatchFunctor", "DiTPatchFunctor", "ErnieImagePatchFunctor")


@dataclass(frozen=True)
class UnifiedList:
    """The one block cache-dit makes of a list, and the lists whose blocks it runs."""

    name: str
    block: Any
    sources: tuple[nn.ModuleList, ...]
    pattern: str

    def blocks(self) -> list[nn.Module]:
        """The blocks it runs, as they are now."""
        return [block for source in self.sources for block in nn.ModuleList.__iter__(source)]

    def __str__(self) -> str:
        return f"{self.name} ({len(self.blocks())} blocks, {self.pattern})"


@dataclass(frozen=True)
class Fitting:
    """How one transformer runs under cache-dit."""

    lists: tuple[UnifiedList, ...]
    emptied: tuple[str, ...]
    patches: Patches
    adapter_cls: type[CachedAdapter]
    adapter: BlockAdapter

    @property
    def manager_class(self) -> type[StepContextManager]:
        """The class of the contexts' manager."""
        return self.adapter_cls.manager_class if issubclass(self.adapter_cls, StepAdapter) else StepContextManager

    def contexts(self, settings: CacheDiTConfig) -> list[dict[str, Any]]:
        """The settings of each list's context, with what the adapter changes for it."""
        with quiet():
            _, contexts = self.adapter_cls.modify_context_params(self.adapter, **context_settings(settings))
        for context, unified in zip(contexts, self.lists, strict=True):
            config, count = context["cache_config"], len(unified.blocks())
            config.enable_separate_cfg, config.num_inference_steps, config.force_refresh_step_hint = False, None, None
            if config.Fn_compute_blocks + config.Bn_compute_blocks > count:
                raise ConfigError(
                    f"{unified.name} has {count} blocks: Fn_compute_blocks + Bn_compute_blocks must be at most that, "
                    f"not {config.Fn_compute_blocks} + {config.Bn_compute_blocks}."
                )
        return list(contexts)

    def __str__(self) -> str:
        return "cache-dit: " + ", ".join(map(str, self.lists))


class Fitter:
    """Fits transformers with the adapter that was given, that their class declares, or that the library has."""

    def __init__(self, adapter: BlockAdapter | None = None, adapter_cls: type[CachedAdapter] | None = None) -> None:
        self._adapter, self._adapter_cls = adapter, adapter_cls
        self._made: dict[Unit, Fitting] = {}

    def fit(self, unit: Unit, pipeline: Any) -> Fitting:
        """The fitting of one transformer, made once."""
        if unit not in self._made:
            with quiet():
                self._made[unit] = self._fitted(unit, pipeline)
        return self._made[unit]

    def _fitted(self, unit: Unit, pipeline: Any) -> Fitting:
        adapter = None if self._adapter is None else part_of(self._adapter, unit.core)
        adapter = adapter or declared_adapter(unit.core) or library_adapter(unit.core, pipeline)
        cls = self._adapter_cls or declared_adapter_cls(unit.core) or StepAdapter
        adapter.pipe = FakeDiffusionPipeline(unit.core)
        patches = cls.patches(unit.core) if issubclass(cls, StepAdapter) else Patches()
        functor = adapter.patch_functor
        if functor is not None and type(functor).__name__ not in _FOR_SWAPPED_LISTS:
            patches = captured(lambda: functor.apply(unit.core), unit.core)
        try:
            with patches.applied():
                lists = tuple(_unified(unit, BlockAdapter.normalize(adapter), cls))
        except AssertionError as error:
            raise UnsupportedModelError(f"{unit.class_name} does not fit its cache-dit adapter: {error}") from None
        return Fitting(lists, tuple(adapter.dummy_blocks_names[0]), patches, cls, adapter)


def _unified(unit: Unit, adapter: BlockAdapter, cls: type[CachedAdapter]) -> Iterator[UnifiedList]:
    (names,), (unique,), (patterns,) = adapter.blocks_name, adapter.unique_blocks_name, adapter.forward_pattern
    sources = [_sources(unit, name, blocks) for name, blocks in zip(names, adapter.blocks[0], strict=True)]
    adapter.blocks = [[list(blocks) for blocks in adapter.blocks[0]]]
    makes = cls if issubclass(cls, StepAdapter) else StepAdapter  # any other would patch the pipeline's class
    _, contexts = makes.create_context(adapter, **context_settings(CacheDiTConfig()))
    (made,) = cls.collect_unified_blocks(adapter, contexts)
    for name, key, pattern, source in zip(names, unique, patterns, sources, strict=True):
        yield UnifiedList(name, made[key][0], source, pattern.name)


def _sources(unit: Unit, name: str, blocks: Sequence[nn.Module]) -> tuple[nn.ModuleList, ...]:
    """The transformer's own lists that hold these blocks, in order."""
    wanted = {id(block) for block in blocks}
    found = [own for own in unit.lists.values() if {id(block) for block in own} <= wanted]
    if name not in unit.lists or sum(map(len, found)) != len(blocks):
        raise UnsupportedModelError(
            f"{unit.class_name}.{name} is not a list of blocks that the transformer iterates over: cache-dit cannot "
            "take its place."
        )
    return tuple(found)
