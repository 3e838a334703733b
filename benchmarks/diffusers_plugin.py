"""Runs one file of diffusers' tests with caches on all pipelines that they make: see `benchmarks.diffusers_suite`.

The cache is enabled at the end of a pipeline's constructor, the earliest place at which a user could do it. Everything
that a test does with a pipeline (moving, saving, copying, `from_pipe`, offload, adapters, generations) happens with the
cache on, and no line of a test has to change. A cache enabled at the first call would miss all but the generations. The
constructors are wrapped in the test process only, and keep their signatures.

Transformers that the tests build themselves are put in eval mode, with and without a cache. A test runs under one
method after another, as `diffusers_outcomes.next_run` says, and is set up and torn down each time.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from diffusers import DiffusionPipeline

import holdover
from holdover.engine.backend import find_cache
from holdover.models.pipelines import find_transformers

from .diffusers_outcomes import (
    AGAIN,
    NOTHING,
    OWN_CACHES,
    PLAIN,
    ZERO,
    FileOutcomes,
    Outcome,
    find_stage,
    next_run,
    write,
)


def run_file(file: Path, root: Path, outcomes: Path, methods: Sequence[str], stage: str, limit: int) -> None:
    """Run one stage of the tests of a file, in this process, which is no good for anything else afterwards."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(root)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(root)]
    code = pytest.main([*options, str(file)], plugins=[JudgingPlugin(outcomes, methods, stage, limit)])
    if FileOutcomes(outcomes).tests is None:
        write(outcomes, collected=[], message=f"not collected, {code!r}")


class JudgingPlugin:
    """Runs each test with the methods that it needs and writes the outcomes."""

    def __init__(self, path: Path, methods: Sequence[str], stage: str, limit: int) -> None:
        self._path, self._methods, self._stage, self._limit = path, methods, stage, limit
        self._known = FileOutcomes(path)
        self._constructors: set[type] = set()
        self._method: str | None = None
        self._found: Outcome = {}
        self._caches: list[holdover.CacheBackend] = []
        self._error = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._error = describe_failure(report)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not OWN_CACHES.search(item.nodeid)]
        if self._known.tests is None:
            write(self._path, collected=[item.nodeid for item in items], message=self._error)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        runs = self._known.runs.setdefault(item.nodeid, {})
        while (run := next_run(runs, self._methods)) is not None and find_stage(run) == self._stage:
            write(self._path, test=item.nodeid, run=run)
            self._method = None if run == PLAIN else run.removesuffix(AGAIN)
            self._found = NOTHING | {"refusals": []}
            self._wrap_constructors()
            item._initrequest()  # type: ignore[attr-defined]
            signal.signal(signal.SIGALRM, stop)
            signal.alarm(self._limit)
            parent: Any = item.parent  # a next item in the same class or module: nothing but the test is torn down
            reports = runtestprotocol(item, nextitem=parent, log=False)
            signal.alarm(0)
            failed = next((report for report in reports if not report.passed), None)
            outcome = {"outcome": failed.outcome if failed else "passed", **self._found}
            outcome |= {"message": describe_failure(failed)} if failed else {}
            runs[run] = outcome | {"seconds": round(sum(report.duration for report in reports), 2)}
            write(self._path, test=item.nodeid, run=run, **runs[run])
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        stats = [cache.stats() for cache in self._caches]
        self._found |= {"computed": sum(s.computed for s in stats), "held": sum(s.held for s in stats)}
        self._found["caches"] = len(self._caches)
        caches, self._caches = self._caches, []
        try:
            return (yield)
        finally:
            for cache in caches:
                cache.disable()

    def _wrap_constructors(self) -> None:
        for pipeline_class in {DiffusionPipeline, *find_subclasses(DiffusionPipeline)} - self._constructors:
            self._constructors.add(pipeline_class)
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


def stop(*_: object) -> None:
    raise TimeoutError("The test runs for too long.")


def find_subclasses(parent: type) -> Iterator[type]:
    """All subclasses of a class, at any depth."""
    for child in parent.__subclasses__():
        yield child
        yield from find_subclasses(child)


def describe_failure(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The first line of an error, or why a test was skipped."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.path}:{crash.lineno}: {crash.message}".splitlines()[0]
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    return text.strip().splitlines()[-1] if text.strip() else ""
