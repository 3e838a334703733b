"""One replica: the server's worker with its device, drawing what the ingress sends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from diffusers.utils import logging as diffusers_logging
from ray import serve
from transformers.utils import logging as transformers_logging

from ...errors import HoldoverError
from ..choice import Choice
from ..model import Facts
from ..studio import Report
from ..work import Event, Failed, Finished, Order, Ticket
from ..worker import Worker
from .cache import Shared, chosen, packed, unpacked
from .settings import RaySettings

logger = logging.getLogger(__name__)


class BrokenError(HoldoverError):
    """This replica draws no more; another should take its place."""


class Replica:
    """A worker that other processes can call."""

    def __init__(self, settings: RaySettings) -> None:
        logging.getLogger("holdover").setLevel(settings.log_level.upper())
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        self._settings = settings
        self._worker: Worker | None = None
        self._change: asyncio.Task[str | None] | None = None

    async def reconfigure(self, cache: Mapping[str, Any]) -> None:
        """Serve calls it with the cache's settings, at the start and when they change.

        A cache that the model refuses keeps a replica from starting. One that runs stays as it is, because Serve would
        end it; and it changes after this has returned, because Serve sends nothing to a replica until then.
        """
        if self._worker is None:
            worker = Worker(self._settings.of_a_replica(unpacked(packed(cache))))
            await worker.start()
            await worker.settled()
            self._worker = worker
        else:
            self._change = asyncio.create_task(self.stand(cache))

    async def check_health(self) -> None:
        """Serve calls it now and then, and replaces a replica that raises."""
        if self._worker is not None and not self._worker.sound:
            raise BrokenError("The worker of this replica has ended, or its device fails at every picture.")

    async def stand(self, cache: Mapping[str, Any]) -> str | None:
        """Stand with this cache from the next batch on; what the model says against it, if it does."""
        try:
            await self._drawing.stand(chosen(packed(cache)))
        except HoldoverError as error:
            logger.error("the cache stays as it is: %s", error)
            return str(error)
        return None

    async def introduced(self) -> tuple[Facts, bool]:
        """The model, and whether prompts are remembered."""
        facts, _ = self._drawing.loaded()
        return facts, self._drawing.prompt_cache is not None

    async def draw(
        self, orders: Sequence[Order], waited: float, profile: Shared | None
    ) -> AsyncIterator[tuple[int, Event]]:
        """Draw the pictures of one request: what happens to each, by its index. They have waited so long already."""
        if profile is not None:
            profile.written()
        inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop, submitted = asyncio.get_running_loop(), time.monotonic() - waited

        def ticket(index: int) -> Ticket:
            def deliver(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                    loop.call_soon_threadsafe(inbox.put_nowait, (index, event))

            return Ticket(orders[index], deliver, submitted)

        tickets = [ticket(index) for index in range(len(orders))]
        self._drawing.put(tickets)
        left = len(tickets)
        try:
            while left:
                index, event = await inbox.get()
                left -= isinstance(event, (Finished, Failed))
                yield index, event
        finally:
            for one in tickets:
                one.cancel()

    async def report(self) -> tuple[Choice, Report]:
        """The cache it stands with, and what was done."""
        return self._drawing.loaded()[1], await self._drawing.report()

    async def counted(self) -> tuple[str, bytes]:
        """Its name, and what it counted for Prometheus."""
        return serve.get_replica_context().replica_tag, await self._drawing.metrics()

    @property
    def _drawing(self) -> Worker:
        assert self._worker is not None  # Serve sends nothing before `reconfigure` has returned
        return self._worker
