"""Schedules that are known without measuring anything: evenly spaced, growing windows, the presets of SCM."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

GROWTH = 1.6  # of a growing window: computed step k of K lies at (k / (K - 1)) ** GROWTH of the way

# The steps that cache-dit 1.5 computes of 28 under its presets.
_SCM = {
    "slow": (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 14, 15, 16, 19, 20, 23, 27),
    "medium": (0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 17, 18, 22, 23, 27),
    "fast": (0, 1, 2, 3, 4, 5, 7, 11, 16, 22, 27),
    "ultra": (0, 1, 2, 3, 6, 12, 19, 27),
}


def uniform(steps: int, count: int) -> tuple[int, ...]:
    """Evenly spaced, from the first step."""
    return _distinct([k * steps / count for k in range(count)], steps)


def growing(steps: int, count: int, growth: float = GROWTH) -> tuple[int, ...]:
    """Close together at the start and further and further apart after it, to the last step but one."""
    end = max(steps - 2, 0)
    return _distinct([end * (k / max(count - 1, 1)) ** growth for k in range(count)], steps)


def known(steps: int, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The known schedules with so many computed steps, by name."""
    yield "uniform", uniform(steps, count)
    for growth in (1.3, GROWTH, 2.0):
        yield f"growing window {growth:g}", growing(steps, count, growth)
    for name, preset in _SCM.items():
        places = np.interp(np.linspace(0, len(preset) - 1, count), range(len(preset)), preset)
        yield f"SCM {name}", _distinct([place * (steps - 1) / 27 for place in places], steps)


def _distinct(places: list[float], steps: int) -> tuple[int, ...]:
    """The steps nearest to these places, the first of them 0, moved apart where two fall together."""
    taken = [0]
    for place in places[1:]:
        taken.append(max(round(place), taken[-1] + 1))
    for back, index in enumerate(range(len(taken) - 1, -1, -1)):
        taken[index] = min(taken[index], steps - 1 - back)
    return tuple(taken)
