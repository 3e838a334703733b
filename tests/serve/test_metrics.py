"""The metrics of several processes in one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdover.serve.metrics import RequestMetrics, WorkerMetrics, merge_metrics


def test_every_sample_keeps_its_value_and_gets_the_name_of_its_process() -> None:
    one, other, front = WorkerMetrics(), WorkerMetrics(), RequestMetrics(lambda: 3)
    one.images.labels("none").inc(2)
    other.images.labels("none").inc(5)
    other.batch.observe(4)
    front.requests.labels("/", "GET", "200").inc()
    text = merge_metrics([("a", one.text()), ("b", other.text()), ("front", front.text())])
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert families["holdover_images"].type == "counter"
    generated = {s.labels["replica"]: s.value for s in families["holdover_images"].samples if s.name.endswith("_total")}
    assert generated == {"a": 2, "b": 5}
    assert [(s.labels, s.value) for s in families["holdover_queue_length"].samples] == [({"replica": "front"}, 3)]
    sums = {s.labels["replica"]: s.value for s in families["holdover_batch_size"].samples if s.name.endswith("_sum")}
    assert sums == {"a": 0, "b": 4}


def test_no_processes_have_no_metrics() -> None:
    assert merge_metrics([]) == b""
