"""Groups of two and of four worker processes, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.workers import WorkerGroup


@pytest.fixture(scope="session")
def two() -> Iterator[WorkerGroup]:
    group = WorkerGroup(2)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[WorkerGroup]:
    group = WorkerGroup(4)
    yield group
    group.stop()
