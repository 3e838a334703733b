"""The counters of many processes as one text for Prometheus: every sample with the name of who counted it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def labelled(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """One text from those of several processes, by name."""
    families: dict[str, Metric] = {}
    for name, text in texts:
        for family in text_string_to_metric_families(text.decode("utf-8")):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {"replica": name, **sample.labels}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Found(list(families.values())))
    return generate_latest(registry)


class _Found(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families
