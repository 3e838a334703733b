"""Starting a server: in its own process, or on a thread of this one."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from ..errors import HoldoverError
from .settings import Settings, api_keys

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger(__name__)


class ServeError(HoldoverError):
    """The server could not start."""


@dataclass(frozen=True)
class RunningServer:
    """A server on a thread of this process."""

    url: str


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish running requests; an error if the model cannot be loaded."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    listener = _listen(settings)
    server, worker = _create_server(settings)
    disable_progress_bars()
    logger.info("holdover listens on %s", _url(listener))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # uvicorn raises it again when it is done
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    _check_loaded(worker)


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[RunningServer]:
    """A server for the duration of a `with` block, by default on a free port: for notebooks and tests."""
    checked = Settings.from_dict({"port": 0, "log_level": "warning"} | settings)
    listener = _listen(checked)
    server, worker = _create_server(checked)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="holdover-server", daemon=True)
    thread.start()
    try:
        worker.loading.exception()  # waits until the model is loaded or has failed
        _check_loaded(worker)
        yield RunningServer(_url(listener))
    finally:
        server.should_exit = True
        thread.join()


def _create_server(settings: Settings) -> tuple[uvicorn.Server, Worker]:
    """A server, and its worker, which ends the server if the model cannot be loaded."""
    from .app import create_app
    from .worker import Worker  # imports torch, which a server on Ray needs only in its replicas

    worker = Worker(settings)
    config = uvicorn.Config(
        create_app(settings, api_keys(), worker, behind_proxy=False),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=settings.grace,
        server_header=False,
    )
    server = uvicorn.Server(config)

    def stop_if_failed(loading: Future[None]) -> None:
        server.should_exit = server.should_exit or loading.exception() is not None

    worker.loading.add_done_callback(stop_if_failed)
    return server, worker


def disable_progress_bars() -> None:
    """Keep the progress bars of loading weights out of the server's log."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise ServeError(f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}.") from None


def free_port(settings: Settings) -> int:
    """The port to listen on, for another process; an error if it is in use."""
    with _listen(settings) as listener:
        port: int = listener.getsockname()[1]
        return port


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"


def _check_loaded(worker: Worker) -> None:
    if worker.loading.done() and (error := worker.loading.exception()) is not None:
        raise ServeError(f"The model cannot be served: {error}") from error
