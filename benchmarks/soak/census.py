"""What is alive in this process."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_REAL = (torch.Tensor, torch.nn.Parameter)  # not the symbolic ones a compiler leaves behind
_MARK = "_holdover_adopted"  # on the private classes that an enabled cache gives to instances


@dataclass(frozen=True)
class Census:
    """Memory and live objects after a collection."""

    index: int
    rss_mb: float
    tensors: int
    tensor_mb: float
    holdover_objects: int
    statistics: int  # of the last generations of caches that stay on: as many as those had steps
    private_classes: int
    objects: int


def count(index: int) -> Census:
    """Collect, then count."""
    gc.collect()
    alive = gc.get_objects()
    modules = [str(type(o).__module__) for o in alive]
    tensors = [o for o in alive if type(o) in _REAL and not o.is_meta]
    return Census(
        index,
        round(resident() / 1e6, 1),
        len(tensors),
        round(sum(t.nbytes for t in tensors) / 1e6, 3),
        sum(module.startswith("holdover.") and module != "holdover.stats" for module in modules),
        modules.count("holdover.stats"),
        sum(issubclass(type(o), type) and _MARK in vars(o) for o in alive),
        len(alive),
    )


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
