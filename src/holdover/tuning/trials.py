"""Plans tried on the model itself, against the uncached pictures of the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..calibration.calls import Caller, batches
from ..calibration.prompts import Prompt
from ..calibration.shelf import Shelf
from ..errors import HoldoverError
from ..metrics import each, psnr, ssim
from ..plan import PlanBackend, PlanConfig
from ..profiles import Profile

_MEASURES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"psnr": psnr, "ssim": ssim}


def _silent() -> None:
    """Nobody wants to know."""


def _never(values: list[float]) -> bool:
    """All pictures are drawn."""
    return False


class Trials:
    """Prompts with their uncached pictures; a context manager that lets go of the pictures."""

    def __init__(self, caller: Caller, prompts: Sequence[Prompt], seed: int = 0, batch_size: int = 1) -> None:
        self._caller = caller
        self.parts = list(batches(prompts, batch_size, seed))
        self._stack = ExitStack()
        self._pictures = self._stack.enter_context(Shelf("cpu"))

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def runs(self) -> int:
        """How many calls of the pipeline one trial takes."""
        return len(self.parts)

    def reference(self, done: Callable[[], Any] = _silent) -> None:
        """Generate the uncached pictures."""
        for prompts, seeds in self.parts:
            pictures = self._caller(prompts, seeds)
            if pictures is None:
                raise HoldoverError(f"{type(self._caller.pipe).__name__} gives no pictures to compare.")
            self._pictures.put(pictures)
            done()

    def values(self, profile: Profile, metric: str, computed: tuple[int, ...]) -> list[float]:
        """The quality of each picture under a schedule."""
        return self.tried(profile, metric, computed)[0]

    def tried(
        self,
        profile: Profile,
        metric: str,
        computed: tuple[int, ...],
        done: Callable[[], Any] = _silent,
        enough: Callable[[list[float]], bool] = _never,
    ) -> tuple[list[float], str]:
        """The quality of each picture, and which plan it was; stops early once `enough` of them tell."""
        backend = PlanBackend(PlanConfig(profile=profile, schedule=computed, guard=False))
        backend.enable(self._caller.pipe)
        found: list[float] = []
        try:
            for index, (prompts, seeds) in enumerate(self.parts):
                pictures = self._caller(prompts, seeds)
                assert pictures is not None
                found += each(_MEASURES[metric], pictures.cpu(), self._pictures[index]).tolist()
                done()
                if enough(found):
                    break
            return found, backend.plan_digest()
        finally:
            backend.disable()
