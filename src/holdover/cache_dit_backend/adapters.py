"""How a transformer is prepared for cache-dit: its block adapter, the unified blocks made from it, temporary patches.

cache-dit runs a whole list of blocks as one unified block. The library replaces the list by it permanently; here the
runner lets the transformer's loop see it while a forward runs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import cache_dit
from cache_dit.caching import (
    BlockAdapter,
    BlockAdapterRegister,
    CachedAdapter,
    CachedContextManager,
    FakeDiffusionPipeline,
    ForwardPattern,
)
from cache_dit.caching.cache_blocks import UnifiedBlocks
from torch import nn

from ..errors import ConfigError, UnsupportedModelError
from ..models.inputs import get_module_class, unwrap_module
from ..models.trace import find_block_lists
from .config import CacheDiTConfig, quiet_library
from .contexts import StepContextManager, step_manager_class
from .patches import Change, ModuleState, Patches

# The library registers adapters by a prefix of the pipeline's name; these transformers are named differently.
_REGISTERED_AS = {"SD3Transformer2DModel": "StableDiffusion3", "UVit2DModel": "Amused", "PriorTransformer": "ShapE"}
# Patches that are only needed when a list is replaced by a list of one element, which never happens here.
_UNNEEDED_PATCHES = ("FluxPatchFunctor", "DiTPatchFunctor", "ErnieImagePatchFunctor")


@dataclass
class CacheDiTAdapterConfig:
    """What a transformer class declares as `_cache_dit_adapter_config` so that cache-dit can cache it.

    `block_forward_patterns` maps the attribute name of each block list to the signature of its blocks.
    `has_separate_cfg` is accepted and has no effect: holdover knows which branch a forward belongs to.
    """

    block_forward_patterns: dict[str, ForwardPattern]
    cached_adapter_cls: type[CachedAdapter] | None = None
    check_forward_pattern: bool = True
    has_separate_cfg: bool = False


Adapter: TypeAlias = BlockAdapter | CacheDiTAdapterConfig


class StepAdapter(CachedAdapter):  # type: ignore[misc]
    """Creates contexts and unified blocks without patching the pipeline's class or the transformer."""

    manager_class: type[StepContextManager] = StepContextManager
    blocks_class: Any = UnifiedBlocks  # the library's own, chosen by the pattern of the blocks

    @classmethod
    def apply(cls, pipe_or_adapter: Any, **context_kwargs: Any) -> Any:
        """Cache a pipeline, a transformer or what a block adapter describes, with the library's own configs.

        Takes and returns what the library's `CachedAdapter.apply` does. `holdover.disable` takes the cache off again.
        """
        from .backend import CacheDiTBackend  # which imports this module

        adapter = pipe_or_adapter if isinstance(pipe_or_adapter, BlockAdapter) else None
        if adapter is not None and adapter.auto:
            adapter = BlockAdapter.auto_block_adapter(adapter)
        modifiers = context_kwargs.pop("params_modifiers", None)
        if adapter is not None and modifiers is not None and adapter.params_modifiers is None:
            adapter.params_modifiers = modifiers
        cache_config = context_kwargs.setdefault("cache_config", cache_dit.DBCacheConfig())
        calibrator_config = context_kwargs.setdefault("calibrator_config", None)
        settings = CacheDiTConfig.from_library(cache_config, calibrator_config)
        backend = CacheDiTBackend(settings, adapter, cls, context_kwargs)
        backend.enable_directly(pipe_or_adapter if adapter is None else adapted_pipeline(adapter))
        backend.expose_contexts()
        return pipe_or_adapter

    @classmethod
    def cachify(cls, block_adapter: BlockAdapter, **context_kwargs: Any) -> BlockAdapter:
        """Cache what a block adapter describes."""
        return cls.apply(block_adapter, **context_kwargs)

    @classmethod
    def create_context(cls, block_adapter: BlockAdapter, **context_kwargs: Any) -> tuple[list[str], list[Any]]:
        """The names and settings of the contexts, one for each list; the pipeline's manager has them."""
        names, contexts_kwargs = cls.modify_context_params(block_adapter, **context_kwargs)
        block_adapter.pipe._context_manager = manager = cls.manager_class()
        for settings in contexts_kwargs:
            manager.new_context(**settings)
        return names, contexts_kwargs

    @classmethod
    def collect_unified_blocks(
        cls, block_adapter: BlockAdapter, contexts_kwargs: list[dict[str, Any]]
    ) -> list[dict[str, nn.ModuleList]]:
        """For each transformer, the unified block of each list by the name of its context."""
        BlockAdapter.assert_normalized(block_adapter)
        collected: list[dict[str, nn.ModuleList]] = []
        for i, transformer in enumerate(block_adapter.transformer):
            collected.append({})
            for j, context in enumerate(block_adapter.unique_blocks_name[i]):
                unified = cls.blocks_class(
                    block_adapter.blocks[i][j],
                    transformer=transformer,
                    forward_pattern=block_adapter.forward_pattern[i][j],
                    check_forward_pattern=block_adapter.check_forward_pattern,
                    check_num_outputs=block_adapter.check_num_outputs,
                    cache_prefix=block_adapter.blocks_name[i][j],
                    cache_context=context,
                    context_manager=block_adapter.pipe._context_manager,
                )
                collected[i][context] = nn.ModuleList([unified])
        return collected

    @classmethod
    def patches(cls, transformer: nn.Module) -> Patches:
        """What must be changed on the transformer while a forward runs."""
        return Patches()


# Finding the block adapter of a transformer


def declared_config(transformer: nn.Module) -> CacheDiTAdapterConfig | None:
    """What the transformer's class declares as `_cache_dit_adapter_config`."""
    declared: CacheDiTAdapterConfig | None = getattr(transformer, "_cache_dit_adapter_config", None)
    return declared


def declared_adapter(transformer: nn.Module, declared: CacheDiTAdapterConfig | None = None) -> BlockAdapter | None:
    """The block adapter for a declaration: the one given here, else that of the transformer's class, if any."""
    declared = declared or declared_config(transformer)
    if declared is None:
        return None
    names = list(declared.block_forward_patterns)
    missing = [name for name in names if not isinstance(getattr(transformer, name, None), nn.ModuleList)]
    if missing or not names:
        raise UnsupportedModelError(
            f"The cache-dit adapter config of {type(transformer).__name__} names {', '.join(missing) or 'no list'}: "
            "each name must be an attribute that is a ModuleList."
        )
    return BlockAdapter(
        pipe=FakeDiffusionPipeline(transformer),
        transformer=transformer,
        blocks=[getattr(transformer, name) for name in names],
        blocks_name=names,
        forward_pattern=list(declared.block_forward_patterns.values()),
        has_separate_cfg=declared.has_separate_cfg,
        check_forward_pattern=declared.check_forward_pattern,
    )


def library_adapter(transformer: nn.Module, pipeline: Any) -> BlockAdapter:
    """The library's block adapter for a transformer of diffusers; the transformer is not changed yet."""
    class_name = get_module_class(transformer).__name__
    registered = BlockAdapterRegister._adapters
    wanted = (_REGISTERED_AS.get(class_name, class_name), type(pipeline).__name__)
    name = next((name for each in wanted for name in registered if each.startswith(name)), None)
    missing = (
        f"cache-dit {cache_dit.__version__} has no adapter for {class_name}. Declare its lists as "
        "_cache_dit_adapter_config, register an enabler in CUSTOM_DIT_ENABLERS, or use tea_cache or mag_cache, which "
        "trace any transformer."
    )
    if name is None:
        raise UnsupportedModelError(missing)
    pipe = FakeDiffusionPipeline(transformer)
    pipe.prior = transformer
    try:
        adapter = registered[name](pipe, skip_post_init=True)
        adapter.maybe_fill_attrs()
        adapter.maybe_skip_checks()
    except AssertionError as error:  # it is an adapter for another class
        raise UnsupportedModelError(f"{missing} The one for {name!r} says: {error}") from error
    except Exception as error:  # any other error is one of the library's code, which the user needs to see
        raise UnsupportedModelError(
            f"The adapter of cache-dit {cache_dit.__version__} for {name!r} fails on {class_name}: "
            f"{type(error).__name__}: {error}. Declare its lists as _cache_dit_adapter_config, or use tea_cache or "
            "mag_cache, which trace any transformer."
        ) from error
    return adapter


def adapter_for(adapter: BlockAdapter, transformer: nn.Module) -> BlockAdapter | None:
    """The part of a block adapter that describes one of its transformers; None if it describes others only."""
    transformers = adapter.transformer if isinstance(adapter.transformer, list) else [adapter.transformer]
    ids = [id(each) for each in BlockAdapter.flatten(transformers)]
    if id(transformer) not in ids:
        return None
    if len(ids) == 1:
        own = copy.copy(adapter)  # what is set on it below must not be set on the caller's
        own.unique_blocks_name = list(adapter.unique_blocks_name)
        return own
    part = {}
    for name in ("blocks", "blocks_name", "forward_pattern", "dummy_blocks_names", "params_modifiers"):
        part[name] = getattr(adapter, name)
        if part[name]:
            own = part[name][ids.index(id(transformer))]
            part[name] = own if isinstance(own, list) else [own]
    return BlockAdapter(
        pipe=FakeDiffusionPipeline(transformer),
        transformer=transformer,
        check_forward_pattern=adapter.check_forward_pattern,
        check_num_outputs=adapter.check_num_outputs,
        has_separate_cfg=adapter.has_separate_cfg,
        **part,
    )


def adapted_pipeline(adapter: BlockAdapter) -> Any:
    """What a cache for this block adapter is put on: its pipeline, else its transformer, or both of them."""
    transformers = adapter.transformer if isinstance(adapter.transformer, list) else [adapter.transformer]
    if adapter.pipe is not None and not isinstance(adapter.pipe, FakeDiffusionPipeline):
        return adapter.pipe
    names = ("transformer", *(f"transformer_{i}" for i in range(2, len(transformers) + 1)))
    return transformers[0] if len(transformers) == 1 else SimpleNamespace(**dict(zip(names, transformers, strict=True)))


# A transformer with its unified blocks


class BlockList(list[nn.Module]):
    """The blocks of one list as the library sees them; unlike a plain list it takes attributes."""


@dataclass(frozen=True)
class UnifiedBlock:
    """The one block that cache-dit makes of a list, and the lists whose blocks it runs."""

    name: str
    block: Any
    sources: tuple[nn.ModuleList, ...]
    pattern: str

    def blocks(self) -> list[nn.Module]:
        """The blocks it runs, as they are now."""
        return [block for source in self.sources for block in nn.ModuleList.__iter__(source)]


@dataclass(frozen=True)
class AdaptedTransformer:
    """What the runner needs to run one transformer through cache-dit.

    `template` has a context for each list, with the settings that the adapter gave it. Each branch gets copies of them.
    The library's own `refresh_context` changes them through the transformer's `_context_manager`.
    """

    lists: tuple[UnifiedBlock, ...]
    emptied: tuple[str, ...]  # lists that the transformer must see as empty: a unified block runs their blocks
    patches: Patches
    template: CachedContextManager
    names: tuple[str, ...]  # of the contexts
    settings: CacheDiTConfig  # what the template was made from

    @property
    def manager_class(self) -> type[StepContextManager]:
        cls: Any = type(self.template)  # mypy does not take a class for hashable
        return step_manager_class(cls)

    def template_settings(self) -> list[dict[str, Any]]:
        """The settings of each list's context in the template."""
        return [self.template.get_context(name)._init_kwargs for name in self.names]

    def contexts(self, settings: CacheDiTConfig) -> list[dict[str, Any]]:
        """The settings of each list's context: the template's, and what is different in these settings."""
        before, now = self.settings.context_settings(), settings.context_settings()
        old, new = before["cache_config"].as_dict(), now["cache_config"].as_dict()
        changed = {name: value for name, value in new.items() if value != old[name]}
        contexts = []
        for context, unified in zip(copy.deepcopy(self.template_settings()), self.lists, strict=True):
            config = context["cache_config"] = dataclasses.replace(context["cache_config"], **changed)
            if now["calibrator_config"] != before["calibrator_config"]:
                context["calibrator_config"] = now["calibrator_config"]
            config.enable_separate_cfg, count = False, len(unified.blocks())
            if config.Fn_compute_blocks + config.Bn_compute_blocks > count:
                raise ConfigError(
                    f"{unified.name} has {count} blocks: Fn_compute_blocks + Bn_compute_blocks must be at most "
                    f"{count}, not {config.Fn_compute_blocks} + {config.Bn_compute_blocks}."
                )
            contexts.append(context)
        return contexts

    def __str__(self) -> str:
        lists = (f"{each.name} ({len(each.blocks())} blocks, {each.pattern})" for each in self.lists)
        return f"cache-dit: {', '.join(lists)}"


class TransformerAdapter:
    """Adapts transformers: with the adapter or declaration given here, what their class declares, or the library's.

    `context_kwargs` are the library's own configs where the caller gave these instead of settings. `template` has
    contexts that the library has already made, and `patches` what goes with them.
    """

    def __init__(
        self,
        given: Adapter | None = None,
        adapter_cls: type[CachedAdapter] | None = None,
        context_kwargs: dict[str, Any] | None = None,
        template: CachedContextManager | None = None,
        patches: Sequence[Change] = (),
    ) -> None:
        self._given, self._adapter_cls, self._context_kwargs = given, adapter_cls, context_kwargs
        self._template, self._patches = template, patches
        self.adapted: dict[nn.Module, AdaptedTransformer] = {}
        self.refreshed: CacheDiTConfig | None = None  # the config of the refresh function that was called last

    @property
    def declared_steps(self) -> int | None:
        """The number of steps that the library's `refresh_context` was given last."""
        configs = (c["cache_config"] for each in self.adapted.values() for c in each.template_settings())
        return next((config.num_inference_steps for config in configs if config.num_inference_steps), None)

    def adapt(self, transformer: nn.Module, settings: CacheDiTConfig, pipeline: Any = None) -> AdaptedTransformer:
        """The adapted transformer, created at the first call, with its settings at that time."""
        transformer = unwrap_module(transformer)
        if transformer not in self.adapted:
            with quiet_library():
                self.adapted[transformer] = self._adapt(transformer, settings, pipeline)
        return self.adapted[transformer]

    def _adapt(self, transformer: nn.Module, settings: CacheDiTConfig, pipeline: Any) -> AdaptedTransformer:
        declared = self._given if isinstance(self._given, CacheDiTAdapterConfig) else None
        adapter = adapter_for(self._given, transformer) if isinstance(self._given, BlockAdapter) else None
        adapter = adapter or declared_adapter(transformer, declared) or library_adapter(transformer, pipeline)
        # The library marks the class of the pipeline as cached: this class is made for this one.
        adapter.pipe = type("FakeDiffusionPipeline", (FakeDiffusionPipeline,), {"_is_cached": False})(transformer)
        classes = (config.cached_adapter_cls for config in (declared, declared_config(transformer)) if config)
        cls = self._adapter_cls or next(filter(None, classes), StepAdapter)
        patches = cls.patches(transformer) if issubclass(cls, StepAdapter) else Patches(self._patches)
        functor = adapter.patch_functor
        if functor is not None and type(functor).__name__ not in _UNNEEDED_PATCHES and not self._patches:
            patches = Patches.record(lambda: functor.apply(transformer), transformer)
        try:
            with patches.apply():
                adapter = BlockAdapter.normalize(adapter)
                sources = _find_sources(transformer, adapter)
                adapter.blocks = [[BlockList(blocks) for blocks in adapter.blocks[0]]]
                (names,), (unique,), (patterns,) = (
                    adapter.blocks_name,
                    adapter.unique_blocks_name,
                    adapter.forward_pattern,
                )
                template = self._template or self._create_contexts(cls, adapter, settings)
                adapter.pipe._context_manager = template
                contexts = [template.get_context(name)._init_kwargs for name in unique]
                (collected,) = cls.collect_unified_blocks(adapter, contexts)
        except AssertionError as error:
            raise UnsupportedModelError(
                f"{get_module_class(transformer).__name__} does not match its cache-dit adapter: {error}"
            ) from None
        blocks = (collected[key][0] for key in unique)
        lists = tuple(map(UnifiedBlock, names, blocks, sources, (pattern.name for pattern in patterns)))
        emptied = tuple(adapter.dummy_blocks_names[0])
        return AdaptedTransformer(lists, emptied, patches, template, tuple(unique), settings)

    def _create_contexts(
        self, cls: type[CachedAdapter], adapter: BlockAdapter, settings: CacheDiTConfig
    ) -> CachedContextManager:
        """A manager with the contexts that the adapter class creates; what it sets on the transformer is undone."""
        kwargs = settings.context_settings() if self._context_kwargs is None else copy.deepcopy(self._context_kwargs)
        kwargs["cache_config"].enable_separate_cfg = False
        state = ModuleState(adapter.transformer)
        try:
            _, contexts = cls.create_context(adapter, **kwargs)
        finally:
            state.restore()
        manager: CachedContextManager = adapter.pipe._context_manager
        for context in contexts:  # a manager that is not persistent creates them when a pipeline is called
            if context["name"] not in manager._cached_context_manager:
                manager.new_context(**context)
        manager._persistent_context = True  # so that `cache_dit.refresh_context` takes it
        return manager


def _find_sources(transformer: nn.Module, adapter: BlockAdapter) -> list[tuple[nn.ModuleList, ...]]:
    """For each list of a normalized adapter, the transformer's own lists that have its blocks."""
    own, sources = find_block_lists(transformer), []
    for name, blocks in zip(adapter.blocks_name[0], adapter.blocks[0], strict=True):
        wanted = {id(block) for block in blocks}
        found = tuple(each for each in own.values() if {id(block) for block in each} <= wanted)
        if name not in own or sum(map(len, found)) != len(blocks):
            raise UnsupportedModelError(
                f"{get_module_class(transformer).__name__}.{name} is not a list of blocks that the transformer "
                "iterates over, so cache-dit cannot replace it."
            )
        sources.append(found)
    return sources
