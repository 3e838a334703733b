"""Settings of the server: every flag of `holdover serve`, declared once. Imports neither torch, fastapi nor ray."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..config import setting
from ..errors import ConfigError
from ..loading import ModelSettings
from ..selector import own_config

API_KEYS = "HOLDOVER_API_KEYS"


@dataclass(frozen=True)
class Settings(ModelSettings):
    """The settings of one server; each is a flag of the same name. Those of the model are inherited."""

    cache_backend: str = setting("none", doc="default caching method, for requests that name none")
    cache_config: str = setting("{}", doc="settings of that method, as a JSON object")
    host: str = setting("127.0.0.1", doc="address to listen on; 0.0.0.0 for every interface")
    port: int = setting(8000, ge=0, le=65535, doc="port to listen on; 0 for a free one")
    max_batch: int = setting(4, ge=1, doc="largest number of images generated in one batch")
    max_wait: float = setting(0.02, ge=0, doc="seconds an image waits for others to share its batch")
    queue_size: int = setting(64, ge=1, doc="largest number of images in the queue; more are rejected")
    prompt_cache: bool = setting(False, doc="cache the embeddings of prompts")
    prompt_cache_size: int = setting(32, ge=1, doc="number of prompts to cache")
    max_size: int = setting(1024, ge=1, doc="longest side of an image, in pixels")
    max_steps: int = setting(100, ge=1, doc="largest number of steps of one image")
    max_images: int = setting(4, ge=1, doc="largest number of images of one request")
    max_prompt: int = setting(1000, ge=1, doc="longest prompt, in characters")
    max_body: int = setting(8_000_000, ge=1000, doc="largest request, in bytes")
    max_previews: int = setting(20, ge=0, doc="largest number of previews of one image")
    max_frames: int = setting(161, ge=1, doc="largest number of frames of one video")
    video_dir: str = setting("videos", doc="folder of the generated videos; with --ray all machines must share it")
    video_hours: float = setting(24.0, ge=0, doc="hours after which a finished video is deleted; 0 to keep it")
    video_space: float = setting(
        10.0, gt=0, doc="gigabytes of the videos in the folder; above it the oldest are deleted"
    )
    rate_limit: int = setting(
        0, ge=0, doc="requests per minute for each API key, or for each address if there are no keys; 0 for no limit"
    )
    cors_origin: tuple[str, ...] = setting((), doc="a web origin whose pages may use the server; repeatable")
    allowed_host: tuple[str, ...] = setting(
        (), doc="a host name that requests may be sent to, such as images.example.com or *.example.com; repeatable"
    )
    max_connections: int = setting(512, ge=1, doc="largest number of open connections")
    max_header: int = setting(16_384, ge=1024, doc="largest header of a request, in bytes")
    header_timeout: float = setting(10.0, gt=0, doc="seconds that a client has to send the header of a request")
    body_timeout: float = setting(60.0, gt=0, doc="seconds that a client has to send the body, and to read a response")
    keep_alive: int = setting(5, ge=1, doc="seconds that an idle connection stays open")
    enable_cpu_offload: bool = setting(False, doc="vLLM-Omni's name of --offload model")
    tensor_parallel_size: int = setting(
        1, ge=1, doc="number of GPUs that every weight of the transformer is split over"
    )
    grace: int = setting(60, ge=0, doc="seconds that running requests get to finish at shutdown")
    log_level: str = setting("info", choices=("debug", "info", "warning", "error"), doc="lowest level that is logged")
    log_format: str = setting("text", choices=("text", "json"), doc="a line of text or a JSON object for each record")
    log_prompts: bool = setting(False, doc="include prompts in the log")

    def __post_init__(self) -> None:
        if self.video_hours == math.inf:
            raise ConfigError("video_hours must be a finite number; 0 keeps the videos.")
        super().__post_init__()
        if self.enable_cpu_offload:
            object.__setattr__(self, "offload", "model")
        if self.max_images > self.queue_size:
            raise ConfigError(
                f"max_images is {self.max_images}, but the queue holds only {self.queue_size}: raise queue_size."
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        """Patterns of the host names that requests may be sent to; `localhost` and addresses always may.

        None by default on a loopback address: otherwise a web page whose own name is changed to point to this machine
        (DNS rebinding) could use the server. On other addresses the names are not known, so all are allowed.
        """
        if self.allowed_host:
            return self.allowed_host
        try:
            loopback = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            loopback = False
        return () if loopback else ("*",)

    @property
    def cache_settings(self) -> dict[str, Any]:
        """`cache_config` as a mapping; malformed text is an error, never the defaults."""
        example = '{"mag_threshold": 0.24}'
        try:
            values = json.loads(self.cache_config)
        except json.JSONDecodeError as error:
            raise ConfigError(f"cache_config is not JSON: {error}. Write an object like {example}.") from None
        if not isinstance(values, dict):
            raise ConfigError(f"cache_config must be a JSON object like {example}, not {self.cache_config}.")
        return values

    def check_cache(self) -> None:
        """Raise a ConfigError if the default method or its settings are wrong."""
        settings = self.cache_settings
        if self.cache_backend != "none" or settings:  # no method to import otherwise, and torch with it
            own_config(self.cache_backend, settings)


def api_keys(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The comma-separated keys in `HOLDOVER_API_KEYS`; if there are none, clients need no key."""
    return tuple(key for part in environment.get(API_KEYS, "").split(",") if (key := part.strip()))


_SET_ELSEWHERE = {"host": "http_options", "port": "http_options", "address": "`serve run --address`"}
_OF_RAYS_PROXY = ("max_connections", "max_header", "header_timeout", "body_timeout", "keep_alive")


@dataclass(frozen=True)
class RaySettings(Settings):
    """The settings of a Ray Serve application; each is a flag of `holdover serve --ray` and an argument in YAML."""

    replicas: int = setting(1, ge=1, doc="with --ray: copies of the model, each on its own device")
    max_replicas: int = setting(0, ge=0, doc="with --ray: add replicas up to this many as the queue grows; 0: add none")
    target_requests: float = setting(
        4.0, gt=0, doc="with --ray: requests per replica, queued ones included, above which replicas are added"
    )
    upscale_delay: float = setting(30.0, ge=0, doc="with --ray: seconds of a long queue before replicas are added")
    downscale_delay: float = setting(600.0, ge=0, doc="with --ray: seconds of a short queue before they are removed")
    num_gpus: float = setting(-1.0, ge=-1, doc="with --ray: GPUs per replica; -1: one if the cluster has any")
    num_cpus: float = setting(1.0, ge=0, doc="with --ray: CPUs per replica")
    fronts: int = setting(1, ge=1, doc="with --ray: number of processes that answer HTTP")
    retries: int = setting(3, ge=0, doc="with --ray: how often an image is started again because its replica died")
    address: str = setting("local", doc="with --ray: address of the Ray cluster to join; local starts one")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size > 1:
            raise ConfigError("tensor_parallel_size is for one server: on Ray, each replica has a GPU of its own.")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas is {self.max_replicas}, less than replicas, which is {self.replicas}.")
        for field in self.settings():
            if field.name in _OF_RAYS_PROXY and getattr(self, field.name) != field.default:
                raise ConfigError(f"{field.name} is not for Ray, whose own proxy accepts the connections.")

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """From the `args` of a YAML file or of `serve run`; there `cache_config` may be a mapping."""
        for name, place in _SET_ELSEWHERE.items():
            if name in args:
                raise ConfigError(f"{name!r} is not an argument of the application: it is set in {place}.")
        cls.check_keys(args)
        values: dict[str, Any] = {"host": "0.0.0.0", **args}  # http_options, which are not known here, have the address
        hints = typing.get_type_hints(cls)
        for name, value in args.items():
            if name == "cache_config" and not isinstance(value, str):
                values[name] = json.dumps(value)
            elif isinstance(value, str) and hints[name] is not str:
                with contextlib.suppress(json.JSONDecodeError):  # then the error names the text itself
                    values[name] = json.loads(value)  # `serve run holdover.serve.ray:app replicas=2`
        return cls(**values)

    @property
    def max_ongoing_requests(self) -> int:
        """Requests a replica is sent at a time: one batch that runs and one that waits."""
        return 2 * self.max_batch

    @property
    def autoscaling_config(self) -> dict[str, Any] | None:
        """Serve's `autoscaling_config`; None for a fixed number of replicas."""
        if not self.max_replicas:
            return None
        return {
            "min_replicas": self.replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_requests,
            "upscale_delay_s": self.upscale_delay,
            "downscale_delay_s": self.downscale_delay,
        }

    def worker_settings(self, cache: Mapping[str, Any]) -> Settings:
        """The settings of a replica's worker, whose queue holds every request that a replica is sent."""
        shared = {name: getattr(self, name) for name in Settings.field_names()}
        return Settings(**shared | {"queue_size": self.max_ongoing_requests * self.max_images} | dict(cache))
