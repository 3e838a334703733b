"""Which lists of a transformer cache-dit caches, and with which contract of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cache_dit
from cache_dit.caching import (
    BlockAdapter,
    BlockAdapterRegister,
    CachedAdapter,
    FakeDiffusionPipeline,
    ForwardPattern,
)
from torch import nn

from ..errors import UnsupportedModelError
from ..models.inputs import get_module_class
from .contexts import StepContextManager
from .patches import Patches

# Classes whose name the library's register does not know: it looks pipelines up by theirs.
_REGISTERED_AS = {
    "SD3Transformer2DModel": "StableDiffusion3",
    "UVit2DModel": "Amused",
    "PriorTransformer": "ShapE",
}


@dataclass
class CacheDiTAdapterConfig:
    """What a transformer class declares as `_cache_dit_adapter_config` to be cached by cache-dit.

    `block_forward_patterns` gives the contract of the blocks of each list by its attribute name. `has_separate_cfg` is
    kept for code that sets it: branches are told apart by what they are.
    """

    block_forward_patterns: dict[str, ForwardPattern]
    cached_adapter_cls: type[CachedAdapter] | None = None
    check_forward_pattern: bool = True
    has_separate_cfg: bool = False


class StepAdapter(CachedAdapter):  # type: ignore[misc]
    """Makes what cache-dit puts in the place of a list, and leaves pipelines and transformers alone."""

    manager_class: type[StepContextManager] = StepContextManager

    @classmethod
    def create_context(
        cls, block_adapter: BlockAdapter, **context_kwargs: Any
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """The names and settings of the contexts, one for each list."""
        names, contexts_kwargs = cls.modify_context_params(block_adapter, **context_kwargs)
        block_adapter.pipe._context_manager = cls.manager_class()
        return names, contexts_kwargs

    @classmethod
    def patches(cls, transformer: nn.Module) -> Patches:
        """What must be different on the transformer while a forward runs."""
        return Patches()


def declared_adapter(transformer: nn.Module) -> BlockAdapter | None:
    """The adapter a transformer's class declares."""
    declared = _declaration(transformer)
    if declared is None:
        return None
    names = list(declared.block_forward_patterns)
    missing = [name for name in names if not isinstance(getattr(transformer, name, None), nn.ModuleList)]
    if missing or not names:
        raise UnsupportedModelError(
            f"{type(transformer).__name__}._cache_dit_adapter_config names {', '.join(missing) or 'no list'}: "
            "each must be an attribute that is a ModuleList."
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


def declared_adapter_cls(transformer: nn.Module) -> type[CachedAdapter] | None:
    """The adapter class a transformer's class declares."""
    declared = _declaration(transformer)
    return None if declared is None else declared.cached_adapter_cls


def _declaration(transformer: nn.Module) -> CacheDiTAdapterConfig | None:
    declared: CacheDiTAdapterConfig | None = getattr(transformer, "_cache_dit_adapter_config", None)
    return declared


def library_adapter(transformer: nn.Module, pipeline: Any) -> BlockAdapter:
    """The adapter the library has for a class of diffusers, with nothing on the transformer changed yet."""
    class_name = get_module_class(transformer).__name__
    registered = BlockAdapterRegister._adapters
    wanted = (_REGISTERED_AS.get(class_name, class_name), type(pipeline).__name__)
    name = next((name for each in wanted for name in registered if each.startswith(name)), None)
    if name is None:
        raise _unknown(class_name)
    place = FakeDiffusionPipeline(transformer)
    place.prior = transformer
    try:
        adapter = registered[name](place, skip_post_init=True)
    except (AssertionError, AttributeError, ImportError):
        raise _unknown(class_name) from None
    adapter.maybe_fill_attrs()
    adapter.maybe_skip_checks()
    return adapter


def _unknown(class_name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"cache-dit {cache_dit.__version__} has no adapter for {class_name}. Declare its lists as "
        "_cache_dit_adapter_config, register an enabler in CUSTOM_DIT_ENABLERS, or use tea_cache or mag_cache, which "
        "trace any transformer."
    )


def part_of(adapter: BlockAdapter, transformer: nn.Module) -> BlockAdapter | None:
    """The part of an adapter that is about one of its transformers."""
    several: Sequence[nn.Module] = BlockAdapter.flatten(
        adapter.transformer if isinstance(adapter.transformer, list) else [adapter.transformer]
    )
    place = next((i for i, each in enumerate(several) if each is transformer), None)
    if place is None:
        return None
    if len(several) == 1:
        return adapter
    fields = ("blocks", "blocks_name", "forward_pattern", "dummy_blocks_names", "params_modifiers")
    own: Mapping[str, Any] = {name: _at(getattr(adapter, name), place) for name in fields}
    return BlockAdapter(
        pipe=FakeDiffusionPipeline(transformer),
        transformer=transformer,
        check_forward_pattern=adapter.check_forward_pattern,
        check_num_outputs=adapter.check_num_outputs,
        has_separate_cfg=adapter.has_separate_cfg,
        **own,
    )


def _at(attribute: Any, place: int) -> Any:
    if not attribute:
        return attribute
    found = attribute[place]
    return found if isinstance(found, list) else [found]
