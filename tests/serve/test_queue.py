"""The queue: which images are next, and which of them share a batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdover.config import Config
from holdover.selector import own_config
from holdover.serve.errors import ApiError
from holdover.serve.queue import BatchQueue, ImageSpec, QueueItem

MAG = own_config("mag_cache", {})
PATIENCE = 120.0


def item(steps: int = 4, cache: Config = MAG) -> QueueItem:
    return QueueItem(ImageSpec("ghost", None, 1, (64, 64), (64, 64), steps, (), cache))


def new_queue(size: int = 8, max_batch: int = 3, max_wait: float = 0.0) -> BatchQueue:
    return BatchQueue(size, max_batch, max_wait)


def test_the_oldest_is_next_with_those_of_the_same_batch_key() -> None:
    queue, (a, b, c, d) = new_queue(), (item(4), item(5), item(4), item(5))
    queue.put([a, b, c, d])
    assert queue.take() == [a, c]
    assert queue.take() == [b, d]
    assert len(queue) == 0


def test_a_batch_is_no_larger_than_allowed() -> None:
    queue, items = new_queue(max_batch=2), [item() for _ in range(5)]
    queue.put(items)
    assert [queue.take(), queue.take(), queue.take()] == [items[:2], items[2:4], items[4:]]


@pytest.mark.parametrize(
    ("cache", "batched"),
    [
        (own_config("none", {}), True),
        (MAG, True),
        (own_config("tea_cache", {}), False),
        (own_config("cache_dit", {}), False),
        (own_config("plan", {}), True),
    ],
)
def test_only_methods_that_do_not_look_at_the_data_share_a_batch(cache: Config, batched: bool) -> None:
    queue = new_queue()
    queue.put([item(cache=cache), item(cache=cache)])
    assert len(queue.take() or ()) == (2 if batched else 1)


def test_an_image_waits_for_others_until_the_batch_is_full_or_its_time_is_over() -> None:
    queue, first, second = new_queue(max_batch=2, max_wait=100 * PATIENCE), item(), item()
    queue.put([first])
    threading.Timer(0.05, queue.put, [[second]]).start()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(queue.take)
        try:
            assert taken.result(PATIENCE) == [first, second]
        finally:
            queue.close()  # otherwise a failure would wait for the thread
    alone = new_queue(max_batch=2, max_wait=0.05)
    alone.put([item()])
    assert len(alone.take() or ()) == 1


def test_a_full_queue_rejects_all_items_or_none() -> None:
    queue = new_queue(size=3)
    queue.put([item(), item()])
    with pytest.raises(ApiError, match="The queue is full with 2 images") as refused:
        queue.put([item(), item()])
    assert refused.value.status_code == 429
    assert int((refused.value.headers or {})["Retry-After"]) == 2
    assert len(queue) == 2
    queue.admission.record(11.0)
    with pytest.raises(ApiError) as slower:
        queue.put([item(), item()])
    assert int((slower.value.headers or {})["Retry-After"]) == 8  # two images of 4 s each, by the moving average


def test_a_cancelled_item_is_removed_and_makes_room() -> None:
    queue, gone, here = new_queue(size=2), item(), item()
    queue.put([gone, here])
    gone.future.cancel()
    queue.put([later := item()])
    assert queue.take() == [here, later]


def test_a_closed_queue_accepts_nothing_and_is_emptied() -> None:
    queue, last = new_queue(), item()
    queue.put([last])
    queue.close()
    with pytest.raises(ApiError, match="shutting down") as refused:
        queue.put([item()])
    assert refused.value.status_code == 503
    assert queue.take() == [last]
    assert queue.take() is None


def test_wake_interrupts_before_the_next_batch() -> None:
    queue, next_ = new_queue(), item()
    queue.put([next_])
    queue.wake()
    assert [queue.take(), queue.take()] == [[], [next_]]
    waker = threading.Timer(0.05, queue.wake)
    waker.start()
    assert queue.take() == []
