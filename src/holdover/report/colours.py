"""One colour a series, by name: the page's style sheet says what it is in light and in dark."""

from __future__ import annotations

from ..compare import Results, Row

_KNOWN = {
    "tea_cache": "teal",
    "mag_cache": "violet",
    "cache_dit": "amber",
    "cache_dit DBCache": "amber",
    "plan": "rose",
    "none": "grey",
}
_OTHERS = ("blue", "green", "brown", "pink", "olive")
BASELINES = {"fewer_steps": "grey", "second_order": "slate"}
NAMES = {"fewer_steps": "fewer steps", "second_order": "fewer steps, second-order solver"}
"""What baselines are called on the page."""


def series_of(row: Row) -> str:
    """What a row belongs to: its series, else its method, its own label, or the kind of baseline it is."""
    own = row.candidate.get("series") or row.candidate.get("name", row.label)
    return str(own) if row.kind in ("method", "custom") else row.kind


def colours(results: Results) -> dict[str, str]:
    """The colour of every series in the results."""
    found = dict.fromkeys(series_of(row) for row in results.rows)
    others = [name for name in found if name not in _KNOWN and name not in BASELINES]
    chosen = {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}
    return {name: (_KNOWN | BASELINES | chosen)[name] for name in found}
