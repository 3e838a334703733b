"""diffusers' own pipeline tests as a judge: `python -m benchmarks.diffusers_suite --tests ../diffusers/tests`.

Runs the tests in `tests/pipelines` of a diffusers checkout twice: plain, and with a cache on every pipeline that they
make (`diffusers_plugin.py`), set to compute every step. Whatever passes without the cache and fails with it is a fault
of holdover. Tokenizers and text encoders have local stand-ins (`diffusers_hub.py`); tests that need other downloads
fail in both runs and do not count. A test that failed is run again both ways, because some fail now and then anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from . import ROOT
from .diffusers_hub import write_hub
from .diffusers_plugin import ZERO, read_lines
from .report import provenance, save, table

# The tests of diffusers' own caches, which are refused next to one of holdover.
OWN_CACHES = re.compile(
    r"::test_(pyramid_attention_broadcast|faster_cache|first_block_cache|taylorseer_cache|mag_cache)_"
)
Outcome = dict[str, Any]
Outcomes = dict[str, Outcome]  # by node id


class Suite:
    """The pipeline tests of one checkout. The outcomes are kept in a folder, so that a run can be continued."""

    def __init__(self, tests: Path, only: str, workers: int, folder: Path, online: bool) -> None:
        self._tests, self._workers, self._folder = tests.resolve(), workers, folder.resolve()
        found = {path for pattern in only.split(",") for path in (self._tests / "pipelines").glob(pattern)}
        self._targets = sorted(str(path) for path in found if path.is_dir() or path.name.startswith("test_"))
        if not self._targets:
            raise SystemExit(f"No tests in {self._tests / 'pipelines'} match {only!r}.")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._environment = os.environ | variables | ({} if online else write_hub(self._folder / "hub"))

    def run(self, method: str | None, tests: Collection[str] | None = None, turn: str = "") -> Outcomes:
        """Run some tests, or all of them, with a method put on each pipeline or plain."""
        name = f"{method or 'plain'}{turn}"
        outcomes, targets = self._folder / f"{name}.jsonl", self._targets
        command = [sys.executable, "-P", "-m", "pytest", "-q", "--no-header", "--tb=no", "--disable-warnings"]
        command += ["--continue-on-collection-errors", "-p", "no:cacheprovider"]
        command += ["-p", "benchmarks.diffusers_plugin", "--holdover-outcomes", str(outcomes)]
        command += ["--rootdir", str(self._tests.parent)]
        if self._workers > 1:
            command += ["-p", "xdist.plugin", "-n", str(self._workers), "--dist", "worksteal"]
        if method is not None:
            command += ["--holdover-method", method]
        if tests is not None:
            listed = self._folder / f"{name}.tests"
            listed.write_text("\n".join(tests))
            command += ["--holdover-tests", str(listed)]
            targets = sorted({str(self._tests.parent / test.split("::")[0]) for test in tests})
        print(f"{name}: {'all' if tests is None else len(tests)} tests", file=sys.stderr, flush=True)
        if targets:
            command += targets
            subprocess.run(command, cwd=self._tests.parent, env=self._environment, stdout=sys.stderr, check=False)
        return {outcome["test"]: outcome for outcome in map(json.loads, read_lines(outcomes))}

    def judge(self, method: str, plain: Outcomes) -> dict[str, Any]:
        """What differs with a method: the tests that pass without it and fail with it, each time."""
        judged = select_judged(plain)
        cached = self.run(method, judged)
        failed = [test for test in judged if not passed(cached, test)]
        again, cached_again = self.run(None, failed, f"-again-{method}"), self.run(method, failed, "-again")
        faults = [test for test in failed if passed(again, test) and not passed(cached_again, test)]
        run = [outcome for outcome in cached.values() if "caches" in outcome]
        sums = {key: sum(outcome[key] for outcome in run) for key in ("caches", "shared", "computed", "held")}
        return {
            "settings": ZERO[method],
            "tests": len(judged),
            **sums,
            "refusals": dict(Counter(text for outcome in run for text in outcome["refusals"])),
            "unstable": sorted(set(failed) - set(faults)),
            "differences": {test: cached.get(test, {"message": "did not run"})["message"] for test in faults},
        }


def passed(outcomes: Outcomes, test: str) -> bool:
    return test in outcomes and outcomes[test]["outcome"] == "passed"


def select_judged(plain: Outcomes) -> list[str]:
    """The tests that pass without a cache and make a pipeline with a transformer, less those of diffusers' caches."""
    return [test for test in plain if passed(plain, test) and plain[test]["pipelines"] and not OWN_CACHES.search(test)]


def count(plain: Outcomes) -> dict[str, int]:
    """How many tests there are of each kind."""
    outcomes = Counter(outcome["outcome"] for outcome in plain.values())
    passing = [test for test in plain if passed(plain, test)]
    return {
        **{key: outcomes[key] for key in ("passed", "failed", "skipped", "not collected")},
        "passed, of diffusers' own caches": sum(OWN_CACHES.search(test) is not None for test in passing),
        "passed, without a transformer": sum(not plain[test]["pipelines"] for test in passing),
        "judged": len(select_judged(plain)),
    }


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
    parser.add_argument("--methods", default=",".join(ZERO), help=f"comma-separated; default: {','.join(ZERO)}")
    parser.add_argument("--only", default="*", help="folders of tests/pipelines: comma-separated patterns")
    parser.add_argument("--workers", type=int, default=1, help="processes (pytest-xdist)")
    parser.add_argument("--folder", type=Path, default=None, help="keeps the outcomes here and continues from them")
    parser.add_argument("--online", action="store_true", help="download what the tests need in place of stand-ins")
    parser.add_argument("--out", type=Path, default=None, help="result file")
    options = parser.parse_args()
    methods = options.methods.split(",") if options.methods else []
    if unknown := set(methods) - set(ZERO):
        parser.error(f"no zero setting is known for {', '.join(sorted(unknown))}; known: {', '.join(ZERO)}")
    with tempfile.TemporaryDirectory() as temporary:
        suite = Suite(options.tests, options.only, options.workers, options.folder or Path(temporary), options.online)
        plain = suite.run(None)
        figures = provenance() | {
            "commit": options.commit or find_commit(options.tests),
            "only": options.only,
            "plain": count(plain),
            "methods": {},
        }
        for method in methods:
            figures["methods"][method] = suite.judge(method, plain)
            save("diffusers_suite", figures, options.out)
    keys = ("tests", "caches", "shared", "computed", "held")
    rows = [
        [name, *(found[key] for key in keys), sum(found["refusals"].values()), len(found["differences"])]
        for name, found in figures["methods"].items()
    ]
    print(table([["tests without a cache", "count"], *map(list, figures["plain"].items())]))
    print(table([["method", *keys, "refused", "differences"], *rows]))
    for name, found in figures["methods"].items():
        print(*(f"{name}: {test}\n    {message}" for test, message in found["differences"].items()), sep="\n")
    print(json.dumps({name: len(found["differences"]) for name, found in figures["methods"].items()}))
    return min(sum(len(found["differences"]) for found in figures["methods"].values()), 1)


if __name__ == "__main__":
    sys.exit(main())
