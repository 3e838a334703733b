"""The interface of every cache backend, and the documented settings of the methods.

The settings of TeaCache, MagCache and cache-dit are here because they are used twice: by the method's own config and by
`DiffusionCacheConfig`, the documented union of all three.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self

from .config import Config, ConfigT, setting
from .errors import ConfigError, NotEnabledError
from .stats import Stats

Ratios = tuple[float, ...] | tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class TeaCacheSettings(Config):
    """The documented settings of TeaCache."""

    rel_l1_thresh: float | None = setting(
        0.2, ge=0, doc="hold while the accumulated change is below this; null: the default"
    )
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
    """The documented settings of MagCache. `mag_ratios` is one list for all branches, or one list per branch."""

    mag_threshold: float = setting(0.24, ge=0, doc="hold while the accumulated error is at most this")
    mag_max_skip_steps: int = setting(5, ge=0, doc="hold at most this many steps in a row")
    mag_retention_ratio: float = setting(0.1, ge=0, le=1, doc="fraction of the first steps that is always computed")
    num_inference_steps: int = setting(28, ge=1, doc="number of steps if no scheduler gives it")
    mag_ratios: Ratios | None = setting(None, doc="magnitude ratios, one per step; per branch if they differ")
    calibrate: bool = setting(False, doc="hold nothing and measure the magnitude ratios")
    mag_calibrate: bool = setting(False, doc="the same as calibrate, under its other documented name")

    def __post_init__(self) -> None:
        super().__post_init__()
        for branch, values in self.ratios_by_branch.items():
            if not values or any(not 0 < value < math.inf for value in values):
                of = f" for branch {branch!r}" if branch else ""
                raise ConfigError(
                    f"{type(self).__name__}.mag_ratios must be positive numbers, one per step{of}, not {list(values)}."
                )

    @property
    def ratios_by_branch(self) -> dict[str, tuple[float, ...]]:
        """The given ratios by branch; one list for all branches has the key `""`."""
        if self.mag_ratios is None:
            return {}
        if self.mag_ratios and isinstance(self.mag_ratios[0], tuple):
            return dict(self.mag_ratios)
        return {"": self.mag_ratios}  # type: ignore[dict-item]


@dataclass(frozen=True)
class CacheDiTSettings(Config):
    """The documented settings of cache-dit: DBCache, TaylorSeer, SCM."""

    Fn_compute_blocks: int = setting(1, ge=1, doc="number of first blocks that always run")
    Bn_compute_blocks: int = setting(0, ge=0, doc="number of last blocks that always run")
    max_warmup_steps: int = setting(4, ge=0, doc="number of first steps that are always computed")
    max_cached_steps: int = setting(-1, ge=-1, doc="hold at most this many steps in all; -1 for no limit")
    max_continuous_cached_steps: int = setting(3, ge=-1, doc="hold at most this many steps in a row; -1 for no limit")
    residual_diff_threshold: float = setting(0.24, ge=0, doc="hold while the first blocks' residual differs by less")
    enable_taylorseer: bool = setting(False, doc="extrapolate the held residual")
    taylorseer_order: int = setting(1, ge=1, le=4, doc="order of the extrapolation")
    scm_steps_mask_policy: str | None = setting(
        None, choices=(None, "slow", "medium", "fast", "ultra"), doc="preset mask of computed steps"
    )
    scm_steps_policy: str = setting(
        "dynamic", choices=("dynamic", "static"), doc="whether steps outside the mask may be held or always are"
    )
    force_refresh_step_hint: int | None = setting(None, ge=0, doc="start over at this step, warm-up included")
    force_refresh_step_policy: str = setting(
        "once", choices=("once", "repeat"), doc="start over at that step only, or at each multiple of it"
    )


@dataclass(frozen=True)
class DiffusionCacheConfig(CacheDiTSettings, MagCacheSettings, TeaCacheSettings):
    """Every documented setting of every method in one object; each backend uses those of its own method."""

    def part(self, config: type[Config]) -> dict[str, Any]:
        """The settings that a method's own config class has too."""
        return {name: getattr(self, name) for name in config.field_names() if name in self.field_names()}


class CacheBackend(ABC, Generic[ConfigT]):
    """One caching method on one pipeline.

    `enable` installs the cache, `disable` removes it. In between, generations start and end by themselves; `refresh` is
    for callers that start them by hand. As a context manager, the cache is disabled at the end of the block.
    """

    config_class: ClassVar[type[Config]]
    settings: ConfigT  # the method's own settings, from whatever `config` is

    def __init__(self, config: Any) -> None:
        self.config = config
        self.enabled = False

    @abstractmethod
    def enable(self, pipeline: Any) -> None:
        """Install the cache on a pipeline or a transformer: completely, or not at all."""

    @abstractmethod
    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        """Start a generation of that many steps and forget the last one."""

    def disable(self) -> None:
        """Remove the cache: every object is what it was before."""
        raise NotImplementedError(f"{type(self).__name__} cannot be disabled.")

    def stats(self) -> Stats:
        """The computed and held steps so far, with times and memory."""
        raise NotImplementedError(f"{type(self).__name__} keeps no statistics.")

    def reports(self) -> Mapping[str, object]:
        """The replay check of each transformer that has run: its stack, and how exact a hold is."""
        raise NotImplementedError(f"{type(self).__name__} does not check transformers.")

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        """Use other settings for the generations that start inside the block."""
        raise NotImplementedError(f"{type(self).__name__} cannot change its settings while it is enabled.")

    def off(self) -> AbstractContextManager[None]:
        """Use no cache for the generations that start inside the block."""
        raise NotImplementedError(f"{type(self).__name__} cannot be switched off while it is enabled.")

    def is_enabled(self) -> bool:
        """Whether the cache is installed on a pipeline."""
        return self.enabled

    def __enter__(self) -> Self:
        if not self.enabled:
            raise NotEnabledError("Enable the cache first: `with holdover.enable(pipe, ...) as cache:`.")
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.disable()
