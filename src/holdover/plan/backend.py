"""The planned cache as a backend."""

from __future__ import annotations

from ..config import Config
from ..runtime.backend import SeamBackend
from .config import PlanConfig
from .method import OutputPlan, PlanMethod, SeamPlan


class PlanBackend(SeamBackend):
    """Computes the steps of a plan and predicts the others; nothing is decided while it runs."""

    config_class = PlanConfig

    def method(self, settings: Config) -> PlanMethod:
        assert isinstance(settings, PlanConfig)
        return SeamPlan(settings) if settings.quantity == "seam" else OutputPlan(settings)
