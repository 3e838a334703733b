"""How a transformer is prepared for cache-dit: its block adapter, the unified blocks made from it, temporary patches.

cache-dit runs a whole list of blocks as one unified block. The library replaces the list by it permanently; here the
runner lets the transformer's loop see it while a forward runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import cache_dit
from cache_dit.caching import BlockAdapter, BlockAdapterRegister, CachedAdapter, FakeDiffusionPipeline, ForwardPattern
from cache_dit.caching.cache_blocks import UnifiedBlocks
from torch import nn

from ..errors import ConfigError, UnsupportedModelError
from ..models.inputs import get_module_class, unwrap_module
from ..models.trace import find_block_lists
from .config import CacheDiTConfig, context_settings, quiet_library
from .contexts import StepContextManager

# The library registers adapters by a prefix of the pipeline's name; these transformers are named differently.
_REGISTERED_AS = {"SD3Transformer2DModel": "StableDiffusion3", "UVit2DModel": "Amused", "PriorTransformer": "ShapE"}
# Patches that are only needed when a list is replaced by a list of one element, which never happens here.
_UNNEEDED_PATCHES = ("FluxPatchFunctor", "DiTPatchFunctor", "ErnieImagePatchFunctor")
_HOOKED_FORWARD = "_old_forward"  # where accelerate keeps the forward that its hooks wrap


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


class Patches:
    """Values that attributes of some modules have only while a forward runs."""

    def __init__(self) -> None:
        self._values: dict[nn.Module, dict[str, Any]] = {}

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
        before = {module: (dict(vars(module)), dict(module._modules)) for module in transformer.modules()}
        changes: list[tuple[nn.Module, str, Any]] = []
        try:
            patch()
            for module, (attributes, children) in before.items():
                for now, then in ((vars(module), attributes), (module._modules, children)):
                    changes += [(module, n, v) for n, v in now.items() if n not in then or then[n] is not v]
        finally:
            for module, (attributes, children) in before.items():
                _restore(vars(module), attributes, attributes)
                _restore(module._modules, children, children)
        patches = cls()
        for change in changes:
            patches.add(*change)
        return patches


def _restore(now: dict[str, Any], then: dict[str, Any], names: Iterable[str]) -> None:
    for name in now.keys() - then.keys():
        del now[name]
    now.update({name: then[name] for name in names if name in then})


class StepAdapter(CachedAdapter):  # type: ignore[misc]
    """Creates contexts and unified blocks without patching the pipeline's class or the transformer."""

    manager_class: type[StepContextManager] = StepContextManager
    blocks_class: Any = UnifiedBlocks  # the library's own, chosen by the pattern of the blocks

    @classmethod
    def create_context(cls, block_adapter: BlockAdapter, **context_kwargs: Any) -> tuple[list[str], list[Any]]:
        """The names and settings of the contexts, one for each list."""
        names, contexts_kwargs = cls.modify_context_params(block_adapter, **context_kwargs)
        block_adapter.pipe._context_manager = cls.manager_class()
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
    pipe = FakeDiffusionPipeline(transformer)
    pipe.prior = transformer
    try:
        adapter = registered[name](pipe, skip_post_init=True)
    except (KeyError, AssertionError, AttributeError, ImportError):
        raise UnsupportedModelError(
            f"cache-dit {cache_dit.__version__} has no adapter for {class_name}. Declare its lists as "
            "_cache_dit_adapter_config, register an enabler in CUSTOM_DIT_ENABLERS, or use tea_cache or mag_cache, "
            "which trace any transformer."
        ) from None
    adapter.maybe_fill_attrs()
    adapter.maybe_skip_checks()
    return adapter


def adapter_for(adapter: BlockAdapter, transformer: nn.Module) -> BlockAdapter | None:
    """The part of a block adapter that describes one of its transformers; None if it describes others only."""
    transformers = adapter.transformer if isinstance(adapter.transformer, list) else [adapter.transformer]
    ids = [id(each) for each in BlockAdapter.flatten(transformers)]
    if id(transformer) not in ids:
        return None
    if len(ids) == 1:
        return adapter
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


# A transformer with its unified blocks


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
    """What the runner needs to run one transformer through cache-dit."""

    lists: tuple[UnifiedBlock, ...]
    emptied: tuple[str, ...]  # lists that the transformer must see as empty: a unified block runs their blocks
    patches: Patches
    manager_class: type[StepContextManager]
    adapter_cls: type[CachedAdapter]
    block_adapter: BlockAdapter

    def contexts(self, settings: CacheDiTConfig) -> list[dict[str, Any]]:
        """The settings of each list's context, including what the adapter changes for that list."""
        with quiet_library():
            _, contexts = self.adapter_cls.modify_context_params(self.block_adapter, **context_settings(settings))
        for context, unified in zip(contexts, self.lists, strict=True):
            config, count = context["cache_config"], len(unified.blocks())
            config.enable_separate_cfg, config.num_inference_steps, config.force_refresh_step_hint = False, None, None
            if config.Fn_compute_blocks + config.Bn_compute_blocks > count:
                raise ConfigError(
                    f"{unified.name} has {count} blocks: Fn_compute_blocks + Bn_compute_blocks must be at most "
                    f"{count}, not {config.Fn_compute_blocks} + {config.Bn_compute_blocks}."
                )
        return list(contexts)

    def __str__(self) -> str:
        lists = (f"{each.name} ({len(each.blocks())} blocks, {each.pattern})" for each in self.lists)
        return f"cache-dit: {', '.join(lists)}"


class TransformerAdapter:
    """Adapts transformers: with the adapter or declaration given here, what their class declares, or the library's."""

    def __init__(self, given: Adapter | None, adapter_cls: type[CachedAdapter] | None) -> None:
        self._given, self._adapter_cls = given, adapter_cls
        self.adapted: dict[nn.Module, AdaptedTransformer] = {}

    def adapt(self, transformer: nn.Module, pipeline: Any = None) -> AdaptedTransformer:
        """The adapted transformer, created at the first call."""
        transformer = unwrap_module(transformer)
        if transformer not in self.adapted:
            with quiet_library():
                self.adapted[transformer] = self._adapt(transformer, pipeline)
        return self.adapted[transformer]

    def _adapt(self, transformer: nn.Module, pipeline: Any) -> AdaptedTransformer:
        declared = self._given if isinstance(self._given, CacheDiTAdapterConfig) else None
        adapter = adapter_for(self._given, transformer) if isinstance(self._given, BlockAdapter) else None
        adapter = adapter or declared_adapter(transformer, declared) or library_adapter(transformer, pipeline)
        adapter.pipe = FakeDiffusionPipeline(transformer)
        classes = (config.cached_adapter_cls for config in (declared, declared_config(transformer)) if config)
        cls = self._adapter_cls or next(filter(None, classes), StepAdapter)
        step_cls = cls if issubclass(cls, StepAdapter) else StepAdapter  # any other class would patch the pipeline's
        patches, functor = step_cls.patches(transformer), adapter.patch_functor
        if functor is not None and type(functor).__name__ not in _UNNEEDED_PATCHES:
            patches = Patches.record(lambda: functor.apply(transformer), transformer)
        try:
            with patches.apply():
                adapter = BlockAdapter.normalize(adapter)
                sources = _find_sources(transformer, adapter)
                adapter.blocks = [[list(blocks) for blocks in adapter.blocks[0]]]
                _, contexts = step_cls.create_context(adapter, **context_settings(CacheDiTConfig()))
                (collected,) = cls.collect_unified_blocks(adapter, contexts)
        except AssertionError as error:
            raise UnsupportedModelError(
                f"{get_module_class(transformer).__name__} does not match its cache-dit adapter: {error}"
            ) from None
        (names,), (unique,), (patterns,) = adapter.blocks_name, adapter.unique_blocks_name, adapter.forward_pattern
        blocks = (collected[key][0] for key in unique)
        lists = tuple(map(UnifiedBlock, names, blocks, sources, (pattern.name for pattern in patterns)))
        emptied = tuple(adapter.dummy_blocks_names[0])
        return AdaptedTransformer(lists, emptied, patches, step_cls.manager_class, cls, adapter)


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
