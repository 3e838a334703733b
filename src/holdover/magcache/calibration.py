"""Measure a model's magnitude ratios while it generates uncached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date

import torch

from ..engine.state import ComputedForward
from ..profiles import MagCacheProfile, MagCacheRatios


@dataclass
class _Branch:
    """The residual of the last step, and three numbers for each step of each generation."""

    previous: tuple[torch.Tensor, ...] = ()
    steps: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class Calibration:
    """Collects ratios, their deviations and the change of direction, by branch; reads the device only when asked."""

    def __init__(self) -> None:
        self._branches: dict[str, _Branch] = {}
        self._class_name = ""
        self._count = 0
        self._noise: tuple[float, ...] = ()

    def add(self, computed: ComputedForward) -> None:
        """Compare a residual with the one of the step before."""
        branch = self._branches.setdefault(computed.branch, _Branch())
        self._class_name = computed.transformer.class_name
        if computed.grid.bounded:
            self._count, self._noise = computed.grid.count, computed.grid.noise
        first = computed.step == computed.grid.first or not branch.previous
        figures = NEUTRAL if first else step_figures(computed.residual, branch.previous)
        branch.steps.setdefault(computed.step, []).append(figures)
        branch.previous = computed.residual

    def finish(self) -> None:
        """End a generation: its last residual is not compared with the next one's first."""
        for branch in self._branches.values():
            branch.previous = ()

    def profile(self) -> MagCacheProfile | None:
        """What was measured so far, averaged over generations; None before the first step."""
        if not self._branches:
            return None
        count = max(self._count, 1 + max(max(b.steps) for b in self._branches.values()))
        branches = []
        for name, branch in self._branches.items():
            measured = [branch.steps.get(step, [NEUTRAL]) for step in range(count)]
            means = [torch.stack([figures.cpu() for figures in of_step]).mean(0) for of_step in measured]
            ratios, stds, cosines = torch.stack(means).T.tolist()
            branches.append((name, MagCacheRatios(tuple(ratios), tuple(stds), tuple(cosines))))
        return MagCacheProfile(
            name=f"calibrated-{self._class_name}",
            model=self._class_name,
            transformer_class=self._class_name,
            num_inference_steps=count,
            branches=tuple(branches),
            noise=self._noise if len(self._noise) == count else (),
            source=(("measured", "holdover"), ("date", date.today().isoformat()), ("torch", torch.__version__)),
        )


NEUTRAL = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)


def step_figures(residual: Sequence[torch.Tensor], previous: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean ratio of the tokens' norms, its standard deviation, and one minus the mean cosine."""
    ratios, cosines = [], []
    for now, before in zip(residual, previous, strict=True):
        a, b = now.float().flatten(0, -2), before.float().flatten(0, -2)
        ratios.append(a.norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-8))
        cosines.append(torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=1e-8))
    ratio, cosine = torch.cat(ratios).double(), torch.cat(cosines).double()
    return torch.stack([ratio.mean(), ratio.std(correction=0), 1.0 - cosine.mean()])
