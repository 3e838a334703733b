"""TeaCache as a backend."""

from __future__ import annotations

from ..config import Config
from ..runtime.backend import SeamBackend
from .config import TeaCacheConfig
from .method import TeaCacheMethod


class TeaCacheBackend(SeamBackend):
    """TeaCache: hold while the signal has changed little since the last computed step."""

    config_class = TeaCacheConfig

    def method(self, settings: Config) -> TeaCacheMethod:
        assert isinstance(settings, TeaCacheConfig)
        return TeaCacheMethod(settings)
