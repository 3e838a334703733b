"""Settings of the cache-dit backend, and their translation into the cache-dit library's own and back."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import cache_dit
from cache_dit.caching import (
    BasicCacheConfig,
    CalibratorConfig,
    DBCacheConfig,
    DMDCalibratorConfig,
    FoCaCalibratorConfig,
    TaylorSeerCalibratorConfig,
)

from ..base import CacheDiTSettings
from ..config import setting
from ..errors import ConfigError

# Settings under another name in the library's config of a context; all others have the same name.
_LIBRARY_NAMES = {"scm_steps_policy": "steps_computation_policy"}
# Settings of a generation as a whole, which an expert cannot have for itself.
_SHARED = ("secondary", "num_inference_steps")


@dataclass(frozen=True)
class CacheDiTConfig(CacheDiTSettings):
    """Hold while the residual of the first blocks differs by less than `residual_diff_threshold` (DBCache).

    The first `Fn_compute_blocks` and the last `Bn_compute_blocks` of every list run at every step; the blocks between
    them are held. `calibrator` extrapolates the held residual; `enable_taylorseer=True` is `calibrator="taylorseer"`.
    `scm_steps_mask_policy` selects a mask of computed steps: the other steps may be held (`scm_steps_policy="dynamic"`)
    or are always held (`"static"`). `secondary` has the settings of `transformer_2` that differ.
    """

    method: ClassVar[str] = "cache_dit"
    color: ClassVar[str] = "amber"
    vllm_omni: ClassVar[str] = "holdover_cache_dit"

    num_inference_steps: int | None = setting(None, ge=1, doc="number of steps if there is no scheduler")
    warmup_interval: int = setting(1, ge=1, doc="of the first steps, always compute every n-th only")
    calibrator: str | None = setting(
        None, choices=(None, "taylorseer", "dmd", "foca"), doc="what extrapolates the held residual"
    )
    dmd_history: int = setting(6, ge=4, doc="number of computed steps that DMD is fitted to")
    dmd_rank: int = setting(0, ge=0, doc="number of modes of DMD; 0 chooses it from the spectrum")
    dmd_ridge: float = setting(1e-8, ge=0, doc="regularization of DMD")
    dmd_svd_precision: str = setting("medium", choices=("low", "medium", "high"), doc="precision of DMD's SVD")
    secondary: tuple[tuple[str, bool | int | float | str | None], ...] | None = setting(
        None, doc="settings of transformer_2 that differ, by name"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_taylorseer and self.calibrator not in (None, "taylorseer"):
            raise ConfigError(
                f"enable_taylorseer is calibrator='taylorseer', but calibrator is {self.calibrator!r}: set only one."
            )
        if shared := [name for name, _ in self.secondary or () if name in _SHARED]:
            raise ConfigError(f"{shared[0]!r} is a setting of the whole generation; it cannot be in `secondary`.")
        self.for_transformer("transformer_2")  # checks the names and values in `secondary`

    def for_transformer(self, name: str) -> Self:
        """The settings of one transformer of a pipeline: `transformer_2` has those in `secondary`."""
        if self.secondary is None or name != "transformer_2":
            return self
        return self.replaced(secondary=None, **dict(self.secondary))

    def to_db_cache_config(self) -> DBCacheConfig:
        """The library's config of a context, without mask, steps and branches: holdover knows these."""
        return DBCacheConfig(
            Fn_compute_blocks=self.Fn_compute_blocks,
            Bn_compute_blocks=self.Bn_compute_blocks,
            residual_diff_threshold=self.residual_diff_threshold,
            max_warmup_steps=self.max_warmup_steps,
            warmup_interval=self.warmup_interval,
            max_cached_steps=self.max_cached_steps,
            max_continuous_cached_steps=self.max_continuous_cached_steps,
            steps_computation_policy=self.scm_steps_policy,
            force_refresh_step_hint=self.force_refresh_step_hint,
            force_refresh_step_policy=self.force_refresh_step_policy,
            enable_separate_cfg=False,
        )

    def to_calibrator_config(self) -> CalibratorConfig | None:
        """The library's config of the calibrator, if there is one."""
        kind = self.calibrator or ("taylorseer" if self.enable_taylorseer else None)
        if kind == "taylorseer":
            return TaylorSeerCalibratorConfig(taylorseer_order=self.taylorseer_order)
        if kind == "dmd":
            return DMDCalibratorConfig(
                dmd_history=self.dmd_history,
                dmd_rank=self.dmd_rank,
                dmd_ridge=self.dmd_ridge,
                dmd_svd_precision=self.dmd_svd_precision,
            )
        return FoCaCalibratorConfig() if kind == "foca" else None

    def context_settings(self) -> dict[str, Any]:
        """Keyword arguments for the library's contexts."""
        return {"cache_config": self.to_db_cache_config(), "calibrator_config": self.to_calibrator_config()}

    @classmethod
    def from_library(cls, cache_config: BasicCacheConfig, calibrator_config: CalibratorConfig | None) -> Self:
        """The settings in the library's own configs; what is None there has this method's default."""
        settings: dict[str, Any] = {}
        for name in cls.field_names():
            value = getattr(cache_config, _LIBRARY_NAMES.get(name, name), None)
            if value is None:
                value = getattr(calibrator_config, name, None)
            if value is not None:
                settings[name] = value
        if "residual_diff_threshold" in settings:  # which may be a tensor
            settings["residual_diff_threshold"] = float(settings["residual_diff_threshold"])
        if calibrator_config is not None and calibrator_config.enable_calibrator:
            settings["calibrator"] = calibrator_config.calibrator_type
        return cls(**settings)


def steps_mask(policy: str, steps: int) -> list[int] | None:
    """The library's SCM mask for exactly `steps` steps, 1 for computed ones; None if it has none for that many."""
    try:
        return list(cache_dit.steps_mask(mask_policy=policy, total_steps=steps))
    except AssertionError:
        return None


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """Silence the library's log below ERROR, unless CACHE_DIT_LOG_LEVEL is set."""
    names = [] if "CACHE_DIT_LOG_LEVEL" in os.environ else list(logging.root.manager.loggerDict)
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names if name.startswith("cache_dit")}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
