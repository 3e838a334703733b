"""Where the tensors of a trajectory wait until the generation is over: on the device, in memory, or on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ..errors import ConfigError

PLACES = ("device", "cpu", "disk")


class Shelf:
    """Tensors in order, in float32; a context manager that lets go of them at the end."""

    def __init__(self, place: str) -> None:
        if place not in PLACES:
            raise ConfigError(f"Trajectories are kept on the 'device', on the 'cpu' or on 'disk', not on {place!r}.")
        self._place = place
        self._kept: list[torch.Tensor] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.first: Callable[[torch.Tensor], None] | None = None

    def __enter__(self) -> Self:
        if self._place == "disk":
            self._folder = tempfile.TemporaryDirectory(prefix="holdover-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def clear(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._kept[index]

    def put(self, tensor: torch.Tensor) -> None:
        """Keep a copy; `first` is told of the first tensor before it is kept."""
        if self.first is not None and not self._kept:
            self.first(tensor)
        copy = tensor.detach().to("cpu" if self._place != "device" else tensor.device, torch.float32, copy=True)
        self._kept.append(self._filed(copy) if self._folder is not None else copy)

    def _filed(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._folder is not None
        path = Path(self._folder.name) / f"{len(self._kept)}.npy"
        np.save(path, tensor.numpy())
        return torch.from_numpy(np.load(path, mmap_mode="c"))


def grams(shelves: Sequence[Shelf], chunk: int = 1 << 20) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Inner products of all tensors, one matrix for each entry of the batch, divided by the number of values."""
    flat = [shelf[i].flatten(1) for shelf in shelves for i in range(len(shelf))]
    batch, values = flat[0].shape
    total = torch.zeros(batch, len(flat), len(flat), dtype=torch.float64)
    for start in range(0, values, chunk):
        part = torch.stack([f[:, start : start + chunk].double() for f in flat], dim=1)
        total += (part @ part.transpose(1, 2)).cpu()
    return (total / values).numpy()
