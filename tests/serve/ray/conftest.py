"""The environment of every Ray cluster in these tests."""

from __future__ import annotations

BUSY_MACHINE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
}
"""Ray's own time limits, raised: on a busy machine it is slow to start a proxy."""
