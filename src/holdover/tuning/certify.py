"""What a trial on held-back prompts proves: fixed-sequence testing with exact binomial p-values.

Candidates are ordered from slow to fast before the held-back prompts are looked at. Each is tested for "more than
`1 - share` of pictures miss the target"; the first that cannot be refuted ends the sequence, so the chance that any
certified candidate is not what it is said to be is at most `1 - confidence`, without a correction for their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import comb
from typing import TypeVar

T = TypeVar("T")


def p_value(below: int, tried: int, share: float) -> float:
    """The chance of so few pictures below the target, or fewer, if a part of `1 - share` of all were below it."""
    miss = 1.0 - share
    return sum(comb(tried, k) * miss**k * share ** (tried - k) for k in range(below + 1))


def allowed(tried: int, share: float, confidence: float) -> int | None:
    """How many pictures may be below the target for a certificate; None where so few prompts prove nothing."""
    fitting = [k for k in range(tried + 1) if p_value(k, tried, share) <= 1.0 - confidence]
    return max(fitting, default=None)


def fewest(share: float, confidence: float) -> int:
    """The number of prompts below which nothing can be certified."""
    tried = 1
    while allowed(tried, share, confidence) is None:
        tried += 1
    return tried


def fastest(candidates: Iterable[T], passes: Callable[[T], bool]) -> T | None:
    """The last candidate, from slow to fast, before the first that does not pass."""
    best = None
    for candidate in candidates:
        if not passes(candidate):
            break
        best = candidate
    return best
