"""What the server was told: every flag of `holdover serve`, declared once. Knows neither torch nor HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config, setting
from ..errors import ConfigError

API_KEYS = "HOLDOVER_API_KEYS"


@dataclass(frozen=True)
class Settings(Config):
    """The settings of one server; each is a flag of the same name."""

    model: str = setting("emoji", doc="a model in the box, the folder of a diffusers pipeline, or a name on the hub")
    cache_backend: str = setting("none", doc="caching method of requests that ask for none of their own")
    cache_config: str = setting("{}", doc="settings of that method, as a JSON object")
    host: str = setting("127.0.0.1", doc="address to listen on; 0.0.0.0 for every interface")
    port: int = setting(8000, ge=0, le=65535, doc="port to listen on; 0 for a free one")
    max_batch: int = setting(4, ge=1, doc="draw at most this many pictures together")
    max_wait: float = setting(0.02, ge=0, doc="seconds a picture waits for company")
    queue_size: int = setting(64, ge=1, doc="pictures that may wait; more are turned away")
    prompt_cache: bool = setting(False, doc="remember the embeddings of prompts")
    prompt_cache_size: int = setting(32, ge=1, doc="prompts to remember")
    max_size: int = setting(1024, ge=1, doc="longest side of a picture, in pixels")
    max_steps: int = setting(100, ge=1, doc="most steps of one picture")
    max_images: int = setting(4, ge=1, doc="most pictures of one request")
    max_prompt: int = setting(1000, ge=1, doc="longest prompt, in characters")
    max_body: int = setting(8_000_000, ge=1000, doc="largest request, in bytes")
    cors_origin: tuple[str, ...] = setting((), doc="a web origin whose pages may use the server; repeatable")
    device: str = setting("auto", doc="cpu, cuda, cuda:1, mps; auto takes the GPU where there is one")
    dtype: str = setting(
        "auto", choices=("auto", "float32", "bfloat16", "float16"), doc="of the weights; auto: float32 on a CPU"
    )
    grace: int = setting(60, ge=0, doc="seconds that running requests get to finish at shutdown")
    log_level: str = setting("info", choices=("debug", "info", "warning", "error"), doc="what is logged")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_images > self.queue_size:
            raise ConfigError(
                f"max_images is {self.max_images}, but only {self.queue_size} pictures may wait: raise queue_size."
            )

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


def api_keys(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys that `HOLDOVER_API_KEYS` names, apart by commas; none: everybody may draw."""
    return tuple(key for part in environment.get(API_KEYS, "").split(",") if (key := part.strip()))
