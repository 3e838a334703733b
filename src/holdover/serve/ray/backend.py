"""All replicas as the ingress uses them: the cache settings they get, which replica a request goes to, and retries."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ...config import Config
from ...errors import ConfigError, HoldoverError, did_you_mean
from ...profiles.hub import pin
from ...selector import own_config
from ..errors import internal, unavailable
from ..metrics import merge_metrics
from ..queue import Admission, Generated, ImageBackend, Preview, Progress, QueueItem
from ..schemas import CacheReport, GenerationInfo, MethodTotals, ProfileReport
from ..settings import RaySettings, Settings
from ..validation import ModelInfo

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT = 30.0  # seconds that a replica has to answer; Serve replaces one that does not


# The default cache, which may change while replicas run


CACHE_SETTINGS = ("cache_backend", "cache_config")
"""What may change while replicas run: Serve's `user_config` in YAML."""

MAX_PROFILE_BYTES = 32_000_000  # largest profile that is sent with the settings


def pack_cache(values: Mapping[str, Any]) -> dict[str, Any]:
    """The cache settings as plain JSON values, checked; a profile's file is included, as other machines lack it."""
    if "profile" in values:
        return dict(values)  # packed already
    for name in values:
        if name not in CACHE_SETTINGS:
            hint = did_you_mean(name, CACHE_SETTINGS)
            allowed = ", ".join(CACHE_SETTINGS)
            raise ConfigError(f"{name!r} cannot change while replicas run.{hint} Settings that can: {allowed}.")
    settings = Settings.from_dict(
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    )
    settings.check_cache()
    packed: dict[str, Any] = {name: getattr(settings, name) for name in CACHE_SETTINGS}
    named = pin(settings.cache_settings.get("profile"))
    if named != settings.cache_settings.get("profile"):  # all replicas use the same commit
        packed["cache_config"] = json.dumps(settings.cache_settings | {"profile": named})
    if isinstance(named, str) and Path(named).is_file():
        path, size = Path(named), Path(named).stat().st_size
        if size > MAX_PROFILE_BYTES:
            raise ConfigError(f"The profile {path} has {size} bytes; at most {MAX_PROFILE_BYTES} are sent to replicas.")
        packed["profile"] = {"name": path.name, "content": base64.b64encode(path.read_bytes()).decode("ascii")}
    return packed


def write_profile(profile: Mapping[str, str]) -> Path:
    """Write a packed profile to a private folder; its name depends on its content: the same path on every machine."""
    content, folder = base64.b64decode(profile["content"]), Path(tempfile.gettempdir()) / f"holdover-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user: remove it, or set TMPDIR.")
    path = folder / f"{hashlib.sha256(content).hexdigest()[:32]}-{profile['name']}"
    if not path.exists() or path.stat().st_size != len(content):
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    return path


def unpack_cache(packed: Mapping[str, Any]) -> dict[str, str]:
    """The cache settings for this machine; a profile that is included is written to a file."""
    settings = {name: str(packed[name]) for name in CACHE_SETTINGS}
    if "profile" in packed:
        cache_config = json.loads(settings["cache_config"]) | {"profile": str(write_profile(packed["profile"]))}
        settings["cache_config"] = json.dumps(cache_config)
    return settings


def unpack_config(packed: Mapping[str, Any]) -> Config:
    """The same as the config of its method."""
    settings = Settings.from_dict(unpack_cache(packed))
    return own_config(settings.cache_backend, settings.cache_settings)


# Routing


ACTIVE_CALLS: set[str] = set()
"""Calls of this process whose images are not finished.

The backend removes a call before the client gets its last image. For Serve a call is done only when its stream is
closed, which is later: a client's next request would be sent to another replica because this one seemed busy.
"""


class PromptRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica that has cached a prompt's embeddings, unless another is idle. Serve makes one per process.

    A call's session id is its own id and a digest of its prompt. The router remembers the prompts it sent to each
    replica, as many as a replica caches, and prefers that replica while its queue is among the shortest; while no
    replica is idle, it may be longer by one. Otherwise the shortest queue wins; a tie is decided by a digest of prompt
    and replica, so that routers of several processes agree.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """`prompts`: how many a replica caches. `ingresses`: how many processes send requests to the replicas."""
        self._max_prompts: int = kwargs["prompts"]
        self._alone: bool = kwargs["ingresses"] == 1
        self._prompts: defaultdict[ReplicaID, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._calls: defaultdict[ReplicaID, set[str]] = defaultdict(set)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that has the prompt, if it is preferred; then the two with the shortest queues."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request = pending_request.metadata
        prompt = request.session_id.partition(" ")[2]
        lengths = {replica.replica_id: self._queue_length(replica) for replica in candidate_replicas}

        def rank(replica: RunningReplica) -> tuple[int, bytes]:
            text = f"{prompt or request.internal_request_id} {replica.replica_id.unique_id}"
            return lengths[replica.replica_id], hashlib.blake2b(text.encode(), digest_size=8).digest()

        ranked = sorted(candidate_replicas, key=rank)
        shortest = lengths[ranked[0].replica_id]
        limit = shortest + 1 if shortest else 0
        preferred = [
            replica
            for replica in ranked
            if lengths[replica.replica_id] <= limit and prompt in self._prompts[replica.replica_id]
        ]
        return [preferred[:1], ranked[:1], ranked[1:2]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has accepted the call: remember the prompt, and count the call."""
        call, _, prompt = pending_request.metadata.session_id.partition(" ")
        self._calls[replica_id].add(call)
        if prompt:
            prompts = self._prompts[replica_id]
            prompts[prompt] = None
            prompts.move_to_end(prompt)
            while len(prompts) > self._max_prompts:
                prompts.popitem(last=False)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone."""
        super().update_replicas(replicas)
        for gone in (self._prompts.keys() | self._calls.keys()) - self.curr_replicas.keys():
            self._prompts.pop(gone, None)
            self._calls.pop(gone, None)

    def _queue_length(self, replica: RunningReplica) -> int:
        """Calls that the replica has: exactly, if all come from this process.

        The length that Serve caches includes calls that take no time, like those for metrics, and may be seconds old.
        It is needed only to see the calls of other processes.
        """
        calls = self._calls[replica.replica_id]
        calls &= ACTIVE_CALLS
        cached = 0 if self._alone else self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(cached, len(calls))


# The backend


class ReplicaLostError(Exception):
    """The replica that generated a request's images is gone; the request is sent to another."""


class RayBackend(ImageBackend):
    """Sends images to replicas, and again if a replica dies."""

    def __init__(self, settings: RaySettings, replicas: DeploymentHandle, ingresses: DeploymentHandle) -> None:
        self._replicas, self._ingresses, self._retries = replicas, ingresses, settings.retries
        self._admission = Admission(settings.queue_size)
        self._queued: set[QueueItem] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._model: ModelInfo | None = None
        self._default: Config | None = None
        self._profile: ray.ObjectRef | None = None
        self._caches_prompts = False
        self._notes: list[str] = []
        self._last: GenerationInfo | None = None
        self._closed = False
        self._change: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Nothing to do: `reconfigure` waits for the replicas."""

    async def stop(self) -> None:
        self._closed = True
        if self._requests:
            await asyncio.wait(self._requests)

    async def reconfigure(self, cache: Mapping[str, Any]) -> None:
        """Set the default cache. The first time, wait for a replica; an error if the model does not support it.

        Later it changes in the background; if a replica refuses it, the notes of the report say so.
        """
        if self._default is None:
            self._model, self._caches_prompts = await self._replicas.describe.remote()
            await self._set_default(cache)
            return

        async def change() -> None:
            try:
                await self._set_default(cache)
            except HoldoverError as error:
                logger.error("the default cache does not change: %s", error)
                self._notes = [f"New cache settings were refused, the default cache does not change: {error}"]

        if self._change is not None:
            self._change.cancel()
        self._change = asyncio.create_task(change())

    async def _set_default(self, cache: Mapping[str, Any]) -> None:
        packed = pack_cache(cache)
        config = unpack_config(packed)
        refusal = await self._replicas.set_default.remote(packed)
        if refusal is not None:
            raise ConfigError(refusal)
        self._default, self._notes = config, []
        self._profile = ray.put(packed["profile"]) if "profile" in packed else None

    def loaded(self) -> tuple[ModelInfo, Config]:
        if self._model is None or self._default is None:
            raise unavailable("The model is still loading.", "model_loading")
        return self._model, self._default

    def submit(self, items: Sequence[QueueItem]) -> None:
        if self._closed:
            raise unavailable("The server is shutting down.", "shutting_down")
        self._admission.check(items, len(self._queued))
        self._queued.update(items)
        task = asyncio.create_task(self._generate(items))
        self._requests.add(task)

        def finish(task: asyncio.Task[None]) -> None:
            self._requests.discard(task)
            self._queued.difference_update(items)

        def cancel(future: Future[Any]) -> None:
            if future.cancelled() and all(item.future.done() for item in items):
                task.cancel()

        task.add_done_callback(finish)
        for item in items:
            item.future.add_done_callback(cancel)

    def queue_length(self) -> int:
        return len(self._queued)

    async def _generate(self, items: Sequence[QueueItem]) -> None:
        """Generate the images of one request, on one replica after another until all of them are finished."""
        last_steps = dict.fromkeys(items, 0)  # of the previews that were sent
        for attempt in range(self._retries + 1):
            try:
                await self._generate_once(items, last_steps)
                return
            except ReplicaLostError as error:
                logger.warning("a replica was lost, attempt %d: %s", attempt + 1, error.__cause__)
                self._queued.update(item for item in items if not item.future.done())
            except Exception:
                logger.exception("a request failed on its way to a replica")
                break
        for item in items:
            item.notify(internal())

    async def _generate_once(self, items: Sequence[QueueItem], last_steps: dict[QueueItem, int]) -> None:
        """Send unfinished images to one replica; it is lost if its stream ends before they are finished."""
        left = [item for item in items if not item.future.done()]
        if not left:
            return
        specs = [item.spec for item in left]
        call, prompt = uuid.uuid4().hex, ""
        if self._caches_prompts:
            prompts = [(one.prompt, one.negative_prompt) for one in specs]
            prompt = hashlib.blake2b(repr(prompts).encode(), digest_size=16).hexdigest()
        method = self._replicas.options(method_name="generate", stream=True, session_id=f"{call} {prompt}")
        ACTIVE_CALLS.add(call)
        stream = method.remote(specs, time.monotonic() - left[0].submitted, self._profile)
        finished = 0
        try:
            async for index, event in stream:
                item = left[index]
                if event == "started":
                    self._queued.discard(item)
                elif isinstance(event, Preview):
                    if event.step <= last_steps[item]:
                        continue  # sent before a replica died
                    last_steps[item] = event.step
                elif not isinstance(event, Progress):
                    finished += 1
                if isinstance(event, Generated):
                    self._last = event.info
                    self._admission.record(event.info.seconds.generation / event.info.batch)
                if finished == len(left):
                    ACTIVE_CALLS.discard(call)
                item.notify(event)
        except RayTaskError:
            raise
        except RayError as error:
            raise ReplicaLostError from error
        except asyncio.CancelledError as error:
            stream.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ReplicaLostError from error  # Serve cancelled the call because the replica ends
        finally:
            ACTIVE_CALLS.discard(call)
        if finished < len(left):
            raise ReplicaLostError

    async def report(self) -> CacheReport:
        _, default = self.loaded()
        reports: list[CacheReport] = await _broadcast(self._replicas, "report")
        profile, notes = ProfileReport(), self._notes
        totals: defaultdict[str, MethodTotals] = defaultdict(MethodTotals)
        for report in reports:
            if (report.method, report.settings) == (default.method, default.as_dict()):
                profile, notes = report, [*self._notes, *report.notes]
            for method, done in report.totals.items():
                totals[method].add(done)
        caches = [report.prompt_cache for report in reports if report.prompt_cache is not None]
        counts = {name: sum(cache[name] for cache in caches) for name in ("hits", "misses")}
        return CacheReport(
            method=default.method,
            settings=default.as_dict(),
            notes=notes,
            totals=dict(totals),
            last=self._last,
            prompt_cache=counts if caches else None,
            **{name: getattr(profile, name) for name in ProfileReport.model_fields},
        )

    async def metrics(self, own: bytes) -> bytes:
        ingresses, replicas = await asyncio.gather(
            *(_broadcast(handle, "named_metrics") for handle in (self._ingresses, self._replicas))
        )
        return merge_metrics([*(ingresses or [("ingress", own)]), *replicas])


async def _broadcast(handle: DeploymentHandle, method: str) -> list[Any]:
    """The answers of all replicas that can answer; those that start or end cannot."""
    try:
        answers = await handle.broadcast(method).results_async(timeout_s=HEALTH_TIMEOUT, return_exceptions=True)
    except (serve.exceptions.RayServeException, TimeoutError):
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]
