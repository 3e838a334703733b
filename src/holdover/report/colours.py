"""One colour a series, by name: the page's style sheet says what it is in light and in dark."""

from __future__ import annotations

from ..compare import Results, Row

_KNOWN = {"tea_cache": "teal", "mag_cache": "violet", "cache_dit": "amber", "plan": "rose", "none": "grey"}
_OTHERS = ("blue", "green", "brown", "pink")
BASELINES = {"fewer_steps": "grey", "second_order": "slate"}


def series_of(row: Row) -> str:
    """What a row belongs to: its method, its own label, or the kind of baseline it is."""
    return str(row.candidate.get("name", row.label)) if row.kind in ("method", "custom") else row.kind


def colours(results: Results) -> dict[str, str]:
    """The colour of every series in the results."""
    found = dict.fromkeys(series_of(row) for row in results.rows)
    others = [name for name in found if name not in _KNOWN and name not in BASELINES]
    chosen = {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}
    return {name: (_KNOWN | BASELINES | chosen)[name] for name in found}
