"""An image and video server with OpenAI's API and a cache per request. Importing this package imports no torch.

One request: `schemas.ImageRequest` -> `validation` -> `queue.QueueItem` with a future -> `worker` -> response.

```
app          paths and responses              middleware   around every request: access, limits, metrics, the log
schemas      requests and responses           validation   what a request may ask for: documented and checked
images       image files and forms            errors       errors in the shape of OpenAI's API
videos       video files, records and jobs
queue        items with futures, batches      worker       the thread that owns the pipeline and its cache
model        the pipeline, previews           metrics      Prometheus
connections  slow and too many clients        launch       starting a server, and its log
settings     every flag of the server         ray          the same server with replicas on many machines
tensor_parallel  one model over several processes
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .launch import RunningServer, running, serve
    from .settings import Settings

__all__ = ["RunningServer", "Settings", "create_app", "running", "serve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"create_app": "app", "Settings": "settings"}.get(name, "launch")
    return getattr(importlib.import_module(f".{module}", __name__), name)
