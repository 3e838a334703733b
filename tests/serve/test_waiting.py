"""Who is drawn next, and with whom."""

from __future__ import annotations

import threading
import time

import pytest

from holdover.serve.choice import choice
from holdover.serve.errors import ApiError
from holdover.serve.waiting import Waiting
from holdover.serve.work import Event, Job, Order, Ticket, steps_to_show

MAG, TEA = choice("mag_cache", {}), choice("tea_cache", {})
NOW = Job((64, 64), 4, (), False, MAG)
OTHER = Job((64, 64), 5, (), False, MAG)


def nobody(event: Event) -> None:
    raise AssertionError(f"nothing was drawn, yet {event} was delivered")


def ticket(job: Job = NOW) -> Ticket:
    return Ticket(Order(job, "ghost", None, 1), nobody)


def queue(size: int = 8, max_batch: int = 3, max_wait: float = 0.0) -> Waiting:
    return Waiting(size, max_batch, max_wait)


def test_the_oldest_is_next_and_takes_along_what_fits() -> None:
    waiting, (a, b, c, d) = queue(), (ticket(NOW), ticket(OTHER), ticket(NOW), ticket(OTHER))
    waiting.put([a, b, c, d])
    assert waiting.take() == [a, c]
    assert waiting.take() == [b, d]
    assert len(waiting) == 0


def test_a_batch_is_no_larger_than_allowed() -> None:
    waiting, tickets = queue(max_batch=2), [ticket() for _ in range(5)]
    waiting.put(tickets)
    assert [waiting.take(), waiting.take(), waiting.take()] == [tickets[:2], tickets[2:4], tickets[4:]]


@pytest.mark.parametrize(
    ("chosen", "together"),
    [
        (choice("none", {}), True),
        (MAG, True),
        (TEA, False),
        (choice("cache_dit", {}), False),
        (choice("plan", {"guard": False}), True),
        (choice("plan", {"guard": True}), False),
    ],
)
def test_only_methods_that_do_not_look_at_the_data_draw_together(chosen: object, together: bool) -> None:
    waiting, job = queue(), Job((64, 64), 4, (), False, chosen)  # type: ignore[arg-type]
    waiting.put([ticket(job), ticket(job)])
    assert len(waiting.take() or ()) == (2 if together else 1)


def test_a_picture_waits_for_company_but_not_for_ever() -> None:
    waiting, first, second = queue(max_batch=2, max_wait=5.0), ticket(), ticket()
    waiting.put([first])
    threading.Timer(0.05, waiting.put, [[second]]).start()
    begin = time.monotonic()
    assert waiting.take() == [first, second]
    assert time.monotonic() - begin < 4
    alone = queue(max_batch=2, max_wait=0.05)
    alone.put([ticket()])
    assert len(alone.take()) == 1


def test_a_full_queue_turns_away_all_or_nothing() -> None:
    waiting = queue(size=3)
    waiting.put([ticket(), ticket()])
    with pytest.raises(ApiError, match="2 pictures wait already") as refused:
        waiting.put([ticket(), ticket()])
    assert refused.value.status_code == 429
    assert int((refused.value.headers or {})["Retry-After"]) == 2
    assert len(waiting) == 2
    waiting.room.took(11.0)
    with pytest.raises(ApiError) as slower:
        waiting.put([ticket(), ticket()])
    assert int((slower.value.headers or {})["Retry-After"]) == 8  # two pictures of 4 s, halfway to what was seen last


def test_who_has_gone_is_not_drawn_and_makes_room() -> None:
    waiting, gone, here = queue(size=2), ticket(), ticket()
    waiting.put([gone, here])
    gone.cancel()
    waiting.put([later := ticket()])
    assert waiting.take() == [here, later]


def test_a_closed_queue_takes_nothing_more_and_is_emptied() -> None:
    waiting, last = queue(), ticket()
    waiting.put([last])
    waiting.close()
    with pytest.raises(ApiError, match="shutting down") as refused:
        waiting.put([ticket()])
    assert refused.value.status_code == 503
    assert waiting.take() == [last]
    assert waiting.take() is None


def test_a_worker_that_is_woken_looks_up_before_the_next_batch() -> None:
    waiting, next_ = queue(), ticket()
    waiting.put([next_])
    waiting.wake()
    assert [waiting.take(), waiting.take()] == [[], [next_]]
    waker = threading.Timer(0.05, waiting.wake)
    waker.start()
    assert waiting.take() == []


@pytest.mark.parametrize(
    ("count", "steps", "after"),
    [(0, 10, []), (1, 10, [5]), (3, 8, [2, 4, 6]), (9, 10, list(range(1, 10))), (50, 4, [1, 2, 3]), (5, 1, [])],
)
def test_unfinished_pictures_are_spread_over_the_steps(count: int, steps: int, after: list[int]) -> None:
    assert sorted(steps_to_show(count, steps)) == after
