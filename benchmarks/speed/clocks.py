"""What the card ran at: its clock, its power, and whether the power limit held it back, as nvidia-smi has them."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "clocks_event_reasons.active")
POWER_LIMIT = 0x4  # of the reasons why clocks are not at their highest


def clocks() -> dict[str, Any] | None:
    """Of the card torch runs on, asked right after a run; None where there is nobody to ask."""
    card = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", card]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return parsed(asked.stdout)


def parsed(line: str) -> dict[str, Any] | None:
    """One line of nvidia-smi; None where a card does not tell."""
    try:
        clock, highest, power, reasons = (field.strip() for field in line.strip().split(","))
        limited = bool(int(reasons, 16) & POWER_LIMIT)
        return {"sm_mhz": int(clock), "max_sm_mhz": int(highest), "power_w": float(power), "power_limited": limited}
    except ValueError:
        return None
