"""Measure a model's magnitude ratios while it generates uncached."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date

import torch

from ..engine.state import ComputedForward
from ..profiles import MagCacheProfile, MagCacheRatios

# From two residuals to three numbers: mean ratio of the tokens' norms, its deviation, mean cosine distance.
Measure = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]


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

    def add(self, computed: ComputedForward, measure: Measure | None = None) -> None:
        """Compare a residual with the one of the step before."""
        branch = self._branches.setdefault(computed.branch, _Branch())
        self._class_name = computed.transformer.class_name
        if computed.grid.bounded:
            self._count, self._noise = computed.grid.count, computed.grid.noise
        first = computed.step == computed.grid.first or not branch.previous
        figures = NEUTRAL if first else (measure or step_figures)(computed.residual, branch.previous)
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
            means = [torch.stack([figures.cpu().double() for figures in of_step]).mean(0) for of_step in measured]
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
    """Mean ratio of the tokens' norms, its standard deviation, and the mean cosine distance of two residuals.

    As in the published code (Zehong-Ma/MagCache), but in float32 whatever the dtype of the residuals.
    """
    ratios, distances = [], []
    for now, before in zip(residual, previous, strict=True):
        now, before = now.float(), before.float()
        ratios.append((torch.linalg.norm(now, dim=-1) / (torch.linalg.norm(before, dim=-1) + 1e-8)).flatten())
        distances.append((1 - torch.cosine_similarity(now, before, dim=-1, eps=1e-8)).flatten())
    ratio, distance = torch.cat(ratios), torch.cat(distances)
    spread = ratio.std() if ratio.numel() > 1 else torch.zeros_like(ratio[0])
    return torch.stack([ratio.mean(), spread, distance.mean()])


def log_calibration(logger: logging.Logger, branches: Sequence[tuple[str, MagCacheRatios]]) -> None:
    """Log what a calibration measured of each branch; where logging is not set up, write it to stderr."""
    lines = []
    for name, branch in branches:
        figures = {"norm_ratios": branch.ratios, "norm_stds": branch.stds, "cos_dises": branch.cosine_distances}
        prefix = f"{name} " if len(branches) > 1 else ""
        lines += [f"{prefix}{kind}: {[round(value, 5) for value in values]}" for kind, values in figures.items()]
    lines.append("Copy these values to DiffusionCacheConfig(mag_ratios=...), or save them with calibration_path=.")
    for line in lines:
        if logger.hasHandlers():
            logger.info(line)
        else:
            sys.stderr.write(f"[INFO] {line}\n")
