"""Waiting for pictures on the HTTP side: one answer, or a stream of events; and noticing when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .asked import Asked, size_name
from .errors import ApiError, client_gone
from .forming import as_png
from .schemas import Completed, Made, PartialImage, Picture, Seconds, TokenDetails, Usage
from .work import Begun, Event, Failed, Finished, Partial, Record, Ticket


class Delivery:
    """Brings what the worker's thread says to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> Partial | Finished:
        """What the worker says next; a failure is raised."""
        while isinstance(event := await self._events.get(), Begun):
            pass
        if isinstance(event, Failed):
            raise event.error
        return event

    async def finished(self) -> Finished:
        """The picture."""
        while isinstance(event := await self.next(), Partial):
            pass
        return event


async def together(request: Request, tickets: Sequence[Ticket], deliveries: Sequence[Delivery]) -> list[Finished]:
    """All pictures of a request; when the client goes away first, they are called off."""
    pictures = asyncio.gather(*(delivery.finished() for delivery in deliveries))
    gone = asyncio.ensure_future(_gone(request))
    try:
        waited: set[asyncio.Future[Any]] = {pictures, gone}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not pictures.done():
            raise client_gone()
        return await pictures
    finally:
        for ticket in tickets:
            ticket.cancel()
        gone.cancel()
        pictures.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream(StreamingResponse):
    """A picture as it forms, as server-sent events; when the client goes away, it is called off."""

    def __init__(self, asked: Asked, ticket: Ticket, delivery: Delivery) -> None:
        super().__init__(
            _events(asked, delivery), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()


async def _events(asked: Asked, delivery: Delivery) -> AsyncIterator[str]:
    shown = 0
    try:
        while isinstance(event := await delivery.next(), Partial):
            yield _sent(await _partial(asked, event, shown))
            shown += 1
        yield _sent(await _completed(asked, event))
    except ApiError as error:
        yield f"event: error\ndata: {json.dumps(error.body)}\n\n"


def _sent(event: PartialImage | Completed) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"


async def _partial(asked: Asked, event: Partial, index: int) -> PartialImage:
    return PartialImage(
        b64_json=await asyncio.to_thread(as_png, event.picture, asked.size),
        created_at=int(time.time()),
        size=asked.size_name,
        partial_image_index=index,
        step=event.step,
        steps=asked.job.steps,
        trace=dict(event.trace),
    )


async def _completed(asked: Asked, event: Finished) -> Completed:
    return Completed(
        b64_json=await asyncio.to_thread(as_png, event.picture, asked.size),
        created_at=int(time.time()),
        size=asked.size_name,
        usage=usage([event.record]),
        holdover=made(event.record),
    )


async def picture(asked: Asked, finished: Finished, as_url: bool) -> Picture:
    """A finished picture as the answer carries it."""
    png = await asyncio.to_thread(as_png, finished.picture, asked.size)
    how = made(finished.record)
    return Picture(url=f"data:image/png;base64,{png}", holdover=how) if as_url else Picture(b64_json=png, holdover=how)


def made(record: Record) -> Made:
    """How a picture was made, in the words of the answer."""
    return Made(
        seed=record.seed,
        method=record.choice.method,
        settings=record.choice.config.as_dict(),
        steps=record.steps,
        drawn_size=size_name(record.drawn_size),
        computed=dict(record.computed),
        held=dict(record.held),
        trace=dict(record.trace),
        seconds=Seconds(**record.seconds),
        batch=record.batch,
        held_bytes=record.held_bytes,
    )


def usage(records: Sequence[Record]) -> Usage:
    """Tokens read and drawn."""
    text, image = (sum(record.tokens[i] for record in records) for i in (0, 1))
    details = TokenDetails(text_tokens=text, image_tokens=0)
    return Usage(input_tokens=text, input_tokens_details=details, output_tokens=image, total_tokens=text + image)
