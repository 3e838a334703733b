"""The interface every cache backend has, and the documented union of all settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

from .config import Config, setting
from .errors import ConfigError, NotEnabledError
from .stats import Stats

Ratios = tuple[float, ...] | tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True)
class DiffusionCacheConfig(Config):
    """Every documented setting of every method in one object; each backend takes its own out of it."""

    # TeaCache
    rel_l1_thresh: float = setting(0.2, ge=0, doc="hold while the accumulated change is below this")
    coefficients: tuple[float, ...] | None = setting(None, doc="rescaling polynomial, highest power first")
    # MagCache
    mag_threshold: float = setting(0.24, ge=0, doc="hold while the accumulated error is at most this")
    mag_max_skip_steps: int = setting(5, ge=0, doc="hold at most this many steps in a row")
    mag_retention_ratio: float = setting(0.1, ge=0, le=1, doc="part of the steps at the start that is always computed")
    mag_ratios: Ratios | None = setting(None, doc="magnitude ratios, one a step; by branch where they differ")
    num_inference_steps: int = setting(28, ge=1, doc="number of steps where no scheduler says it")
    calibrate: bool = setting(False, doc="hold nothing and measure the magnitude ratios")
    mag_calibrate: bool = setting(False, doc="the same under its other documented name")
    # cache-dit: DBCache, TaylorSeer, SCM
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
    force_refresh_step_hint: int | None = setting(None, ge=0, doc="compute this step afresh")
    force_refresh_step_policy: str = setting(
        "once", choices=("once", "repeat"), doc="at that step, or at each multiple"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefficients(self.coefficients, type(self).__name__)
        check_ratios(self.mag_ratios, type(self).__name__)

    def part(self, config: type[Config]) -> dict[str, Any]:
        """The settings a method's own config has too."""
        return {name: getattr(self, name) for name in config.field_names() if name in self.field_names()}


def check_coefficients(coefficients: tuple[float, ...] | None, owner: str) -> None:
    """A polynomial has at least one coefficient, and all are finite."""
    if coefficients is not None and not (coefficients and all(map(math.isfinite, coefficients))):
        raise ConfigError(f"{owner}.coefficients must be finite numbers, at least one, not {list(coefficients)}.")


def check_ratios(ratios: Ratios | None, owner: str) -> None:
    """Ratios of magnitudes are positive and finite, one a step, for each branch that has its own."""
    for branch, values in ratios_by_branch(ratios).items():
        if not values or any(not 0 < value < math.inf for value in values):
            of = f" for branch {branch!r}" if branch else ""
            raise ConfigError(f"{owner}.mag_ratios must be positive numbers, one a step{of}, not {list(values)}.")


def ratios_by_branch(ratios: Ratios | None) -> dict[str, tuple[float, ...]]:
    """Ratios by branch; the branch is `""` where one list serves all."""
    if ratios is None:
        return {}
    if ratios and isinstance(ratios[0], tuple):
        return dict(ratios)
    return {"": ratios}  # type: ignore[dict-item]


class CacheBackend(ABC):
    """One caching method on one pipeline.

    `enable` puts it on, `disable` takes it off, and between the two generations begin and end by themselves:
    `refresh` is there for callers that want to say so. As a context manager it is disabled at the end of the
    block.
    """

    config_class: ClassVar[type[Config]]

    def __init__(self, config: Any) -> None:
        self.config = config
        self.enabled = False

    @abstractmethod
    def enable(self, pipeline: Any) -> None:
        """Put the cache on a pipeline or a transformer: on all of it, or on nothing."""

    @abstractmethod
    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        """Begin a generation of that many steps with nothing remembered."""

    def disable(self) -> None:
        """Take the cache off: every object is what it was before."""
        raise NotImplementedError(f"{type(self).__name__} cannot be taken off.")

    def stats(self) -> Stats:
        """What was computed and held so far."""
        raise NotImplementedError(f"{type(self).__name__} does not count.")

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        """Other settings for the generations that start inside the block."""
        raise NotImplementedError(f"{type(self).__name__} has one setting for all generations.")

    def off(self) -> AbstractContextManager[None]:
        """No cache for the generations that start inside the block."""
        raise NotImplementedError(f"{type(self).__name__} cannot be switched off for a while.")

    def is_enabled(self) -> bool:
        """Whether the cache is on a pipeline."""
        return self.enabled

    def __enter__(self) -> Self:
        if not self.enabled:
            raise NotEnabledError("Enable the cache first: `with holdover.enable(pipe, ...) as cache:`.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            self.disable()
