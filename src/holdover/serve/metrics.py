"""Prometheus metrics: of requests on the HTTP side, of images in a worker, and of many processes in one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from .schemas import GenerationInfo

if TYPE_CHECKING:
    from ..prompt_embed_cache import PromptEmbedCache

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


class RequestMetrics:
    """Metrics of the HTTP side."""

    def __init__(self, queue_length: Callable[[], int]) -> None:
        own = self._registry = CollectorRegistry()
        labels = "route", "method", "status"
        self.requests = Counter("holdover_requests", "Requests by route and status.", labels, registry=own)
        self.latency = Histogram(
            "holdover_request_seconds", "Time to the end of the response.", ("route",), buckets=_SECONDS, registry=own
        )
        Gauge("holdover_queue_length", "Images in the queue.", registry=own).set_function(queue_length)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class WorkerMetrics:
    """Metrics of one worker."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=own), partial(Gauge, registry=own)
        seconds = partial(Histogram, buckets=_SECONDS, registry=own)
        method = ("method",)
        self.queued = seconds("holdover_queue_seconds", "Time of an image in the queue.")
        self.generations = seconds("holdover_generation_seconds", "Time to generate a batch.", method)
        self.images = counter("holdover_images", "Images generated.", method)
        self.cancelled = counter("holdover_cancelled_images", "Images stopped because their client disconnected.")
        self.steps = counter("holdover_steps", "Forwards of the transformer, computed or held.", (*method, "kind"))
        self.held_bytes = gauge("holdover_held_bytes", "Largest number of bytes held in the last generation.", method)
        self.batch = Histogram("holdover_batch_size", "Images of a batch.", buckets=(1, 2, 4, 8, 16, 32), registry=own)
        self.ready = gauge("holdover_ready", "1 when the model is loaded.")

    def add_prompt_cache(self, cache: PromptEmbedCache) -> None:
        """Include the hits and misses of a prompt cache."""

        def collect() -> list[Metric]:
            counts = {"hit": cache.hits, "miss": cache.misses, "bypass": cache.bypassed}
            family = CounterMetricFamily("holdover_prompt_cache", "Prompts by result of the lookup.", labels=["result"])
            for result, count in counts.items():
                family.add_metric((result,), count)
            return [family]

        self._registry.register(_FunctionCollector(collect))

    def record(self, infos: Sequence[GenerationInfo]) -> None:
        """Count a finished batch."""
        for one in infos:
            self.queued.observe(one.seconds.queued)
        info = infos[-1]
        self.generations.labels(info.method).observe(info.seconds.generation)
        self.images.labels(info.method).inc(info.batch)
        self.batch.observe(info.batch)
        self.steps.labels(info.method, "computed").inc(sum(info.computed.values()))
        self.steps.labels(info.method, "held").inc(sum(info.held.values()))
        self.held_bytes.labels(info.method).set(info.held_bytes)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _FunctionCollector(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def merge_metrics(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """One text from those of several processes; every sample gets its process's name as the label `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts:
        for family in text_string_to_metric_families(text.decode("utf-8")):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {"replica": name, **sample.labels}, sample.value)
    registry = CollectorRegistry()
    registry.register(_FunctionCollector(families.values))
    return generate_latest(registry)
