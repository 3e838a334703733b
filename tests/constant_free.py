"""The methods that need no constants, at settings that hold nothing and at settings that hold many steps."""

from __future__ import annotations

from typing import Any

NOTHING: dict[str, dict[str, Any]] = {
    "easy_cache": {"threshold": 0.0},
    "sea_cache": {"threshold": 0.0},
    "first_block": {"threshold": 0.0},
    "taylor_seer": {"interval": 1},
    "spectrum": {"interval": 1.0, "growth": 0.0},
}
HOLD: dict[str, dict[str, Any]] = {
    "easy_cache": {"threshold": 10.0, "warmup_steps": 2},
    "sea_cache": {"threshold": 10.0},
    "first_block": {"threshold": 10.0},
    "taylor_seer": {"interval": 3, "warmup_steps": 2},
    "spectrum": {"interval": 2.0, "warmup_steps": 2},
}
