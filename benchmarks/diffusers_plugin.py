"""The pytest plugin of `benchmarks.diffusers_suite`: puts a cache on every pipeline that diffusers' tests make.

The cache is enabled at the end of a pipeline's constructor, the earliest place at which a user could do it. Everything
that a test does with a pipeline (moving, saving, copying, `from_pipe`, offload, adapters, generations) happens with the
cache on, and no line of a test has to change. A cache enabled at the first call would miss all but the generations. The
constructors are wrapped in the test process only, and keep their signatures.

Transformers that the tests build themselves are put in eval mode, with and without a cache.

Each test's outcome is appended to a file, one JSON object a line. Tests that are in the file already are not run again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline

import holdover
from holdover import selector
from holdover.engine.backend import find_cache, find_transformers

# The settings at which a method computes every step.
COMPUTING_ALL: dict[str, dict[str, Any]] = {
    "mag_cache": {"mag_threshold": 0.0, "mag_ratios": [1.0]},
    "tea_cache": {"rel_l1_thresh": 0.0, "coefficients": [1.0, 0.0]},
    "plan": {"budget": "1x"},
    "easy_cache": {"threshold": 0.0, "warmup_steps": 0},
    "sea_cache": {"threshold": 0.0, "warmup_steps": 0},
    "first_block": {"threshold": 0.0},
    "taylor_seer": {"interval": 1, "warmup_steps": 0},
    "spectrum": {"interval": 1.0, "growth": 0.0, "warmup_steps": 0},
    "none": {},
}
ZERO = {name: settings for name, settings in COMPUTING_ALL.items() if name in selector.methods()}
SETUP_AND_CALL = ("setup", "call")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("holdover")
    group.addoption("--holdover-method", choices=list(ZERO), help="the cache to put on; default: none at all")
    group.addoption("--holdover-outcomes", type=Path, required=True, help="file of the outcomes, one a line")
    group.addoption("--holdover-tests", type=Path, help="file with the node ids of the tests to run, one a line")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CachedPipelines(config.getoption("--holdover-method")))
    config.pluginmanager.register(
        Selection(config.getoption("--holdover-outcomes"), config.getoption("--holdover-tests"))
    )
    if not hasattr(config, "workerinput"):  # the workers of xdist report to the process that started them
        config.pluginmanager.register(Outcomes(config.getoption("--holdover-outcomes")))


class CachedPipelines:
    """Enables a cache on every pipeline with a transformer, and tells in each test's report what came of it."""

    def __init__(self, method: str | None) -> None:
        self._method = method
        self._found: dict[str, Any] = {}
        self._caches: list[holdover.CacheBackend] = []

    def pytest_collection_finish(self) -> None:
        """Wrap the constructors of all pipelines: the test modules have imported theirs by now."""
        for pipeline_class in {DiffusionPipeline, *find_subclasses(DiffusionPipeline)}:
            if "__init__" in vars(pipeline_class):
                self._wrap_constructor(pipeline_class)

    def _wrap_constructor(self, pipeline_class: Any) -> None:
        plain = pipeline_class.__init__

        @functools.wraps(plain)
        def construct(pipe: Any, *args: Any, **kwargs: Any) -> None:
            plain(pipe, *args, **kwargs)
            if type(pipe).__init__ is construct:  # not called by the constructor of a subclass
                self._enable(pipe)

        pipeline_class.__init__ = construct

    def _enable(self, pipe: Any) -> None:
        try:
            transformers = find_transformers(pipe)
        except holdover.EnableError:
            return
        for transformer in transformers.values():
            transformer.eval()  # as `from_pretrained` does; in training mode every forward runs without the cache
        self._found["pipelines"] += 1
        if self._method is None:
            return
        if find_cache(pipe) is not None:  # another pipeline of this test has the same transformer
            self._found["shared"] += 1
            return
        try:
            self._caches.append(holdover.enable(pipe, self._method, **ZERO[self._method]))
        except holdover.HoldoverError as error:
            self._found["refusals"].append(str(error))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        self._found = {"pipelines": 0, "shared": 0, "refusals": []}
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        stats = [cache.stats() for cache in self._caches]
        self._found |= {"computed": sum(s.computed for s in stats), "held": sum(s.held for s in stats)}
        self._found["caches"] = len(self._caches)
        self._caches.clear()
        item.user_properties.append(("holdover", self._found))
        return (yield)


def find_subclasses(parent: type) -> Iterator[type]:
    """All subclasses of a class, at any depth."""
    for child in parent.__subclasses__():
        yield child
        yield from find_subclasses(child)


class Selection:
    """Leaves out the tests that were not asked for, and those whose outcome is known."""

    def __init__(self, outcomes: Path, tests: Path | None) -> None:
        self._known = {json.loads(line)["test"] for line in read_lines(outcomes)}
        self._tests = None if tests is None else set(read_lines(tests))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in items
            if item.nodeid not in self._known and (self._tests is None or item.nodeid in self._tests)
        ]


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class Outcomes:
    """Appends the outcome of each test to a file as soon as the test is over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: dict[str, dict[str, Any]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self._running:
            self._running[report.nodeid] = {}  # each worker reports it
            self._write(report.nodeid, {"outcome": "not collected", "message": describe_failure(report)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._running.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        outcome["seconds"] = round(outcome["seconds"] + report.duration, 2)
        if not report.passed and outcome["outcome"] == "passed":
            outcome |= {"outcome": report.outcome, "message": describe_failure(report)}
        if report.when not in SETUP_AND_CALL:  # the last report, or that of a worker which ended
            self._write(
                report.nodeid, self._running.pop(report.nodeid) | dict(report.user_properties).get("holdover", {})
            )

    def _write(self, test: str, outcome: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, **outcome}) + "\n")


def describe_failure(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The first line of an error, or why a test was skipped."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.path}:{crash.lineno}: {crash.message}".splitlines()[0]
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    return text.strip().splitlines()[-1] if text.strip() else ""
