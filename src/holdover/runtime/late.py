"""A number on its way from the device: asked for now, read when it is there, waited for by nobody."""

from __future__ import annotations

from typing import Any

import torch


class LateScalar:
    """One value of a device tensor, copied to pinned memory behind the work that makes it."""

    def __init__(self, value: torch.Tensor) -> None:
        if value.device.type == "cuda":
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(value.device))
        else:
            self._host, self._copied = value, None

    @property
    def immediate(self) -> bool:
        """Whether there is nothing to wait for, ever."""
        return self._copied is None

    @property
    def ready(self) -> bool:
        """Whether reading it now waits for nothing."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> float:
        """The value; waits for the device if it must."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host)
