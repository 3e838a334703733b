"""The exceptions and warnings that holdover raises.

```
HoldoverError
├── ConfigError          a setting is unknown, has the wrong type or is out of range (also a ValueError)
├── ProfileError         a profile is missing, corrupted or made for another model  (also a ValueError)
├── EnableError          the cache cannot be enabled on this pipeline or transformer
│   └── UnsupportedModelError   a held step does not reproduce a computed one
│       └── UntraceableError    the transformer blocks were not found by tracing
├── NotEnabledError      the cache is not on this pipeline
└── WriteError           a file cannot be written: the disk is full, or the folder does not allow it
HoldoverWarning          something works, but perhaps not as expected
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoldoverError(Exception):
    """Base class of all errors that holdover raises."""


class ConfigError(HoldoverError, ValueError):
    """A setting is unknown, has the wrong type or is out of range."""


class ProfileError(HoldoverError, ValueError):
    """A profile is missing, corrupted or made for another model."""


class EnableError(HoldoverError):
    """The cache cannot be enabled on this pipeline or transformer."""


class UnsupportedModelError(EnableError):
    """A held step does not reproduce a computed one; `report` has the measured differences, if there are any."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class UntraceableError(UnsupportedModelError):
    """Tracing found no list of transformer blocks that passes a stream from block to block."""


class NotEnabledError(HoldoverError):
    """The cache is not enabled on this pipeline."""


class WriteError(HoldoverError):
    """A file cannot be written; nothing of it is left."""


class HoldoverWarning(UserWarning):
    """Something works, but perhaps not as expected."""


# For errors of methods whose constants are missing.
WITHOUT_CONSTANTS = "easy_cache, sea_cache, spectrum, first_block and taylor_seer need no constants."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'mag_threshold'?"`, or an empty string if no known name is similar."""
    name, known = str(name), sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not near and len(name) > 2:  # a part of a longer name
        near = [k for k in known if name in k][:1]
    return f" Did you mean {near[0]!r}?" if near else ""
