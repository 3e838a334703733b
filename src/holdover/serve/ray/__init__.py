"""The image server on many machines, as a Ray Serve application. Importing this package imports neither ray nor torch.

```
deployment  the processes: an ingress that answers HTTP, replicas that generate; `holdover serve --ray`
backend     all replicas, as the ingress uses them: routing, retries, the default cache
```

`serve run holdover.serve.ray:app` takes a YAML file whose `args` are the settings.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..settings import RaySettings

if TYPE_CHECKING:
    from ray import serve as ray_serve

    from .deployment import serve as serve

__all__ = ["RaySettings", "app", "serve"]


def app(args: Mapping[str, Any]) -> ray_serve.Application:
    """The application that `serve run` builds; `args` are settings, checked before anything is imported."""
    settings = RaySettings.from_args(args)
    from .deployment import build

    return build(settings)


def __getattr__(name: str) -> Any:
    if name != "serve":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(".deployment", __name__).serve
