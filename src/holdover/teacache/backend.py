"""TeaCache as a backend."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config import Config
from ..models.inputs import get_module_class, unwrap_module
from ..runtime.backend import SeamBackend, transformers_of
from .config import UNNAMED, TeaCacheConfig
from .method import TeaCacheMethod


class TeaCacheBackend(SeamBackend):
    """TeaCache: hold while the signal has changed little since the last computed step."""

    config_class = TeaCacheConfig

    def enable(self, pipeline: Any) -> None:
        transformer = next(iter(transformers_of(pipeline).values()))
        self.settings = self.settings_for(transformer)
        super().enable(pipeline)

    def settings_for(self, transformer: nn.Module) -> TeaCacheConfig:
        """The settings with the transformer's own class filled in where none was named."""
        assert isinstance(self.settings, TeaCacheConfig)
        if self.settings.transformer_type != UNNAMED:
            return self.settings
        return self.settings.replaced(transformer_type=get_module_class(unwrap_module(transformer)).__name__)

    def method(self, settings: Config) -> TeaCacheMethod:
        assert isinstance(settings, TeaCacheConfig)
        return TeaCacheMethod(settings)
