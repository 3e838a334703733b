"""What the application was told: every setting of the server, and how many replicas with what. Knows no ray."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...config import setting
from ...errors import ConfigError
from ..settings import Settings

_OUTSIDE = {"host": "http_options", "port": "http_options", "address": "`serve run --address`"}


@dataclass(frozen=True)
class RaySettings(Settings):
    """The settings of one application; each is a flag of `holdover serve --ray` and an argument in YAML."""

    replicas: int = setting(1, ge=1, doc="with --ray: copies of the model, each with its device")
    max_replicas: int = setting(0, ge=0, doc="with --ray: add replicas up to this many as the queue grows; 0: add none")
    target_requests: float = setting(
        4.0, gt=0, doc="with --ray: requests a replica should have, waiting ones too; more of them add replicas"
    )
    upscale_delay: float = setting(30.0, ge=0, doc="with --ray: seconds of a long queue before replicas are added")
    downscale_delay: float = setting(600.0, ge=0, doc="with --ray: seconds of a short queue before they are removed")
    num_gpus: float = setting(-1.0, ge=-1, doc="with --ray: GPUs of a replica; -1: one where the cluster has some")
    num_cpus: float = setting(1.0, ge=0, doc="with --ray: processors of a replica")
    fronts: int = setting(1, ge=1, doc="with --ray: processes that answer HTTP")
    retries: int = setting(3, ge=0, doc="with --ray: how often a picture is begun again because its replica died")
    address: str = setting("local", doc="with --ray: a Ray cluster to join; local starts one")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, less than the {self.replicas} replicas there always are."
            )

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """From the `args` of a YAML file or of `serve run`; `cache_config` may be a mapping there."""
        for name, place in _OUTSIDE.items():
            if name in args:
                raise ConfigError(f"{name!r} is not an argument of the application: it is set in {place}.")
        cls.check_keys(args)
        return cls.from_dict({name: _read(name, value) for name, value in args.items()})

    @property
    def ongoing(self) -> int:
        """Requests a replica is sent at a time: those it draws together, and as many that wait for it."""
        return 2 * self.max_batch

    @property
    def autoscaling(self) -> dict[str, Any] | None:
        """The same in Serve's words; None for a fixed number of replicas."""
        if not self.max_replicas:
            return None
        return {
            "min_replicas": self.replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_requests,
            "upscale_delay_s": self.upscale_delay,
            "downscale_delay_s": self.downscale_delay,
        }

    def of_a_replica(self, cache: Mapping[str, Any]) -> Settings:
        """The settings of one replica's worker, which turns away nothing that it is sent."""
        own = {name: getattr(self, name) for name in Settings.field_names()}
        return Settings(**own | {"queue_size": self.ongoing * self.max_images} | dict(cache))


def _read(name: str, value: Any) -> Any:
    if name == "cache_config":
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, str) and typing.get_type_hints(RaySettings)[name] is not str:
        try:
            return json.loads(value)  # `serve run holdover.serve.ray:app replicas=2`
        except json.JSONDecodeError:
            return value
    return value
