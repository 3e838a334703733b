"""Settings under which the two prompts of the cases are decided differently, each by itself."""

from __future__ import annotations

from typing import Any

APART: dict[str, dict[str, Any]] = {
    "tea_cache": {"rel_l1_thresh": 0.15},
    "cache_dit": {"residual_diff_threshold": 0.3},
}
