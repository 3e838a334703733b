"""An image server that speaks OpenAI's API and knows its cache. Importing this package imports no torch.

```
settings  what the server was told          choice   which cache a request asks for
schemas   requests and answers              model    a pipeline as the server sees it
work      pictures to draw, what they say   waiting  the bounded queue, and who is drawn together
switch    the cache on the pipeline         worker   the thread that owns the pipeline
studio    who draws, as seen from HTTP      app      the HTTP side
launch    a process, or one inside this     ray      the same with many replicas
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app as create_app
    from .launch import Running as Running
    from .launch import running as running
    from .launch import serve as serve
    from .settings import Settings as Settings

_HOMES = {
    "create_app": "app",
    "Running": "launch",
    "running": "launch",
    "serve": "launch",
    "Settings": "settings",
}

__all__ = ["Running", "Settings", "create_app", "running", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
