"""The Ray Serve application: an ingress that answers HTTP, replicas that generate; `holdover serve --ray`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve as ray_serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ...errors import HoldoverError
from ..errors import ApiError
from ..launch import ServeError, configure_logging, free_port
from ..queue import Event, Generated, ImageSpec, QueueItem, follow
from ..schemas import CacheReport
from ..settings import RaySettings, api_keys
from ..validation import ModelInfo
from .backend import (
    CACHE_SETTINGS,
    HEALTH_TIMEOUT,
    PromptRouter,
    RayBackend,
    pack_cache,
    unpack_cache,
    unpack_config,
    write_profile,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..worker import Worker

logger = logging.getLogger(__name__)

NAME = "holdover"
_LOCAL = "local"
_HEALTH = {"health_check_period_s": 5.0, "health_check_timeout_s": HEALTH_TIMEOUT}


class Replica:
    """A worker that other processes call. Importing this class imports no torch: replicas do when they start."""

    def __init__(self, settings: RaySettings) -> None:
        configure_logging(settings, "holdover")
        self._settings = settings
        self._worker: Worker | None = None
        self._change: asyncio.Task[str | None] | None = None

    @property
    def worker(self) -> Worker:
        assert self._worker is not None  # Serve sends no calls before `reconfigure` has returned
        return self._worker

    async def reconfigure(self, cache: Mapping[str, Any]) -> None:
        """Serve calls it with the cache settings at the start and when they change.

        A replica does not start with a cache that the model refuses. A running replica keeps its cache then, because
        Serve would end it. It changes after this method returns, because Serve sends it no calls until then.
        """
        if self._worker is None:
            from ..worker import Worker

            worker = Worker(self._settings.worker_settings(unpack_cache(pack_cache(cache))))
            await worker.start()
            await asyncio.wrap_future(worker.loading)
            self._worker = worker
        else:
            self._change = asyncio.create_task(self.set_default(cache))

    async def check_health(self) -> None:
        """Serve calls it regularly, and replaces a replica that raises."""
        if self._worker is not None and not self._worker.healthy:
            raise HoldoverError("The worker of this replica has ended, or its device fails at every image.")

    async def set_default(self, cache: Mapping[str, Any]) -> str | None:
        """Change the default cache before the next batch; returns the error's message if the model refuses it."""
        try:
            await self.worker.set_default(unpack_config(pack_cache(cache)))
        except HoldoverError as error:
            logger.error("the default cache does not change: %s", error)
            return str(error)
        return None

    async def describe(self) -> tuple[ModelInfo, bool]:
        """The model, and whether prompts are cached."""
        return self.worker.loaded()[0], self.worker.prompt_cache is not None

    async def generate(
        self, specs: Sequence[ImageSpec], waited: float, profile: Mapping[str, str] | None
    ) -> AsyncIterator[tuple[int, Event]]:
        """Generate the images of one request, accepted `waited` seconds ago; yields events with the image's index.

        A `profile` that the settings name is written first: this machine may not have it.
        """
        if profile is not None:
            write_profile(profile)
        items = [QueueItem(spec, time.monotonic() - waited) for spec in specs]
        events = follow(items)
        self.worker.submit(items)
        left = len(items)
        try:
            while left:
                index, event = await events.get()
                left -= isinstance(event, Generated | ApiError)
                yield index, event
        finally:
            for item in items:
                item.future.cancel()

    async def report(self) -> CacheReport:
        return await self.worker.report()

    async def named_metrics(self) -> tuple[str, bytes]:
        """The replica's name and its metrics."""
        return ray_serve.get_replica_context().replica_tag, await self.worker.metrics()


@ray_serve.ingress()
class Ingress:
    """The same HTTP application as that of one process, with replicas as its backend."""

    def __init__(self, settings: RaySettings, keys: Sequence[str], replicas: DeploymentHandle) -> None:
        from ..app import create_app

        configure_logging(settings, "holdover")
        context, self._grace = ray_serve.get_replica_context(), settings.grace
        self._backend = RayBackend(settings, replicas, DeploymentHandle(context.deployment, context.app_name))
        self._app = create_app(settings, keys, self._backend, behind_proxy=True)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def reconfigure(self, cache: Mapping[str, Any]) -> None:
        """Serve calls it with the cache settings at the start and when they change."""
        await self._backend.reconfigure(cache)

    async def close(self) -> None:
        """Accept no more requests, and return when all images that were accepted are generated."""
        await self._app.state.videos.stop(self._grace)
        await self._backend.stop()

    async def named_metrics(self) -> tuple[str, bytes]:
        """The ingress's name and its metrics."""
        return ray_serve.get_replica_context().replica_tag, self._app.state.metrics.text()


def build(settings: RaySettings) -> ray_serve.Application:
    """The application; the cache settings are Serve's `user_config`, which may change while replicas run."""
    cache = pack_cache({name: getattr(settings, name) for name in CACHE_SETTINGS})
    defaults = RaySettings()
    folder = str(Path(settings.video_dir).expanduser().absolute())  # the processes may have other working directories
    fixed = settings.replaced(video_dir=folder, **{name: getattr(defaults, name) for name in CACHE_SETTINGS})
    count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.autoscaling_config is not None:
        count = {"autoscaling_config": settings.autoscaling_config}
    replicas = ray_serve.deployment(
        Replica,
        name="Replica",
        user_config=cache,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": _num_gpus(settings)},
        max_ongoing_requests=settings.max_ongoing_requests,
        request_router_config=RequestRouterConfig(
            request_router_class=PromptRouter,
            request_router_kwargs={"prompts": settings.prompt_cache_size, "ingresses": settings.fronts},
        ),
        max_constructor_retry_count=3,
        graceful_shutdown_timeout_s=float(settings.grace),
        **_HEALTH,
        **count,
    )
    ingress = ray_serve.deployment(
        Ingress,
        name="Ingress",
        user_config=cache,
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=1_000_000,  # queue_size is the limit
        graceful_shutdown_timeout_s=float(settings.grace),
        max_surge_percent=100,  # the old one answers until the new one does
        **_HEALTH,
    )
    return ingress.bind(fixed, api_keys(), replicas.bind(fixed))


def _num_gpus(settings: RaySettings) -> float:
    if settings.num_gpus >= 0:
        return settings.num_gpus
    if settings.device == "auto":
        return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    return 1.0 if settings.device.startswith("cuda") else 0.0


def serve(settings: RaySettings) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish running requests; an error if no replica can start."""
    configure_logging(settings)
    port = free_port(settings)
    stopped = threading.Event()
    if settings.address == _LOCAL:  # a cluster without a dashboard that reports no usage
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address=_LOCAL, include_dashboard=False)
    else:
        ray.init(address=settings.address)
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())  # replaces the handler that Ray installs
    try:
        ray_serve.start(http_options={"host": settings.host, "port": port})
        try:
            ray_serve.run(build(settings), name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise ServeError(f"The model cannot be served: {error}") from None
        logger.info("Ray is at %s", ray.get_runtime_context().gcs_address)
        logger.info("holdover listens on http://%s:%d", settings.host, port)
        with contextlib.suppress(KeyboardInterrupt):
            stopped.wait()
        logger.info("finishing running requests")
        with contextlib.suppress(Exception):  # no ingress is left
            ingress = ray_serve.get_deployment_handle("Ingress", NAME)
            ingress.broadcast("close").results(timeout_s=float(settings.grace))
    finally:
        ray_serve.shutdown() if settings.address == _LOCAL else ray_serve.delete(NAME)
        ray.shutdown()
