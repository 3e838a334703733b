"""MagCache as a backend."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..errors import NotEnabledError
from ..profiles import MagCacheProfile
from ..runtime.backend import SeamBackend
from .config import MagCacheConfig
from .method import MagCacheMethod
from .strategy import MagCacheStrategy


class MagCacheBackend(SeamBackend):
    """MagCache: hold while the residual's magnitude has changed little since the last computed step."""

    config_class = MagCacheConfig

    def __init__(self, config: Any = None, strategy: MagCacheStrategy | None = None) -> None:
        super().__init__(config)
        self._strategy = strategy
        self._method: MagCacheMethod | None = None

    def method(self, settings: Config) -> MagCacheMethod:
        assert isinstance(settings, MagCacheConfig)
        self._method = MagCacheMethod(settings, self._strategy)
        return self._method

    def calibration(self) -> MagCacheProfile:
        """The ratios measured so far, averaged over the generations run under `calibrate=True`."""
        measured = self._method.calibration.profile() if self._method and self._method.calibration else None
        if measured is None:
            raise NotEnabledError("Nothing was measured: run a generation with calibrate=True first.")
        return measured
