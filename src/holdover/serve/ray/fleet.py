"""All replicas, seen from the ingress: it sends them what was taken in, and again where a replica died over it."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle

from ...errors import ConfigError, HoldoverError
from ..choice import Choice
from ..errors import internal, unavailable
from ..known import Known
from ..model import Facts
from ..studio import Report, Totals
from ..waiting import Room
from ..work import Begun, Event, Failed, Finished, Order, Partial, Record, Ticket
from .cache import chosen, packed, shared
from .counted import labelled
from .settings import RaySettings

logger = logging.getLogger(__name__)


class LostError(Exception):
    """The replica that drew a request is gone; the request is not."""


class Errand:
    """The pictures of one request, from one replica to the next until all of them are drawn."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.left: dict[int, Ticket] = dict(enumerate(tickets))
        self._shown = dict.fromkeys(self.left, 0)

    @property
    def called_off(self) -> bool:
        return all(ticket.cancelled for ticket in self.left.values())

    @property
    def orders(self) -> list[Order]:
        """What is still to be drawn."""
        return [ticket.order for ticket in self.left.values()]

    @property
    def waited(self) -> float:
        """Seconds since it was taken in."""
        return time.monotonic() - min(ticket.submitted for ticket in self.left.values())

    def hear(self, place: int, event: Event) -> None:
        """Tell who waits; not again what was shown before the replica died."""
        ticket = self.left[place]
        if isinstance(event, Partial):
            if event.step <= self._shown[place]:
                return
            self._shown[place] = event.step
        if isinstance(event, (Finished, Failed)):
            del self.left[place]
        ticket.deliver(event)

    def fail(self) -> None:
        """There will be no picture."""
        for place in list(self.left):
            self.hear(place, Failed(internal()))


class Fleet:
    """The studio of many machines."""

    def __init__(self, settings: RaySettings, replicas: DeploymentHandle, fronts: DeploymentHandle) -> None:
        self._replicas, self._fronts, self._retries = replicas, fronts, settings.retries
        self._room = Room(settings.queue_size)
        self._waiting: set[Ticket] = set()
        self._errands: set[asyncio.Task[None]] = set()
        self._standing: Choice | None = None
        self._facts: Facts | None = None
        self._remembers = False
        self._refused: tuple[str, ...] = ()
        self._last: Record | None = None
        self._closed = False
        self._profile: ray.ObjectRef | None = None
        self._change: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Nothing to do: `meet` waits for the replicas."""

    async def stop(self) -> None:
        """Take nothing more in, and see what was taken in to its end."""
        self._closed = True
        if self._errands:
            await asyncio.wait(self._errands)

    async def meet(self, cache: Mapping[str, Any]) -> None:
        """Wait for the first replica, and stand with this cache; an error where it is refused."""
        self._facts, self._remembers = await self._replicas.introduced.remote()
        await self._stand(cache)

    def change(self, cache: Mapping[str, Any]) -> None:
        """Requests that ask for no cache of their own soon get this one, unless a replica refuses it."""
        if self._change is not None:
            self._change.cancel()
        self._change = asyncio.create_task(self._try_to_stand(cache))

    async def _try_to_stand(self, cache: Mapping[str, Any]) -> None:
        try:
            await self._stand(cache)
        except HoldoverError as error:
            logger.error("the cache stays as it is: %s", error)
            self._refused = (f"Other settings were refused, the cache stays as it was: {error}",)

    async def _stand(self, cache: Mapping[str, Any]) -> None:
        sent = packed(cache)
        wanted, profile = chosen(sent), shared(sent)
        refused = await self._replicas.stand.remote(sent)
        if refused is not None:
            raise ConfigError(refused)
        self._standing, self._refused = wanted, ()
        self._profile = None if profile is None else ray.put(profile)

    def loaded(self) -> tuple[Facts, Choice]:
        """The model and the cache for requests that ask for none; an error while no replica is ready."""
        if self._facts is None or self._standing is None:
            raise unavailable("The model is still loading.", "model_loading")
        return self._facts, self._standing

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Take all of them in, or turn all of them away."""
        if self._closed:
            raise unavailable("The server is shutting down.", "shutting_down")
        self._room.admit(len(tickets), len(self._waiting))
        self._waiting.update(tickets)
        errand = Errand(tickets)
        task = asyncio.create_task(self._see_through(errand))
        self._errands.add(task)
        task.add_done_callback(functools.partial(self._over, tickets))
        for ticket in tickets:
            ticket.on_cancel = functools.partial(_call_off, errand, task)

    def __len__(self) -> int:
        return len(self._waiting)

    def _over(self, tickets: Sequence[Ticket], task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        self._waiting.difference_update(tickets)

    async def _see_through(self, errand: Errand) -> None:
        for attempt in range(self._retries + 1):
            try:
                await self._try(errand)
                return
            except LostError as error:
                logger.warning("a replica was lost, attempt %d: %s", attempt + 1, error.__cause__)
                self._waiting.update(errand.left.values())
            except Exception:
                logger.exception("a request failed on its way to a replica")
                break
        errand.fail()

    async def _try(self, errand: Errand) -> None:
        """One replica; it is lost if the stream ends before the pictures are there."""
        places = list(errand.left)
        draw = self._replicas.options(method_name="draw", stream=True, session_id=self._prompt(errand.orders))
        call = draw.remote(errand.orders, errand.waited, self._profile)
        try:
            async for index, event in call:
                self._hear(errand, places[index], event)
        except RayTaskError:
            raise
        except RayError as error:
            raise LostError from error
        except asyncio.CancelledError as error:
            call.cancel()
            task = asyncio.current_task()
            if errand.called_off or (task is not None and task.cancelling()):
                raise
            raise LostError from error  # the replica was told to end, not we
        if errand.left:
            raise LostError

    def _hear(self, errand: Errand, place: int, event: Event) -> None:
        if isinstance(event, Begun):
            self._waiting.discard(errand.left[place])
        elif isinstance(event, Finished):
            self._last = event.record
            self._room.took(event.record.seconds["generation"] / event.record.batch)
        errand.hear(place, event)

    def _prompt(self, orders: Sequence[Order]) -> str:
        """What replicas remember a prompt by; nothing where they remember none."""
        if not self._remembers:
            return ""
        texts = [(order.prompt, order.negative_prompt) for order in orders]
        return hashlib.blake2b(repr(texts).encode(), digest_size=16).hexdigest()

    async def report(self) -> Report:
        """How the cache stands everywhere, and all that was done."""
        answers: list[tuple[Choice, Report]] = await _of_all(self._replicas, "report")
        known, notes = Known(), self._refused
        totals: dict[str, Totals] = {}
        for standing, report in answers:
            if standing == self._standing:
                known, notes = report.known, (*self._refused, *report.notes)
            for method, done in report.totals.items():
                totals[method] = totals.get(method, Totals()).merged(done)
        seen = [report.prompts for _, report in answers if report.prompts is not None]
        prompts = (sum(hits for hits, _ in seen), sum(misses for _, misses in seen)) if seen else None
        return Report(known, notes, totals, self._last, prompts)

    async def metrics(self, own: bytes) -> bytes:
        """What every replica and every ingress counted, each with its name."""
        fronts, replicas = await asyncio.gather(*(_of_all(one, "counted") for one in (self._fronts, self._replicas)))
        return labelled([*(fronts or [("ingress", own)]), *replicas])


def _call_off(errand: Errand, task: asyncio.Task[None]) -> None:
    if errand.left and errand.called_off:
        task.cancel()


async def _of_all(handle: DeploymentHandle, method: str) -> list[Any]:
    """What all replicas say that can be asked; those that are starting or dying cannot."""
    try:
        answers = await handle.broadcast(method).results_async(timeout_s=10, return_exceptions=True)
    except (serve.exceptions.RayServeException, TimeoutError):
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]
