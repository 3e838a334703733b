"""A rank that waits on the others for ever is a failure, not a test that never ends."""

from __future__ import annotations

import time

import pytest

from parallel.company import Company, LeftWaitingError


def test_a_rank_that_waits_alone_is_found_out_and_the_company_goes_on(two: Company) -> None:
    two.run("answers")
    begun = time.monotonic()
    with pytest.raises(LeftWaitingError, match=r"ranks \[0\]"):
        two.run("waits_alone", limit=2)
    assert time.monotonic() - begun < 20
    assert two.run("answers") == [0, 1]
