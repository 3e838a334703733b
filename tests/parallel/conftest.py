"""Two processes, and four, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.company import Company


@pytest.fixture(scope="session")
def two() -> Iterator[Company]:
    company = Company(2)
    yield company
    company.end()


@pytest.fixture(scope="session")
def four() -> Iterator[Company]:
    company = Company(4)
    yield company
    company.end()
