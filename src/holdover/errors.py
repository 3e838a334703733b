"""What can go wrong, and the one place that names it.

```
HoldoverError
├── ConfigError          a setting is unknown, of the wrong type or out of range   (also a ValueError)
├── ProfileError         a profile is missing, corrupted or made for another model (also a ValueError)
├── EnableError          the pipeline or transformer cannot be enabled as it is
│   └── UnsupportedModelError   a held step is not what a computed one is
│       └── UntraceableError    no cut through the blocks was found
└── NotEnabledError      the cache is not on this pipeline
HoldoverWarning          it works, but not as you would expect
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoldoverError(Exception):
    """Base of every error holdover raises on purpose."""


class ConfigError(HoldoverError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class ProfileError(HoldoverError, ValueError):
    """A profile is missing, corrupted, or was made for another model."""


class EnableError(HoldoverError):
    """The pipeline or transformer cannot be enabled as it is."""


class UnsupportedModelError(EnableError):
    """A held step does not replay a computed one; `report` says by how much, where it was measured."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class UntraceableError(UnsupportedModelError):
    """No list of blocks carries a stream that could be cut."""


class NotEnabledError(HoldoverError):
    """The cache is not enabled on this pipeline."""


class HoldoverWarning(UserWarning):
    """It works, but not as you would expect."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'mag_threshold'?"`, or nothing when no known name is near."""
    name, known = str(name), sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not near:
        near = [k for k in known if name and (name in k or k in name)][:1]
    return f" Did you mean {near[0]!r}?" if near else ""
