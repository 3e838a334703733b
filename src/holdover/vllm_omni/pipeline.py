"""A vLLM-Omni pipeline the way holdover's backends see pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from torch import nn

from ..errors import EnableError

_USUAL = ("transformer", "transformer_2")


class PipelineView:
    """Named transformers, and every other attribute of the pipeline as it is at the moment.

    vLLM-Omni's pipelines are modules themselves, and draw in their forward: a backend would take one for a transformer.
    What a diffusers pipeline has in its config they have as attributes.
    """

    def __init__(self, pipeline: nn.Module, transformers: dict[str, nn.Module]) -> None:
        self.pipeline = pipeline
        self.components = transformers

    @property
    def config(self) -> dict[str, Any]:
        return vars(self.pipeline)

    def __getattr__(self, name: str) -> Any:
        if name in ("pipeline", "components"):
            raise AttributeError(name)
        return self.components[name] if name in self.components else getattr(self.pipeline, name)


def view_of(pipeline: nn.Module) -> PipelineView:
    """The view, under the names of the pipeline's class and its bases, by which profiles know pipelines."""
    kind: type[PipelineView] = PipelineView
    for cls in reversed(type(pipeline).__mro__):
        kind = type(cls.__name__, (kind,), {})
    return kind(pipeline, denoisers_of(pipeline))


def denoisers_of(pipeline: nn.Module) -> dict[str, nn.Module]:
    """The modules a pipeline says it denoises with (`_dit_modules`), else its transformers; no part of another."""
    declared: Iterable[str] = getattr(pipeline, "_dit_modules", None) or _USUAL
    found = {name: module for name in declared if (module := _part(pipeline, name)) is not None}
    if not found:
        raise EnableError(
            f"{type(pipeline).__name__} has none of {', '.join(declared)}, so there is nothing to cache. "
            "Let the pipeline name its transformers in `_dit_modules`."
        )
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return {_named(name): module for name, module in found.items() if id(module) not in inner}


def _part(pipeline: nn.Module, path: str) -> nn.Module | None:
    try:
        found = attrgetter(path)(pipeline)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Module) else None


def _named(path: str) -> str:
    """The module's name; `transformer` is in it, because that is what holdover's backends look for."""
    return path if path.startswith("transformer") or path.endswith("transformer") else f"{path}_transformer"
