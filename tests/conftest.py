"""Settings of the whole suite: one thread, no time limits in hypothesis, and the longest tests first."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # the models are tiny, and threads would only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine is no failure

LONGEST = ("serve/ray", "parallel", "vllm_omni")  # they start processes of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: not any(f"tests/{folder}/" in item.path.as_posix() for folder in LONGEST))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through the imported modules again and again, which takes longest."""
    gc.collect()
    gc.freeze()
