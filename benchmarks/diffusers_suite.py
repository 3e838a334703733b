"""diffusers' own pipeline tests as a judge: `python -m benchmarks.diffusers_suite --tests ../diffusers/tests`.

Runs the tests in `tests/pipelines` of a diffusers checkout with a cache on every pipeline that they make
(`diffusers_plugin.py`), set to compute every step. A test that fails runs without a cache in another process; if it
passes there, and fails once more with the cache in a third one, that is a fault of holdover. Tokenizers and text
encoders have local stand-ins (`diffusers_hub.py`); tests that need other downloads fail without a cache too.

Each file of tests runs in a process of its own, forked from one that has imported the libraries.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from .diffusers_outcomes import NOTHING, SUMS, ZERO, FileOutcomes, describe, write
from .report import provenance, save, table

COLUMNS = ("tests", "with a computed step", *SUMS, "refused", "not run")
IMPORTED = {
    "diffusers": ("FluxPipeline", "AutoPipelineForText2Image"),
    "transformers": ("CLIPTextModel", "T5EncoderModel", "Qwen2_5_VLModel"),
}


class Suite:
    """The pipeline tests of one checkout. The outcomes are kept in a folder, so that a run can be continued."""

    def __init__(self, tests: Path, only: str, methods: Sequence[str], folder: Path, limit: int) -> None:
        self._tests, self._methods, self._folder, self._limit = tests.resolve(), methods, folder, limit
        self._pipelines = self._tests / "pipelines"
        found = [path for pattern in only.split(",") for path in sorted(self._pipelines.glob(pattern))]
        files = [file for path in found for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
        self.files = list(dict.fromkeys(file for file in files if file.name.startswith("test_")))
        if not self.files:
            raise SystemExit(f"No tests in {self._pipelines} match {only!r}.")
        self._folder.mkdir(parents=True, exist_ok=True)

    def name(self, file: Path) -> str:
        return str(file.relative_to(self._pipelines).with_suffix(""))

    def _path(self, file: Path) -> Path:
        return self._folder / f"{self.name(file).replace('/', '.')}.jsonl"

    def read(self) -> dict[str, FileOutcomes]:
        """All outcomes so far, by file."""
        return {self.name(file): FileOutcomes(self._path(file)) for file in self.files}

    def run(self, workers: int, seconds: float, report: Callable[[], None]) -> None:
        """Run what is missing, until it is done or the time is up."""
        from .diffusers_plugin import run_file

        end, waiting, fork = time.monotonic() + seconds, deque(self.files), multiprocessing.get_context("fork")
        running: dict[Path, tuple[ForkProcess, float]] = {}
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < workers:
                file = waiting.popleft()
                stage = FileOutcomes(self._path(file)).next_stage(self._methods)
                if stage is not None:
                    args = (file, self._tests.parent, self._path(file), self._methods, stage, self._limit)
                    running[file] = fork.Process(target=run_file, args=args), time.time()
                    running[file][0].start()
            wait([process.sentinel for process, _ in running.values()], timeout=5)
            for file, (process, started) in list(running.items()):
                written = self._path(file).stat().st_mtime if self._path(file).exists() else 0.0
                if time.time() - max(started, written) > 2 * self._limit:  # not even its alarm has stopped it
                    process.kill()
                    process.join()
                if not process.is_alive():
                    del running[file]
                    self._bury(self._path(file), f"the process ended with {process.exitcode}")
                    waiting.appendleft(file)  # for its next stage
            report()
        for process, _ in running.values():
            process.kill()
            process.join()

    def _bury(self, path: Path, message: str) -> None:
        """Write down what a process that is gone did not write itself."""
        found = FileOutcomes(path)
        if found.tests is None:
            write(path, collected=[], message=message)
        elif found.unfinished is not None:
            write(path, **found.unfinished, outcome="crashed", message=message, **NOTHING)


def find_commit(tests: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(tests), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> int:
    """Run, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diffusers_suite", description=__doc__)
    parser.add_argument("--tests", type=Path, required=True, help="the folder `tests` of a diffusers checkout")
    parser.add_argument("--commit", default=None, help="commit of the tests, where they are not in a git checkout")
    parser.add_argument("--methods", default="mag_cache,tea_cache,plan,easy_cache,none", help="comma-separated")
    parser.add_argument(
        "--only", default="*", help="folders of tests/pipelines in this order: comma-separated patterns"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--limit", type=int, default=120, help="seconds for one run of one test")
    parser.add_argument("--folder", type=Path, default=None, help="keeps the outcomes here and continues from them")
    parser.add_argument("--online", action="store_true", help="download what the tests need in place of stand-ins")
    parser.add_argument("--out", type=Path, default=None, help="result file")
    options = parser.parse_args()
    methods = options.methods.split(",")
    if unknown := set(methods) - set(ZERO):
        parser.error(f"no zero setting is known for {', '.join(sorted(unknown))}; known: {', '.join(ZERO)}")
    settings = provenance() | {"commit": options.commit or find_commit(options.tests), "only": options.only}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        suite = Suite(options.tests, options.only, methods, folder / "outcomes", options.limit)
        prepare(None if options.online else folder / "hub")
        reported = 0.0

        def report() -> None:
            nonlocal reported
            if time.monotonic() - reported > 20:
                figures = settings | describe(suite.read(), methods)
                save("diffusers_suite", figures, options.out)
                print(time.strftime("%H:%M:%S"), json.dumps(figures["files"]), file=sys.stderr, flush=True)
                reported = time.monotonic()

        suite.run(options.workers, options.seconds, report)
        figures = settings | describe(suite.read(), methods)
    save("diffusers_suite", figures, options.out)
    print(json.dumps({"files": figures["files"], "tests": figures["tests"]}, indent=1))
    rows = [[name, *(found[key] for key in COLUMNS)] for name, found in figures["methods"].items()]
    print(table([["method", *COLUMNS], *rows]))
    for name, found in figures["methods"].items():
        for test, message in found["differences"].items():
            print(f"{name}: {test}\n    {message}")
    print(json.dumps({name: len(found["differences"]) for name, found in figures["methods"].items()}))
    return min(sum(len(found["differences"]) for found in figures["methods"].values()), 1)


def prepare(hub: Path | None) -> None:
    """Import, once, what most tests need; write the stand-ins of what they download."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if hub is not None:  # set before the first import of the Hub's client, which reads them once
        os.environ |= {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
        from .diffusers_hub import write_hub

        write_hub(hub)
    import_module(".diffusers_plugin", __package__)
    for library, names in IMPORTED.items():
        for name in names:
            getattr(import_module(library), name)
    import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
