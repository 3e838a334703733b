"""MagCache as a backend."""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..errors import NotEnabledError
from ..profiles import MagCacheProfile
from ..runtime.backend import SeamBackend
from .calibration import Calibration
from .config import MagCacheConfig
from .method import MagCacheMethod
from .strategy import MagCacheStrategy


class MagCacheBackend(SeamBackend):
    """MagCache: hold while the residual's magnitude has changed little since the last computed step."""

    config_class = MagCacheConfig

    def __init__(self, config: Any = None, strategy: MagCacheStrategy | None = None) -> None:
        super().__init__(config)
        self._strategy = strategy
        self._calibrations: list[Calibration] = []

    def method(self, settings: Config) -> MagCacheMethod:
        assert isinstance(settings, MagCacheConfig)
        method = MagCacheMethod(settings, self._strategy)
        if method.calibration is not None:
            self._calibrations.append(method.calibration)
        return method

    def calibration(self) -> MagCacheProfile:
        """The ratios measured so far, averaged over the generations run under `calibrate=True`."""
        for calibration in reversed(self._calibrations):
            measured = calibration.profile()
            if measured is not None:
                return measured
        raise NotEnabledError("Nothing was measured: run a generation with calibrate=True first.")
