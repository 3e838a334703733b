"""How much is measured: the whole, or a little of everything to see that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scale:
    """Budgets are computed steps; `beyond` are larger ones that only the peers are measured at, for the ratio."""

    prompts: int = 128
    batch: int = 64
    steps: int = 50
    budgets: tuple[int, ...] = (6, 8, 10, 12, 15, 20, 25)
    beyond: tuple[int, ...] = (32,)
    fewer_steps: int = 28
    fewer_budgets: tuple[int, ...] = (6, 8, 10, 14)
    judged: tuple[int, int] = (8, 20)
    probed: tuple[int, ...] = (10, 15)
    other_steps: tuple[tuple[int, tuple[int, ...]], ...] = ((28, (10, 15)), (20, (10, 15)))
    generations: tuple[int, ...] = (4, 8, 16)
    guidances: tuple[float, ...] = (1.5, 6.0)
    polished_on: int = 128
    trials: int = 20
    searched: int = 32
    tries: int = 8
    halvings: int = 6
    targets: tuple[str, ...] = ("psnr>=35", "psnr>=40")
    held_back: tuple[int, int] = (64, 128)
    share: float = 0.95
    confidence: float = 0.95
    noises: tuple[float, ...] = (0.02, 0.05)
    repeats: int = 3
    call: Mapping[str, Any] = field(default_factory=dict)

    @property
    def calibrated_on(self) -> int:
        """Generations that profiles are calibrated on unless something else is said."""
        return self.generations[-1]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


QUICK = Scale(
    prompts=2,
    batch=2,
    steps=8,
    budgets=(4,),
    beyond=(),
    fewer_steps=6,
    fewer_budgets=(3,),
    judged=(4, 4),
    probed=(4,),
    other_steps=((6, (3,)), (5, (3,))),
    generations=(1, 2),
    guidances=(6.0,),
    polished_on=4,
    trials=4,
    searched=1,
    tries=1,
    halvings=2,
    targets=("psnr>=20",),
    held_back=(2, 4),
    share=0.5,
    confidence=0.5,
    noises=(0.05,),
    repeats=1,
    call={"height": 32, "width": 32},
)
