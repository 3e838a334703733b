"""Videos and the jobs that generate them: one folder with a JSON record and an MP4 file for each video.

The folder is the truth: a record is replaced atomically, so it survives the server. Several processes may share the
folder: each reads and changes it under a lock on the file `.lock`. A process also holds a lock on a file of its own
while it lives; a job whose process does not hold it any more has failed, unless its MP4, which appears under its name
only when it is complete, is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO, Literal

from pydantic import ValidationError

from .errors import ApiError, invalid, storage_failed, unavailable
from .queue import Events, GeneratedVideo, ImageBackend, Progress, QueueItem, VideoSpec, follow
from .schemas import Video, VideoError, VideoList
from .settings import Settings
from .validation import format_size

logger = logging.getLogger(__name__)

_ID = re.compile(r"video_[0-9a-f]{28}")
_BYTES_PER_PIXEL = 0.5  # of an MP4, more than usual: for the check before the work
_CLEAN_EVERY = 300.0  # seconds
_RESTARTED = VideoError(code="server_stopped", message="The server stopped before the video was finished.")
_ENDED = ("completed", "failed")
_UNRECORDED = "The server stopped before it had recorded how this video was generated."
_SHUT_DOWN = VideoError(code="server_stopped", message="The server was shut down before the video was finished.")
Variant = Literal["video", "plain"]


class Record(Video):
    """A video as it is stored; `owner` is the process that has its job."""

    owner: str


class VideoFolder:
    """The records and files of all videos. Its methods wait for the disk: call them on a thread."""

    def __init__(self, settings: Settings) -> None:
        self.path = Path(settings.video_dir).expanduser().absolute()
        self._seconds, self._bytes = settings.video_hours * 3600, settings.video_space * 1e9
        self._own = uuid.uuid4().hex
        self._alive: IO[str] | None = None  # the lock that says so
        self._active: dict[str, Record] = {}  # of this process
        self._lock = threading.Lock()

    def create(self, video: Video, spec: VideoSpec) -> Record:
        """A record of a new job; an error if the folder cannot be written or has no room for the video."""
        with self._errors():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._errors(), self._locked():
            if self._alive is None:
                alive = (self.path / f".{self._own}.alive").open("w")
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._alive = alive
            self._purge()
            needed = spec.frames * spec.size[0] * spec.size[1] * _BYTES_PER_PIXEL * (2 if spec.compare else 1)
            if (free := shutil.disk_usage(self.path).free) < needed:
                message = (
                    f"The video needs about {needed / 1e6:.1f} MB in {self.path}, where {free / 1e6:.1f} MB are free."
                )
                raise storage_failed(message)
            record = Record(owner=self._own, **dict(video))
            self._write(record)
            self._active[record.id] = record
            return record

    def get(self, video: str) -> Record:
        """A record; an error if there is none."""
        with self._errors(), self._locked():
            return self._get(video)

    def page(self, after: str | None, limit: int, descending: bool) -> VideoList:
        """The videos by the time they were created, from the one after `after` on."""
        if after is not None and not _ID.fullmatch(after):
            raise invalid(f"after must be the id of a video, not {after[:100]!r}.", "after")
        with self._errors(), self._locked():
            ids, found = sorted(self._ids(), reverse=descending), list[Record]()
            for one in ids:
                if after is None or (one < after if descending else one > after):
                    with contextlib.suppress(ApiError):  # it was deleted just now
                        found.append(self._get(one))
                if len(found) > limit:
                    break
        page = found[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return VideoList(data=list(page), first_id=first, last_id=last, has_more=len(found) > limit)

    def save(self, record: Record) -> bool:
        """Replace the record of a job of this process; False if the video was deleted.

        A record that cannot be written, because the disk is full, is kept until it can. A job that has ended stays so.
        """
        try:
            with self._locked():
                if not self._record(record.id).exists():
                    self._remove(record.id)
                    return False
                current = self._active.get(record.id)
                if current is not None and current.status not in _ENDED:
                    self._save(record)
        except OSError as error:
            logger.error("the record of %s cannot be written: %s", record.id, error.strerror)
        return True

    def delete(self, video: str) -> None:
        """Remove a video; an error if there is none."""
        with self._errors(), self._locked():
            self._get(video)
            self._remove(video)

    def open(self, video: str, variant: Variant) -> BinaryIO:
        """The file of a finished video, which can be read to its end even if the video is deleted meanwhile."""
        with self._errors(), self._locked():
            record = self._get(video)
            if record.status == "failed":
                raise invalid(f"The video failed: {record.error and record.error.message}", "video_id", "video_failed")
            if record.status != "completed":
                raise invalid(f"The video is not finished: {record.progress} %.", "video_id", "video_not_ready")
            if variant == "plain" and record.comparison is None:
                raise invalid("Only a video generated with compare has the variant plain.", "variant")
            try:
                return (self.path / (f"{video}.plain.mp4" if variant == "plain" else f"{video}.mp4")).open("rb")
            except FileNotFoundError:
                raise ApiError(404, f"The file of {video} is gone.", "video_not_found", "video_id") from None

    def purge(self) -> None:
        """Write what could not be written before, and delete what is over the limits."""
        with contextlib.suppress(OSError), self._locked():
            self._purge()

    def close(self) -> None:
        """Write what could not be written before, and release the lock of this process."""
        self.purge()
        with self._lock:
            if self._alive is not None:
                Path(self._alive.name).unlink(missing_ok=True)
                self._alive.close()
                self._alive = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep out other threads and other processes. There is nothing to lock if there is no folder."""
        with self._lock, contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                fcntl.flock(stack.enter_context((self.path / ".lock").open("a")), fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_failed(f"Cannot use the folder {self.path}: {error.strerror}.") from error

    # The methods below are called with the lock.

    def _record(self, video: str) -> Path:
        return self.path / f"{video}.json"

    def _ids(self) -> list[str]:
        names = (path.stem for path in self.path.glob("video_*.json"))
        return [name for name in names if _ID.fullmatch(name)]

    def _get(self, video: str) -> Record:
        record = self._read(video) if _ID.fullmatch(video) else None
        if record is None:
            raise ApiError(404, f"There is no video {video[:100]!r}.", "video_not_found", "video_id")
        return record

    def _save(self, record: Record) -> None:
        """Write the record of a job of this process, and forget the job when it has ended."""
        ended = record.status in _ENDED
        if ended:
            record = record.model_copy(update={"expires_at": self._expiry()})
        self._active[record.id] = record
        if record.status == "failed":
            self._remove_files(record.id)
        self._write(record)
        if ended:
            del self._active[record.id]
            self._purge()

    def _read(self, video: str) -> Record | None:
        """A record, or None if there is none or its time is over.

        If its process is gone, it has failed, unless its MP4 is complete.
        """
        if video in self._active:
            return self._active[video]
        try:
            record = Record.model_validate_json(self._record(video).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            logger.warning("%s is not a record of a video", self._record(video))
            return None
        if record.status not in _ENDED and not self._is_alive(record.owner):
            changes: dict[str, object] = {"expires_at": self._expiry()}
            with contextlib.suppress(OSError):  # the disk is full: this is found again
                finished = self.path / f"{video}.mp4"
                if finished.exists():
                    changes |= {"status": "completed", "progress": 100, "notes": [*record.notes, _UNRECORDED]}
                    changes |= {"completed_at": int(finished.stat().st_mtime)}
                    record = record.model_copy(update=changes)
                else:
                    record = record.model_copy(update=changes | {"status": "failed", "error": _RESTARTED})
                    self._remove_files(video)
                self._write(record)
        if record.expires_at is not None and record.expires_at <= time.time():
            self._remove(video)
            return None
        return record

    def _expiry(self) -> int | None:
        """When a video that is finished now is deleted."""
        return int(time.time() + self._seconds) if self._seconds else None

    def _is_alive(self, owner: str) -> bool:
        """Whether a process holds the lock on its file."""
        path = self.path / f".{owner}.alive"
        try:
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            for left in (path, path.with_suffix(".new")):
                left.unlink(missing_ok=True)
            return False
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True

    def _write(self, record: Record) -> None:
        temporary = self.path / f".{self._own}.new"
        try:
            temporary.write_text(record.model_dump_json(), "utf-8")
            os.replace(temporary, self._record(record.id))
        finally:
            temporary.unlink(missing_ok=True)

    def _remove_files(self, video: str) -> None:
        for path in (*self.path.glob(f"{video}.*mp4"), *self.path.glob(f".{video}.*")):
            path.unlink(missing_ok=True)

    def _remove(self, video: str) -> None:
        self._active.pop(video, None)
        self._record(video).unlink(missing_ok=True)
        self._remove_files(video)

    def _purge(self) -> None:
        """Delete what is too old, then the oldest finished videos while all together are too large, but not the last.

        Files without a record are what a process left that ended while it wrote or deleted; a record that cannot be
        read may be one of another version.
        """
        for ended in [one for one in self._active.values() if one.status in _ENDED]:
            with contextlib.suppress(OSError):  # still no room
                self._write(ended)
                del self._active[ended.id]
        records = {one: record for one in sorted(self._ids()) if (record := self._read(one)) is not None}
        sizes: dict[str, int] = {}
        for path in (*self.path.glob("video_*mp4"), *self.path.glob(".video_*")):
            video = path.name.lstrip(".").partition(".")[0]
            with contextlib.suppress(FileNotFoundError):
                if video in records:
                    sizes[video] = sizes.get(video, 0) + path.stat().st_size
                elif _ID.fullmatch(video) and not self._record(video).exists():
                    path.unlink()
        finished = [one for one, record in records.items() if record.status == "completed"]
        for one in finished[:-1]:
            if sum(sizes.values()) <= self._bytes:
                return
            self._remove(one)
            sizes.pop(one, None)


class VideoJobs:
    """The jobs of this process: each is an item in the queue and a task that writes its record."""

    def __init__(self, settings: Settings, backend: ImageBackend) -> None:
        self.folder, self._backend = VideoFolder(settings), backend
        self._tasks: dict[str, tuple[QueueItem, asyncio.Task[None]]] = {}
        self._started = set[str]()
        self._closed = False
        self._cleaning: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Delete what is over the limits, now and every few minutes."""

        async def clean() -> None:
            while True:
                await asyncio.to_thread(self.folder.purge)
                await asyncio.sleep(_CLEAN_EVERY)

        self._cleaning = asyncio.create_task(clean())

    async def create(self, spec: VideoSpec, model: str, notes: list[str]) -> Video:
        """Put a video in the queue."""
        if self._closed:
            raise unavailable("The server is shutting down.", "shutting_down")
        now = time.time()
        video = Video(
            id=f"video_{int(now * 1000):012x}{secrets.token_hex(8)}",  # sorted by time
            created_at=int(now),
            model=model,
            prompt=spec.prompt,
            seconds=f"{spec.frames / spec.fps:.4g}",
            size=format_size(spec.size),
            num_frames=spec.frames,
            fps=spec.fps,
            steps=spec.steps,
            notes=notes,
        )
        record = await asyncio.to_thread(self.folder.create, video, spec)
        item = QueueItem(replace(spec, path=str(self.folder.path / f"{video.id}.mp4")))
        events = follow([item])
        try:
            self._backend.submit([item])
        except BaseException:
            await asyncio.to_thread(self.folder.delete, video.id)
            raise
        task = asyncio.create_task(self._follow(record, item, events))
        self._tasks[video.id] = item, task

        def forget(task: asyncio.Task[None]) -> None:
            self._tasks.pop(video.id, None)
            self._started.discard(video.id)

        task.add_done_callback(forget)
        return record

    async def delete(self, video: str) -> None:
        """Remove a video; if it is in the queue or being generated, cancel it."""
        await asyncio.to_thread(self.folder.delete, video)
        if video in self._tasks:
            self._tasks[video][0].future.cancel()
            self._tasks[video][1].cancel()

    async def stop(self, seconds: float) -> None:
        """Cancel what is in the queue, and what is not finished after so many seconds; their records say so."""
        self._closed = True
        if self._cleaning is not None:
            self._cleaning.cancel()
        for video in list(self._tasks):
            if video not in self._started:
                await self._abandon(video)
        if self._tasks:
            await asyncio.wait([task for _, task in self._tasks.values()], timeout=seconds)
        for video in list(self._tasks):
            await self._abandon(video)
        await asyncio.to_thread(self.folder.close)

    async def _abandon(self, video: str) -> None:
        item, task = self._tasks[video]
        if not item.future.cancel():  # it has just ended: its task is writing that
            await asyncio.wait([task])
            return
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(ApiError):  # it was deleted
            record = await asyncio.to_thread(self.folder.get, video)
            await asyncio.to_thread(
                self.folder.save, record.model_copy(update={"status": "failed", "error": _SHUT_DOWN})
            )

    async def _follow(self, record: Record, item: QueueItem, events: Events) -> None:
        """Keep the record of a job up to date until it ends."""
        while record.status in ("queued", "in_progress"):
            _, event = await events.get()
            changes: dict[str, object] = {}
            if event == "started":
                self._started.add(record.id)
                changes = {"status": "in_progress"}
            elif isinstance(event, Progress):
                changes = {"progress": min(99, 100 * event.done // event.steps)}
            elif isinstance(event, GeneratedVideo):
                changes = {"status": "completed", "progress": 100, "completed_at": int(time.time())}
                changes |= {"holdover": event.info, "comparison": event.comparison}
            elif isinstance(event, ApiError):
                message = event.detail
                if event.code == "internal":  # a request for the state has another id
                    message = f"The server failed at this video; its log says why, under {item.spec.request_id}."
                changes = {"status": "failed", "error": VideoError(code=event.code, message=message)}
            record = record.model_copy(update=changes)
            if not await asyncio.to_thread(self.folder.save, record):
                item.future.cancel()  # another process has deleted it
                return
