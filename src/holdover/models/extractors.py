"""Extractors: for a model whose cut cannot be traced, a function that builds its CacheContext."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..context import CacheContext
from ..errors import ConfigError, did_you_mean

Extractor = Callable[..., CacheContext]

EXTRACTOR_REGISTRY: dict[str, Extractor] = {}


def register_extractor(transformer_cls_name: str, extractor_fn: Extractor) -> None:
    """Use `extractor_fn(module, *args, **kwargs) -> CacheContext` for transformers of that class."""
    if not callable(extractor_fn):
        raise TypeError(f"An extractor is a function, not {type(extractor_fn).__name__}.")
    EXTRACTOR_REGISTRY[transformer_cls_name] = extractor_fn


def unregister_extractor(transformer_cls_name: str) -> None:
    """Trace that class again."""
    EXTRACTOR_REGISTRY.pop(transformer_cls_name, None)


def get_extractor(transformer_cls_name: str) -> Extractor:
    """The extractor registered for a class name."""
    try:
        return EXTRACTOR_REGISTRY[transformer_cls_name]
    except KeyError:
        hint = did_you_mean(transformer_cls_name, EXTRACTOR_REGISTRY)
        raise ConfigError(
            f"No extractor is registered for {transformer_cls_name!r}; none is needed where tracing works.{hint}"
        ) from None


def extractor_of(transformer: nn.Module) -> Extractor | None:
    """The extractor for a transformer's class or the nearest of its bases, if one is registered."""
    names = (cls.__name__ for cls in type(transformer).__mro__)
    return next((EXTRACTOR_REGISTRY[name] for name in names if name in EXTRACTOR_REGISTRY), None)
