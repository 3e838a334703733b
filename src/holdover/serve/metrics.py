"""What Prometheus is told: by the HTTP side of requests, by a worker of pictures, each from a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..prompt_embed_cache import PromptEmbedCache
from .work import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


class RequestMetrics:
    """The counters of one HTTP side; `waiting` says how many pictures wait."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        own = self._registry = CollectorRegistry()
        self.requests = Counter(
            "holdover_requests", "Requests by route and answer.", ("route", "method", "status"), registry=own
        )
        self.latency = Histogram(
            "holdover_request_seconds", "Time to the end of the answer.", ("route",), buckets=_SECONDS, registry=own
        )
        Gauge("holdover_queue_length", "Pictures that wait.", registry=own).set_function(waiting)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)


class WorkerMetrics:
    """The counters of one worker."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self.queued = Histogram(
            "holdover_queue_seconds", "Time a picture waited to be drawn.", buckets=_SECONDS, registry=own
        )
        self.generations = Histogram(
            "holdover_generation_seconds", "Time to draw a batch.", ("method",), buckets=_SECONDS, registry=own
        )
        self.images = Counter("holdover_images", "Pictures drawn.", ("method",), registry=own)
        self.cancelled = Counter("holdover_cancelled_images", "Pictures nobody waited for any more.", registry=own)
        self.steps = Counter(
            "holdover_steps", "Forwards of the transformer, computed or held.", ("method", "kind"), registry=own
        )
        self.held_bytes = Gauge(
            "holdover_held_bytes", "Most bytes held during the last generation.", ("method",), registry=own
        )
        self.batch = Histogram(
            "holdover_batch_size", "Pictures drawn together.", buckets=(1, 2, 4, 8, 16, 32), registry=own
        )
        self.ready = Gauge("holdover_ready", "1 when the model is loaded.", registry=own)

    def watch(self, cache: PromptEmbedCache) -> None:
        """Report the hits of a prompt cache whenever somebody asks."""
        self._registry.register(_PromptCache(cache))

    def drawn(self, records: Sequence[Record]) -> None:
        """A batch is finished: how long its pictures waited, and what its generation was."""
        for one in records:
            self.queued.observe(one.seconds["queued"])
        record = records[-1]
        method = record.choice.method
        self.generations.labels(method).observe(record.seconds["generation"])
        self.images.labels(method).inc(record.batch)
        self.batch.observe(record.batch)
        self.steps.labels(method, "computed").inc(sum(record.computed.values()))
        self.steps.labels(method, "held").inc(sum(record.held.values()))
        self.held_bytes.labels(method).set(record.held_bytes)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)


class _PromptCache(Collector):
    def __init__(self, cache: PromptEmbedCache) -> None:
        self._cache = cache

    def collect(self) -> list[Metric]:
        family = CounterMetricFamily("holdover_prompt_cache", "Prompts by what the cache knew.", labels=("result",))
        counts = {"hit": self._cache.hits, "miss": self._cache.misses, "bypass": self._cache.bypassed}
        for result, count in counts.items():
            family.add_metric((result,), count)
        return [family]
