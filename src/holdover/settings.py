"""The documented settings of each method, declared once: for the method's own config and for the union of all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import Config, setting
from .errors import ConfigError

Ratios = tuple[float, ...] | tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class TeaCacheSettings(Config):
    """TeaCache's."""

    rel_l1_thresh: float = setting(0.2, ge=0, doc="hold while the accumulated change is below this")
    coefficients: tuple[float, ...] | None = setting(None, doc="rescaling polynomial, highest power first")

    def __post_init__(self) -> None:
        super().__post_init__()
        coefficients = self.coefficients
        if coefficients is not None and not (coefficients and all(map(math.isfinite, coefficients))):
            raise ConfigError(
                f"{type(self).__name__}.coefficients must be finite numbers, at least one, not {list(coefficients)}."
            )


@dataclass(frozen=True)
class MagCacheSettings(Config):
    """MagCache's. Ratios are one a step, or by branch where they differ."""

    mag_threshold: float = setting(0.24, ge=0, doc="hold while the accumulated error is at most this")
    mag_max_skip_steps: int = setting(5, ge=0, doc="hold at most this many steps in a row")
    mag_retention_ratio: float = setting(0.1, ge=0, le=1, doc="part of the steps at the start that is always computed")
    num_inference_steps: int = setting(28, ge=1, doc="number of steps where no scheduler says it")
    mag_ratios: Ratios | None = setting(None, doc="magnitude ratios, one a step; by branch where they differ")
    calibrate: bool = setting(False, doc="hold nothing and measure the magnitude ratios")
    mag_calibrate: bool = setting(False, doc="the same under its other documented name")

    def __post_init__(self) -> None:
        super().__post_init__()
        for branch, values in self.ratios_by_branch.items():
            if not values or any(not 0 < value < math.inf for value in values):
                of = f" for branch {branch!r}" if branch else ""
                raise ConfigError(
                    f"{type(self).__name__}.mag_ratios must be positive numbers, one a step{of}, not {list(values)}."
                )

    @property
    def ratios_by_branch(self) -> dict[str, tuple[float, ...]]:
        """The given ratios; the branch is `""` where one list serves all."""
        if self.mag_ratios is None:
            return {}
        if self.mag_ratios and isinstance(self.mag_ratios[0], tuple):
            return dict(self.mag_ratios)
        return {"": self.mag_ratios}  # type: ignore[dict-item]


@dataclass(frozen=True)
class CacheDiTSettings(Config):
    """cache-dit's: DBCache, TaylorSeer, SCM."""

    Fn_compute_blocks: int = setting(1, ge=1, doc="blocks at the start that always run")
    Bn_compute_blocks: int = setting(0, ge=0, doc="blocks at the end that always run")
    max_warmup_steps: int = setting(4, ge=0, doc="steps at the start that are always computed")
    max_cached_steps: int = setting(-1, ge=-1, doc="hold at most this many steps in all; -1 for no limit")
    max_continuous_cached_steps: int = setting(3, ge=-1, doc="hold at most this many steps in a row; -1 for no limit")
    residual_diff_threshold: float = setting(0.24, ge=0, doc="hold while the first blocks' residual differs by less")
    enable_taylorseer: bool = setting(False, doc="extrapolate the held residual")
    taylorseer_order: int = setting(1, ge=1, le=4, doc="order of the extrapolation")
    scm_steps_mask_policy: str | None = setting(
        None, choices=(None, "slow", "medium", "fast", "ultra"), doc="preset mask of computed steps"
    )
    scm_steps_policy: str = setting(
        "dynamic", choices=("dynamic", "static"), doc="whether the mask is permission or order"
    )
    force_refresh_step_hint: int | None = setting(None, ge=0, doc="begin anew at this step, warm-up included")
    force_refresh_step_policy: str = setting(
        "once", choices=("once", "repeat"), doc="at that step, or at each multiple"
    )
