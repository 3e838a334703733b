"""One thread: the models are tiny, and threads would only wait for each other."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

LONGEST = ("serve/ray", "parallel", "vllm_omni")  # they start processes of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest begin first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: not any(f"tests/{folder}/" in item.path.as_posix() for folder in LONGEST))
