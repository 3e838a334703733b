"""The HTTP side in a process of its own: the very same application, with all replicas behind it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from ..app import create_app
from .fleet import Fleet
from .settings import RaySettings


@serve.ingress()
class Ingress:
    """Takes requests in, answers them, and never loses one to a replica's end."""

    def __init__(self, settings: RaySettings, keys: Sequence[str], replicas: DeploymentHandle) -> None:
        logging.getLogger("holdover").setLevel(settings.log_level.upper())
        context = serve.get_replica_context()
        self._fleet = Fleet(settings, replicas, DeploymentHandle(context.deployment, context.app_name))
        self._app = create_app(settings, keys, self._fleet)
        self._met = False

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def reconfigure(self, cache: Mapping[str, Any]) -> None:
        """Serve calls it with the cache's settings, at the start and when they change; it must not wait then."""
        if self._met:
            self._fleet.change(cache)
        else:
            await self._fleet.meet(cache)
            self._met = True

    async def close(self) -> None:
        """Take nothing more in, and return when everything taken in is drawn."""
        await self._fleet.stop()

    async def counted(self) -> tuple[str, bytes]:
        """Its name, and what it counted for Prometheus."""
        return serve.get_replica_context().replica_tag, self._app.state.metrics.text()
