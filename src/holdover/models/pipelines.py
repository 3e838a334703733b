"""Where a pipeline has its transformers."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import nn

from ..errors import EnableError
from .inputs import get_module_class, get_parameter_names, unwrap_module


def find_transformers(target: Any) -> dict[str, nn.Module]:
    """The denoising transformers of a pipeline by attribute name, or the transformer that was given."""
    found = list_transformers(target)
    if not found:
        nothing = f"{type(target).__name__} has no transformer to cache."
        components = _get_attribute(target, "components")
        if _get_attribute(target, "unet") is not None or (isinstance(components, Mapping) and "unet" in components):
            raise EnableError(f"{nothing} Its denoiser is a UNet, and only transformers are cached.")
        if hasattr(target, "init_pipeline"):
            raise EnableError(f"{nothing} These are blocks: make a pipeline of them with init_pipeline().")
        if hasattr(target, "load_components"):
            raise EnableError(f"{nothing} Load its components first, with load_components().")
        raise EnableError(
            f"{type(target).__name__} has no transformer to cache. Give a diffusers pipeline with a `transformer`, "
            "or the transformer itself."
        )
    return found


def list_transformers(target: Any) -> dict[str, nn.Module]:
    """The same, or nothing if there is none.

    A pipeline is any object with a transformer: as an attribute, a property or a registered component, or listed in
    `_dit_modules` as vLLM-Omni's pipelines do. Those are modules too; unlike a transformer, their own forward takes no
    timestep.
    """
    declared = getattr(target, "_dit_modules", None) or ()
    if isinstance(target, nn.Module):
        is_pipeline = bool(declared) or isinstance(_get_attribute(target, "transformer"), nn.Module)
        if not is_pipeline or {"timestep", "t"} & set(get_parameter_names(get_module_class(unwrap_module(target)))):
            return {"transformer": target}
    components = _get_attribute(target, "components")  # raises on diffusers pipelines with unregistered components
    names = ["transformer", "transformer_2", *(components if isinstance(components, Mapping) else ())]
    names += [*getattr(target, "_modules", ()), *getattr(target, "__dict__", ())]
    names = [n for n in names if n.startswith("transformer") or n.endswith("transformer") or n == "prior"]
    found: dict[str, nn.Module] = {}
    for name in dict.fromkeys([*names, *declared]):
        module = _get_attribute(target, name)
        if isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList):
            if not any(module is other for other in found.values()):
                found[name] = module
    if len(found) > 1:
        inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
        found = {name: module for name, module in found.items() if id(module) not in inner}
    return found


def _get_attribute(target: Any, path: str) -> Any:
    """The attribute at a dotted path; None if there is none, or if the object fails to provide it."""
    try:
        return attrgetter(path)(target)
    except Exception:  # a property may raise anything
        return None
