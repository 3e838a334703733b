"""Starting a server: in its own process, or on a thread of this one; and its log."""

from __future__ import annotations

import contextlib
import datetime
import json
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
from .connections import ServerConfig
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
    listener = _listen(settings)
    configure_logging(settings)
    server, worker = _create_server(settings)
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
    server = uvicorn.Server(ServerConfig(create_app(settings, api_keys(), worker, behind_proxy=False), settings))

    def stop_if_failed(loading: Future[None]) -> None:
        server.should_exit = server.should_exit or loading.exception() is not None

    worker.loading.add_done_callback(stop_if_failed)
    return server, worker


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
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _check_loaded(worker: Worker) -> None:
    if worker.loading.done() and (error := worker.loading.exception()) is not None:
        raise ServeError(f"The model cannot be served: {error}") from error


# The log


class TextFormatter(logging.Formatter):
    """`2026-11-16T15:23:58.123Z INFO holdover.serve.requests: ...`"""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_timestamp(record)} {record.levelname} {record.name}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object on one line; a record of a request has its fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": _timestamp(record), "level": record.levelname.lower(), "logger": record.name}
        entry |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logging(settings: Settings, name: str | None = None) -> None:
    """Log to stderr in the format of the settings, for all loggers or those below `name`.

    Progress bars of loading weights stay out of the log, and so do warnings about prompts that are too long: they
    contain the prompt.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    target = logging.getLogger(name)
    target.addHandler(handler)
    target.propagate = False
    target.setLevel(settings.log_level.upper())
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        if not settings.log_prompts:
            library.set_verbosity_error()
    if not settings.log_prompts:
        logging.getLogger("holdover.zoo").setLevel(logging.ERROR)
