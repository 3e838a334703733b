"""The planned cache as a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..runtime.backend import SeamBackend
from .config import PlanConfig
from .method import Memory, OutputPlan, PlanMethod, SeamPlan


class PlanBackend(SeamBackend):
    """Computes the steps of a plan and predicts the others; nothing is decided while it runs."""

    config_class = PlanConfig

    def __init__(self, config: Config | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._memory = Memory()

    def method(self, settings: Config) -> PlanMethod:
        assert isinstance(settings, PlanConfig)
        kind = SeamPlan if settings.quantity == "seam" else OutputPlan
        return kind(settings, self._memory)

    def plan_digest(self) -> str:
        """Tells the plan of the last generation from others."""
        method = self._running().method
        assert isinstance(method, PlanMethod)
        return method.digest
