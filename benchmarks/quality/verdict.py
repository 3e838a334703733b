"""What the figures say: how far plans are ahead, and how many steps others need for the same. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from .scale import Scale

PLAN = "plan, guard off"  # the row that counts: it computes exactly what was asked for
POLISHED = "plan, polished"
FIGURES = ("mean", "p10")
_CAP = 100.0
Point = tuple[float, float]


def rows_of(figures: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """The rows of the main table for a number of steps."""
    parts = [part for name, part in figures["parts"].items() if name.endswith(f", of {steps}")]
    return [row for part in parts for row in part.get("rows", ()) if row["steps"] == steps]


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is one of the planned cache."""
    return str(row["method"]).startswith("plan")


def verdict(figures: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """For each budget the lead of a plan over the best other row that computes no more, and the ratio of steps."""
    found = {}
    for steps, budgets in ((scale.steps, scale.budgets), (scale.fewer_steps, scale.fewer_budgets)):
        rows = rows_of(figures, steps)
        others = [row for row in rows if not ours(row)]
        found[f"{steps} steps"] = {
            title: [_judged(row, others) for row in rows if row["method"] == title and row["wanted"] in budgets]
            for title in (PLAN, POLISHED)
        }
    return found | {"in_short": _in_short(found[f"{scale.steps} steps"], scale.judged)}


def _judged(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"wanted": row["wanted"], "computed": row["computed"]}
    for figure in FIGURES:
        own = _value(row, figure)
        rival = best(others, row["computed"], figure)
        later = best(others, row["computed"] + 1, figure)
        entry[figure] = {
            "psnr": own,
            "best_other": None if rival is None else {"method": rival["method"], "psnr": _value(rival, figure)},
            "lead": None if rival is None else round(own - _value(rival, figure), 2),
            "lead_if_others_compute_one_more": None if later is None else round(own - _value(later, figure), 2),
            **_ratio(row["computed"], own, frontier(others, figure)),
        }
    return entry


def best(rows: Iterable[dict[str, Any]], most: float, figure: str) -> dict[str, Any] | None:
    """The row nearest to the uncached pictures of those that compute no more than `most` steps."""
    return max((r for r in rows if r["computed"] <= most), key=lambda r: _value(r, figure), default=None)


def frontier(rows: Iterable[dict[str, Any]], figure: str) -> list[Point]:
    """Computed steps and PSNR of the rows that no other beats with as many steps or fewer."""
    found: list[Point] = []
    for computed, value in sorted(((float(row["computed"]), _value(row, figure)) for row in rows), key=_best_first):
        if not found or value > found[-1][1]:
            found.append((computed, value))
    return found


def _best_first(point: Point) -> Point:
    return point[0], -point[1]


def _ratio(computed: float, psnr: float, others: Sequence[Point]) -> dict[str, Any]:
    """How many times as many steps the others compute for the same; a bound where none measured gets there."""
    if not others:
        return {}
    if psnr > others[-1][1]:
        return {"ratio": round(others[-1][0] / computed, 2), "ratio_is_at_least": True}
    if psnr <= others[0][1]:
        return {"ratio": round(others[0][0] / computed, 2), "ratio_is_at_least": False}
    (k0, q0), (k1, q1) = next(pair for pair in pairwise(others) if pair[1][1] >= psnr)
    return {"ratio": round((k0 + (psnr - q0) / (q1 - q0) * (k1 - k0)) / computed, 2), "ratio_is_at_least": False}


def _in_short(found: dict[str, list[dict[str, Any]]], between: tuple[int, int]) -> dict[str, Any]:
    """The least lead and the least ratio of each kind of plan over the budgets that are judged."""
    judged = {title: [e for e in rows if between[0] <= e["wanted"] <= between[1]] for title, rows in found.items()}
    least = {title: {figure: _least(rows, figure) for figure in FIGURES} for title, rows in judged.items()}
    return {"between": list(between), **least}


def _least(entries: Sequence[dict[str, Any]], figure: str) -> dict[str, float | None]:
    leads = [e[figure]["lead"] for e in entries if e[figure]["lead"] is not None]
    ratios = [e[figure]["ratio"] for e in entries if "ratio" in e[figure]]
    return {"least_lead": min(leads, default=None), "least_ratio": min(ratios, default=None)}


def _value(row: dict[str, Any], figure: str) -> float:
    value = row["psnr"][figure]
    return _CAP if value is None else float(value)
