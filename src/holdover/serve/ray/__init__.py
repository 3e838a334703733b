"""The image server on many machines, as a Ray Serve application. Importing this package imports neither ray nor torch.

```
deployment  the processes: an ingress that answers HTTP, replicas that generate; `holdover serve --ray`
backend     all replicas, as the ingress uses them: routing, retries, the default cache
```

`serve run holdover.serve.ray:app` takes a YAML file whose `args` are the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..settings import RaySettings

if TYPE_CHECKING:
    from ray import serve as ray_serve

__all__ = ["RaySettings", "app"]


def app(args: Mapping[str, Any]) -> ray_serve.Application:
    """The application that `serve run` builds; `args` are settings, checked before anything is imported."""
    settings = RaySettings.from_args(args)
    from .deployment import build

    return build(settings)
