"""The bounded queue between HTTP and the worker: items with futures, taken in batches that can share a generation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from ..config import Config
from .errors import ApiError, queue_full, unavailable
from .schemas import CacheReport, GenerationInfo, VideoComparison

if TYPE_CHECKING:
    from PIL.Image import Image

    from .validation import ModelInfo

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Size = tuple[int, int]


@dataclass(frozen=True)
class ImageSpec:
    """One image to generate, complete and checked; `preview_steps` are the steps after which previews are sent.

    `size` is the width and height at which the model generates, `output_size` that of the image in the response.
    `image` is the one to change, and `strength` the fraction of the steps that do so.
    """

    noun: ClassVar[str] = "image"

    prompt: str
    negative_prompt: str | None
    seed: int
    size: Size
    output_size: Size
    steps: int
    guidance: tuple[tuple[str, float], ...]
    cache: Config
    preview_steps: frozenset[int] = frozenset()
    request_id: str = ""
    image: Image | None = None
    strength: float | None = None

    @property
    def run_steps(self) -> int:
        """The number of steps that run: an image that is changed starts late."""
        return self.steps if self.strength is None else max(1, min(int(self.steps * self.strength), self.steps))

    @property
    def batchable(self) -> bool:
        """Whether others may share its batch: its method does not look at the data, and no image is changed."""
        return self.image is None and self.cache.batchable

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """Equal for images that can be generated in one batch."""
        return self.size, self.steps, self.guidance, bool(self.negative_prompt), self.cache, self.image is None


@dataclass(frozen=True)
class VideoSpec(ImageSpec):
    """One video to generate, complete and checked; `image` is the one it starts from.

    It is written to `path`. With `compare`, the video without a cache is generated too and written to `plain_path`.
    """

    noun = "video"

    frames: int = 1
    fps: float = 16.0
    path: str = ""
    compare: bool = False

    @property
    def plain_path(self) -> str:
        return f"{self.path.removesuffix('.mp4')}.plain.mp4"

    @property
    def batchable(self) -> bool:
        return False


@dataclass(frozen=True)
class Preview:
    """An unfinished image after `step` steps; `pixels` are (H, W, 3) bytes."""

    pixels: Pixels
    step: int
    trace: dict[str, str]


@dataclass(frozen=True)
class GeneratedImage:
    """A finished image; `tokens` are those of its prompt and of the image inside the model."""

    pixels: Pixels
    info: GenerationInfo
    tokens: tuple[int, int]


@dataclass(frozen=True)
class Progress:
    """`done` of `steps` steps of a video are done."""

    done: int
    steps: int


@dataclass(frozen=True)
class GeneratedVideo:
    """A finished video, whose file is at the path of its spec."""

    info: GenerationInfo
    comparison: VideoComparison | None = None


Generated = GeneratedImage | GeneratedVideo
Event = Literal["started"] | Preview | Progress | Generated | ApiError
"""What happens to an image or video; the last event is the finished one or an error."""


@dataclass(eq=False)
class QueueItem:
    """One image or video in the queue. Cancelling its future removes it from the queue or stops its generation."""

    spec: ImageSpec
    submitted: float = field(default_factory=time.monotonic)
    future: Future[Any] = field(default_factory=Future)  # of what is generated
    on_event: Callable[[Event], None] = lambda event: None

    def notify(self, event: Event) -> bool:
        """Resolve the future if the event is the last one, and pass the event on; False if it was cancelled."""
        try:
            if isinstance(event, Generated):
                self.future.set_result(event)
            elif isinstance(event, ApiError):
                self.future.set_exception(event)
        except InvalidStateError:
            return False
        self.on_event(event)
        return True


Events = asyncio.Queue[tuple[int, Event]]


def follow(items: Sequence[QueueItem]) -> Events:
    """The events of these items with the item's index, brought from the worker's thread to the running event loop."""
    loop, events = asyncio.get_running_loop(), Events()

    def deliver(index: int, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(events.put_nowait, (index, event))

    for index, item in enumerate(items):
        item.on_event = partial(deliver, index)
    return events


class ImageBackend(Protocol):
    """Generates the images of the HTTP side: one worker in this process, or Ray replicas."""

    async def start(self) -> None:
        """Start loading the model; does not wait for it."""

    async def stop(self) -> None:
        """Generate what is in the queue, then end."""

    def loaded(self) -> tuple[ModelInfo, Config]:
        """The model and the default cache; an error while the model is loading."""

    def submit(self, items: Sequence[QueueItem]) -> None:
        """Put all items in the queue, or raise an error and put none."""

    def queue_length(self) -> int:
        """Number of images in the queue."""

    async def report(self) -> CacheReport:
        """The default cache and what every method has done."""

    async def metrics(self, own: bytes) -> bytes:
        """Everything for Prometheus; `own` are the metrics of the HTTP side."""


class Admission:
    """Limits the queue's length, and estimates when there is room again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seconds_per_image = 1.0  # moving average

    def check(self, items: Sequence[QueueItem], length: int) -> None:
        """Raise an error if the items do not fit into a queue of that length."""
        if length + len(items) > self._size:
            raise queue_full(length, max(1, round(self._seconds_per_image * length)), items[0].spec.noun)

    def record(self, seconds: float) -> None:
        """Update the estimate with the time that one image took."""
        self._seconds_per_image += 0.3 * (seconds - self._seconds_per_image)


class BatchQueue:
    """The queue of one worker: the oldest item is next, with those that share its batch key."""

    def __init__(self, size: int, max_batch: int, max_wait: float) -> None:
        self.admission, self._max_batch, self._max_wait = Admission(size), max_batch, max_wait
        self._items: list[QueueItem] = []
        self._changed = threading.Condition()
        self._closed = self._woken = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Sequence[QueueItem]) -> None:
        """Append all items, or raise an error and append none."""
        with self._changed:
            if self._closed:
                raise unavailable("The server is shutting down.", "shutting_down")
            self._drop_cancelled()
            self.admission.check(items, len(self._items))
            self._items.extend(items)
            self._changed.notify_all()

    def take(self) -> list[QueueItem] | None:
        """The next batch; an empty one after `wake`, None when the queue is closed and empty."""
        with self._changed:
            self._drop_cancelled()
            while not (self._items or self._closed or self._woken):
                self._changed.wait()
                self._drop_cancelled()
            if self._woken:
                self._woken = False
                return []
            if not self._items:
                return None
            oldest = self._items[0]
            if oldest.spec.batchable:
                remaining = oldest.submitted + self._max_wait - time.monotonic()
                self._changed.wait_for(
                    lambda: self._closed or len(self._batch(oldest)) >= self._max_batch, max(remaining, 0.0)
                )
            batch = self._batch(oldest)
            self._items = [item for item in self._items if item not in batch]
            return batch

    def close(self) -> None:
        """Accept no more items; those in the queue are still generated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Make `take` return an empty batch."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _batch(self, oldest: QueueItem) -> list[QueueItem]:
        """The items that share the oldest one's batch key; itself alone if it is not batchable."""
        limit, key = self._max_batch if oldest.spec.batchable else 1, oldest.spec.batch_key
        return [item for item in self._items if item.spec.batch_key == key][:limit]

    def _drop_cancelled(self) -> None:
        self._items = [item for item in self._items if not item.future.cancelled()]
