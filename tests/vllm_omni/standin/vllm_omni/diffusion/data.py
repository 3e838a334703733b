"""The configuration of an engine, and within it that of the cache."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DiffusionCacheConfig:
    """A field for each setting of vLLM-Omni; other keys are kept in `_extra_params` and read as attributes."""

    rel_l1_thresh: float | None = None
    coefficients: list[float] | None = None
    sea_threshold: float = 0.25
    mag_threshold: float = 0.24
    mag_max_skip_steps: int = 5
    mag_retention_ratio: float = 0.1
    mag_ratios: list[float] | None = None
    mag_calibrate: bool = False
    Fn_compute_blocks: int = 1
    Bn_compute_blocks: int = 0
    max_warmup_steps: int = 4
    max_cached_steps: int = -1
    residual_diff_threshold: float = 0.24
    max_continuous_cached_steps: int = 3
    enable_taylorseer: bool = False
    taylorseer_order: int = 1
    scm_steps_mask_policy: str | None = None
    scm_steps_policy: str = "dynamic"
    num_inference_steps: int | None = None
    force_refresh_step_hint: int | None = None
    force_refresh_step_policy: str = "once"
    velocity_sim_thresholds: list[float] = field(default_factory=lambda: [0.95, 0.93])
    _extra_params: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, data):
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in data.items() if k in known and not k.startswith("_")}
        return cls(**fields, _extra_params={k: v for k, v in data.items() if k not in known})

    def __getattr__(self, name):
        if not name.startswith("_") and name in self._extra_params:
            return self._extra_params[name]
        raise AttributeError(name)


@dataclass
class OmniDiffusionConfig:
    """What the engine starts its workers with; `cache_config` comes from the command line as JSON."""

    cache_backend: str | None = "none"
    cache_config: Any = field(default_factory=dict)

    def __post_init__(self):
        given = json.loads(self.cache_config) if isinstance(self.cache_config, str) else self.cache_config
        self.cache_config = DiffusionCacheConfig.from_dict(given) if isinstance(given, dict) else DiffusionCacheConfig()
