"""The image server on many machines, as a Ray Serve application. Importing this package imports neither ray nor torch.

```
settings   what the application was told      application  what `serve run` builds
ingress    the HTTP side: the very same app   deployments  from settings to processes
replica    one worker with its device         fleet        all replicas, seen from the ingress
cache      settings and profile for all       routing      to a replica that has the prompt's embeddings
counted    the metrics of all                 launch       `holdover serve --ray`
```

`serve run holdover.serve.ray:app` takes a YAML file whose `args` are the settings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import app as app
    from .launch import serve as serve
    from .settings import RaySettings as RaySettings

_HOMES = {"app": "application", "serve": "launch", "RaySettings": "settings"}

__all__ = ["RaySettings", "app", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
