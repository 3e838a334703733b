"""Tiny instances of every transformer class of diffusers, by name, for tests that run all of them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import diffusers.models.transformers
from diffusers import ModelMixin

from .builder import TinyModel, with_timestep
from .models_image import image
from .models_other import other
from .models_video import video

__all__ = ["MODELS", "UNAVAILABLE", "TinyModel", "transformer_classes", "with_timestep"]

MODELS: dict[str, TinyModel] = image.models | video.models | other.models

UNAVAILABLE: dict[str, str] = {}


def transformer_classes() -> dict[str, type[ModelMixin]]:
    """Every public model class that a module under diffusers/models/transformers defines."""
    package = diffusers.models.transformers
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    return {
        name: value
        for module in map(importlib.import_module, names)
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, ModelMixin) and value.__module__ == module.__name__ and not name.startswith("_")
    }
