"""The bounded queue: the oldest picture is next, and those that fit are drawn with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .errors import queue_full, unavailable
from .work import Job, Ticket


class Room:
    """How many pictures may wait, and how long those who are turned away should stay away."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pace = 1.0  # seconds a picture took lately

    def admit(self, more: int, waiting: int) -> None:
        """An error where `more` are too many beside those that wait."""
        if waiting + more > self._size:
            raise queue_full(waiting, max(1, round(self._pace * waiting)))

    def took(self, seconds: float) -> None:
        """A picture took that long: what those who are turned away are told to wait follows it."""
        self._pace += 0.3 * (seconds - self._pace)


class Waiting:
    """Pictures that wait for one worker."""

    def __init__(self, size: int, max_batch: int, max_wait: float) -> None:
        self.room, self._max_batch, self._max_wait = Room(size), max_batch, max_wait
        self._tickets: list[Ticket] = []
        self._changed = threading.Condition()
        self._closed = self._woken = False

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Let all of them wait, or turn all of them away."""
        with self._changed:
            if self._closed:
                raise unavailable("The server is shutting down.", "shutting_down")
            self._forget_cancelled()
            self.room.admit(len(tickets), len(self._tickets))
            self._tickets.extend(tickets)
            self._changed.notify_all()

    def take(self) -> list[Ticket] | None:
        """The next pictures to draw together, none of them after `wake`; None when the queue is closed and empty."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._tickets or self._closed or self._woken)
                self._forget_cancelled()
                if self._woken:
                    self._woken = False
                    return []
                if self._tickets:
                    break
                if self._closed:
                    return None
            job = self._tickets[0].job
            self._wait_for_company(job)
            batch = self._fitting(job)
            taken = set(map(id, batch))
            self._tickets = [ticket for ticket in self._tickets if id(ticket) not in taken]
            return batch

    def close(self) -> None:
        """Nothing more is taken in; what waits is still drawn."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Let the worker look up between two batches, or from an empty queue."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _fitting(self, job: Job) -> list[Ticket]:
        limit = self._max_batch if job.choice.scheduled else 1
        return [ticket for ticket in self._tickets if ticket.job == job][:limit]

    def _wait_for_company(self, job: Job) -> None:
        """Wait until the batch is full or its oldest picture has waited long enough."""
        if not job.choice.scheduled:
            return
        until = self._tickets[0].submitted + self._max_wait
        self._changed.wait_for(
            lambda: self._closed or len(self._fitting(job)) >= self._max_batch, max(until - time.monotonic(), 0.0)
        )

    def _forget_cancelled(self) -> None:
        self._tickets = [ticket for ticket in self._tickets if not ticket.cancelled]
