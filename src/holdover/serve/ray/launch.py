"""`holdover serve --ray`: a cluster of this machine, or one that is there, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading

import ray
from ray import serve as ray_serve

from ..launch import ServeError, free_port
from .deployments import NAME, built
from .settings import RaySettings

logger = logging.getLogger(__name__)

LOCAL = "local"


def serve(settings: RaySettings) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what runs; an error where no replica can start."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    port = free_port(settings)
    stopped = threading.Event()
    _connect(settings)
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())  # after Ray, which has a way of its own
    try:
        ray_serve.start(http_options={"host": settings.host, "port": port})
        _run(settings)
        logger.info("Ray is at %s", ray.get_runtime_context().gcs_address)
        logger.info("holdover listens on http://%s:%d", settings.host, port)
        with contextlib.suppress(KeyboardInterrupt):
            stopped.wait()
        _finish(settings)
    finally:
        ray_serve.shutdown() if settings.address == LOCAL else ray_serve.delete(NAME)
        ray.shutdown()


def _connect(settings: RaySettings) -> None:
    """Join a cluster, or start one that asks nobody and tells nobody."""
    if settings.address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address=LOCAL, include_dashboard=False)
    else:
        ray.init(address=settings.address)


def _run(settings: RaySettings) -> None:
    try:
        ray_serve.run(built(settings), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ServeError(f"The model cannot be served: {error}") from None


def _finish(settings: RaySettings) -> None:
    """What was taken in is drawn; nothing more is taken in."""
    logger.info("finishing what runs")
    with contextlib.suppress(Exception):  # no ingress is left to ask
        ray_serve.get_deployment_handle("Ingress", NAME).broadcast("close").results(timeout_s=float(settings.grace))
