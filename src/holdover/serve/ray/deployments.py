"""From settings to a Ray Serve application: an ingress in front, replicas behind."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from ..settings import api_keys
from .cache import CHANGEABLE, packed
from .ingress import Ingress
from .replica import Replica
from .routing import PromptRouter
from .settings import RaySettings

NAME = "holdover"
_HEALTH = {"health_check_period_s": 5.0, "health_check_timeout_s": 30.0}


def built(settings: RaySettings) -> serve.Application:
    """The application; the cache is what Serve calls `user_config`, which may change while replicas run."""
    cache = packed({name: getattr(settings, name) for name in CHANGEABLE})
    plain = RaySettings()
    fixed = settings.replaced(**{name: getattr(plain, name) for name in CHANGEABLE})
    replicas = serve.deployment(
        Replica,
        name="Replica",
        user_config=cache,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": _gpus(settings)},
        max_ongoing_requests=settings.ongoing,
        request_router_config=RequestRouterConfig(
            request_router_class=PromptRouter, request_router_kwargs={"prompts": settings.prompt_cache_size}
        ),
        max_constructor_retry_count=3,
        graceful_shutdown_timeout_s=float(settings.grace),
        **_HEALTH,
        **_how_many(settings),
    )
    front = serve.deployment(
        Ingress,
        name="Ingress",
        user_config=cache,
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=1_000_000,  # the queue's size is the limit
        graceful_shutdown_timeout_s=float(settings.grace),
        max_surge_percent=100,  # the old one answers until the new one does
        **_HEALTH,
    )
    return front.bind(fixed, api_keys(), replicas.bind(fixed))


def _how_many(settings: RaySettings) -> dict[str, Any]:
    scaling = settings.autoscaling
    return {"autoscaling_config": scaling} if scaling else {"num_replicas": settings.replicas}


def _gpus(settings: RaySettings) -> float:
    if settings.num_gpus >= 0:
        return settings.num_gpus
    if settings.device == "auto":
        return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    return 1.0 if settings.device.startswith("cuda") else 0.0
