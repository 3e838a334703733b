"""An image server with OpenAI's API and a cache per request. Importing this package imports no torch.

One request: `schemas.ImageRequest` -> `validation` -> `queue.QueueItem` with a future -> `worker` -> response.

```
app         paths and responses              middleware  request id, API key, limits, metrics
schemas     requests and responses           errors      errors in the shape of OpenAI's API
validation  from a request to images         openapi     the OpenAPI document, methods and settings
queue       items with futures, batches      worker      the thread that owns the pipeline
model       the pipeline, previews           metrics     Prometheus
settings    every flag of the server         launch      starting a server
ray         the same server with replicas on many machines
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app as create_app
    from .launch import RunningServer as RunningServer
    from .launch import running as running
    from .launch import serve as serve
    from .settings import Settings as Settings

_HOMES = {
    "create_app": "app",
    "RunningServer": "launch",
    "running": "launch",
    "serve": "launch",
    "Settings": "settings",
}

__all__ = ["RunningServer", "Settings", "create_app", "running", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
