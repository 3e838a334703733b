"""One model over several processes: each has a part of every weight of the transformer (tensor parallel).

The process that serves is rank 0. It sends each batch to the others, which generate the same images, and after each
step whether to continue: if one process left a generation, the others would wait for it in the next block.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from diffusers import TensorParallelConfig

from ..errors import EnableError, HoldoverError
from ..loading import choose_device, place_pipeline, prepare_pipeline
from ..models.pipelines import find_transformers
from .model import OnStep, ServedModel, TakeFrame
from .queue import ImageSpec, Pixels, VideoSpec
from .settings import Settings
from .worker import CacheSwitch, CancelledGenerationError

logger = logging.getLogger(__name__)
IDLE = timedelta(days=3650)  # a server may wait that long for its next batch


class SplitModel(ServedModel):
    """The part of rank 0: generates with the other processes."""

    def __init__(self, name: str, pipeline: Any, messages: Messages, others: Sequence[BaseProcess]) -> None:
        super().__init__(name, pipeline)
        self._messages, self._others = messages, others

    def generate(self, batch: Sequence[ImageSpec], on_step: OnStep) -> Pixels:
        return super().generate(batch, self._lead(batch, on_step))

    def generate_video(self, spec: VideoSpec, on_step: OnStep, take: TakeFrame) -> None:
        super().generate_video(spec, self._lead([spec], on_step), take)

    def _lead(self, batch: Sequence[ImageSpec], on_step: OnStep) -> OnStep:
        """Send a batch to the other processes; returns what tells them after each step whether to continue."""

        def on_step_of_all(step: int, latents: torch.Tensor) -> None:
            error: Exception | None = None
            try:
                on_step(step, latents)
            except Exception as raised:
                error = raised
            self._messages.send(error is None)
            if error is not None:
                raise error

        self._messages.send(list(batch))
        return on_step_of_all

    def close(self) -> None:
        """End the other processes."""
        self._messages.send(None)
        for process in self._others:
            process.join()
        dist.destroy_process_group()


class Messages:
    """Objects that rank 0 sends to the other processes of the default group, through host memory."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=IDLE)

    def send(self, value: Any) -> None:
        dist.broadcast_object_list([value], src=0, group=self._group)

    def receive(self) -> Any:
        """What rank 0 sends next; None if it is gone."""
        received: list[Any] = [None]
        with contextlib.suppress(RuntimeError):
            dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]


def load_split_model(settings: Settings) -> ServedModel:
    """The model with its transformer split over processes, which are started here."""
    settings.check_model()
    device = choose_device(settings.device)
    size, available = settings.tensor_parallel_size, torch.cuda.device_count()
    if size > available or device.type != "cuda":
        raise EnableError(
            f"tensor_parallel_size is {size}, but there are {available} GPUs here, and the device is {device.type}."
        )
    pipeline = prepare_pipeline(settings, device)
    _check_plan(pipeline)
    store: Any = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    spawn = multiprocessing.get_context("spawn")
    others = [
        spawn.Process(target=_run_rank, args=(settings, rank, store.port), name=f"holdover-rank-{rank}", daemon=True)
        for rank in range(1, size)
    ]
    for process in others:
        process.start()
    _join_group(settings, 0, store)
    return SplitModel(settings.model, split_pipeline(pipeline, settings, 0, device), Messages(), others)


def _join_group(settings: Settings, rank: int, store: Any) -> None:
    backend, size = "cpu:gloo,cuda:nccl", settings.tensor_parallel_size
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _check_plan(pipeline: Any) -> None:
    for name, transformer in find_transformers(pipeline).items():
        if not getattr(transformer, "_tp_plan", None):
            raise EnableError(
                f"diffusers does not say how to split {type(transformer).__name__}, the {name} of this pipeline: "
                "leave tensor_parallel_size at 1."
            )


def split_pipeline(pipeline: Any, settings: Settings, rank: int, device: torch.device) -> Any:
    """The pipeline with this rank's part of the transformers, which stay on the device even with offloading."""
    own = torch.device(device.type, rank) if device.type != "cpu" else device
    if own.type == "cuda":
        torch.cuda.set_device(own)
    transformers = find_transformers(pipeline)
    for transformer in transformers.values():
        split: Any = transformer.to(own)
        split.enable_parallelism(config=TensorParallelConfig(tp_degree=settings.tensor_parallel_size))
    pipeline._exclude_from_cpu_offload = [*pipeline._exclude_from_cpu_offload, *transformers]
    return place_pipeline(pipeline, settings, own)


def _run_rank(settings: Settings, rank: int, port: int) -> None:
    """A process other than rank 0."""
    size, device = settings.tensor_parallel_size, choose_device(settings.device)
    pipeline = prepare_pipeline(settings, device)
    store: Any = dist.TCPStore("127.0.0.1", port, size, is_master=False)  # type: ignore[attr-defined]
    _join_group(settings, rank, store)
    pipeline = split_pipeline(pipeline, settings, rank, device)
    messages = Messages()  # before the model, as on rank 0: both are collectives
    follow(ServedModel(settings.model, pipeline), messages)
    dist.destroy_process_group()


def follow(model: ServedModel, messages: Messages) -> None:
    """Generate each batch that rank 0 sends, until it sends None."""
    switch: CacheSwitch | None = None

    def on_step(step: int, latents: torch.Tensor) -> None:
        if not messages.receive():
            raise CancelledGenerationError

    while (batch := messages.receive()) is not None:
        cache = batch[0].cache
        try:
            switch = switch or CacheSwitch(model.pipeline, cache)
            with switch.use(cache):
                if isinstance(batch[0], VideoSpec):
                    model.generate_video(batch[0], on_step, lambda frame: None)
                else:
                    model.generate(batch, on_step)
        except (CancelledGenerationError, HoldoverError) as error:  # rank 0 raises and answers it too
            logger.debug("%r", error)
