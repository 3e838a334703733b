"""A server as a process of its own, or on a thread of this one."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from ..errors import HoldoverError
from .app import create_app
from .settings import Settings, api_keys
from .worker import Worker

logger = logging.getLogger(__name__)


class ServeError(HoldoverError):
    """The server could not start."""


@dataclass(frozen=True)
class Running:
    """A server on a thread of this process."""

    url: str
    worker: Worker


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what runs; an error where the model cannot be loaded."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    listening = _listen(settings)
    server = _server(settings)
    logger.info("holdover listens on %s", _url(listening))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # uvicorn raises it again when it is done
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    _raise_failure(server)


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[Running]:
    """A server for the length of a block, on a free port unless told: for notebooks and tests."""
    told = Settings.from_dict({"port": 0, "log_level": "warning"} | settings)
    listening = _listen(told)
    server = _server(told)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="holdover-server", daemon=True)
    thread.start()
    try:
        yield Running(_url(listening), _wait_until_ready(server))
    finally:
        server.should_exit = True
        thread.join()


def _server(settings: Settings) -> uvicorn.Server:
    app = create_app(settings, api_keys())
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=settings.grace,
        server_header=False,
    )
    server = uvicorn.Server(config)
    worker = _worker(server)

    def end() -> None:
        server.should_exit = True

    worker.on_failure = end
    return server


def _worker(server: uvicorn.Server) -> Worker:
    app: Any = server.config.app
    worker: Worker = app.state.studio
    return worker


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise ServeError(f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}.") from None


def free_port(settings: Settings) -> int:
    """The port to listen on, for somebody else to do so; an error where it is taken."""
    with _listen(settings) as listening:
        port: int = listening.getsockname()[1]
        return port


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{host}:{port}"


def _wait_until_ready(server: uvicorn.Server) -> Worker:
    worker = _worker(server)
    while True:
        _raise_failure(server)
        with contextlib.suppress(Exception):
            worker.loaded()
            return worker
        time.sleep(0.05)


def _raise_failure(server: uvicorn.Server) -> None:
    failure = _worker(server).failure
    if failure is not None:
        raise ServeError(f"The model cannot be served: {failure}") from failure
