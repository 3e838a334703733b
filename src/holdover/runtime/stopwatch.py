"""Time one forward without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """Times one forward without waiting for the device: events on CUDA, the host clock elsewhere."""

    def __init__(self, device: torch.device | None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._begin = self._now()

    def stop(self) -> Callable[[], float]:
        """End the measurement; the seconds are read later, when someone asks."""
        begin, end = self._begin, self._now()
        if not self._cuda:
            seconds = end - begin
            return lambda: seconds

        def elapsed() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return elapsed

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
