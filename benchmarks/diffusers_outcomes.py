"""The outcomes of `benchmarks.diffusers_suite`: what has been run, what to run next, and what it says.

The outcomes of one file of tests are lines of JSON: the tests that it has, each run that starts, and each that ends.
What to run next follows from them alone, so a run of the suite can stop at any time and be continued.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The settings at which a method computes every step.
ZERO: dict[str, dict[str, Any]] = {
    "mag_cache": {"mag_threshold": 0.0, "mag_ratios": [1.0]},
    "tea_cache": {"rel_l1_thresh": 0.0, "coefficients": [1.0, 0.0]},
    "plan": {"profile": "none", "budget": "1x"},
    "easy_cache": {"threshold": 0.0, "warmup_steps": 0},
    "none": {},
    "sea_cache": {"threshold": 0.0, "warmup_steps": 0},
    "first_block": {"threshold": 0.0},
    "taylor_seer": {"interval": 1, "warmup_steps": 0},
    "spectrum": {"interval": 1.0, "growth": 0.0, "warmup_steps": 0},
}
# The tests of diffusers' own caches, which are refused next to one of holdover.
OWN_CACHES = re.compile(
    r"::test_(pyramid_attention_broadcast|faster_cache|first_block_cache|taylorseer_cache|mag_cache)_"
)
CACHED, PLAIN, AGAIN = "cached", "plain", " again"
NOTHING = {"pipelines": 0, "caches": 0, "shared": 0, "computed": 0, "held": 0, "refusals": []}
SUMS = ("caches", "shared", "computed", "held")
Outcome = dict[str, Any]
Runs = dict[str, Outcome]  # by the name of a method, that name + AGAIN, or PLAIN


def next_run(runs: Runs, methods: Sequence[str]) -> str | None:
    """What to run a test with next, after these runs of it.

    A test that passes with a cache needs no plain run. One that fails runs plain, and once more with the cache if it
    passes plain. A test that fails plain needs no other method. Nor does one in which no transformer runs: the first
    method has shown that there is nothing to cache.
    """
    for method in methods:
        if method not in runs:
            return method
        if not passed(runs[method]):
            if PLAIN not in runs:
                return PLAIN
            if not passed(runs[PLAIN]):
                return None
            if method + AGAIN not in runs:
                return method + AGAIN
        elif is_idle(runs[method]):
            return None
    return None


def passed(outcome: Outcome) -> bool:
    return bool(outcome["outcome"] == "passed")


def is_idle(outcome: Outcome) -> bool:
    """Whether a test passed without a forward that a cache could have held."""
    return passed(outcome) and not outcome["computed"] and not outcome["refusals"]


def find_stage(run: str) -> str:
    """Plain runs and repetitions have processes of their own: nothing that a cache leaves behind can excuse it."""
    return PLAIN if run == PLAIN else AGAIN if run.endswith(AGAIN) else CACHED


def write(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


class FileOutcomes:
    """What is known of one file of tests."""

    def __init__(self, path: Path) -> None:
        self.tests: list[str] | None = None  # not collected yet
        self.message = ""
        self.runs: dict[str, Runs] = {}
        self.unfinished: dict[str, str] | None = None  # the run that the last process did not end
        for line in path.read_text().splitlines() if path.exists() else []:
            self.unfinished = None
            match json.loads(line):
                case {"collected": tests, "message": message}:
                    self.tests, self.message = tests, message
                case {"test": test, "run": run, **found} if "outcome" in found:
                    self.runs.setdefault(test, {})[run] = found
                case {"test": test, "run": run}:
                    self.unfinished = {"test": test, "run": run}

    def next_stage(self, methods: Sequence[str]) -> str | None:
        """The earliest stage that one of the tests waits for."""
        if self.tests is None:
            return CACHED
        waiting = (next_run(self.runs.get(test, {}), methods) for test in self.tests)
        stages = {find_stage(run) for run in waiting if run is not None}
        return next((stage for stage in (CACHED, PLAIN, AGAIN) if stage in stages), None)


def describe(files: Mapping[str, FileOutcomes], methods: Sequence[str]) -> dict[str, Any]:
    """What was run, and what came of it."""
    runs = {test: each.runs.get(test, {}) for each in files.values() for test in each.tests or []}
    first = [next(iter(found.values())) for found in runs.values() if found]
    plain = [found[PLAIN] for found in runs.values() if PLAIN in found]
    messages = Counter(each["message"].split(": ", 1)[-1][:120] for each in plain if each["outcome"] == "failed")
    return {
        "files": {
            "found": len(files),
            "finished": sum(each.next_stage(methods) is None for each in files.values()),
            "without tests": {name: each.message for name, each in files.items() if each.tests == []},
            "not begun": [name for name, each in files.items() if each.tests is None],
        },
        "tests": {
            "collected": len(runs),
            "run at least once": len(first),
            "passed without a pipeline with a transformer": sum(passed(o) and not o["pipelines"] for o in first),
            "passed without a forward, with one method alone": sum(is_idle(o) and o["pipelines"] > 0 for o in first),
            "skipped without a cache too": sum(o["outcome"] == "skipped" for o in plain),
            "failed without a cache too": sum(o["outcome"] not in ("passed", "skipped") for o in plain),
            "why they fail without a cache": dict(messages.most_common(12)),
        },
        "methods": {method: judge(method, runs) for method in methods},
    }


def judge(method: str, runs: Mapping[str, Runs]) -> dict[str, Any]:
    """The outcomes of one method, of tests that pass without a cache and make a pipeline with a transformer."""
    failed = [test for test, found in runs.items() if method in found and not passed(found[method])]
    suspects = [test for test in failed if PLAIN in runs[test] and passed(runs[test][PLAIN])]
    repeated = [test for test in suspects if method + AGAIN in runs[test]]
    differing = [test for test in repeated if not passed(runs[test][method + AGAIN])]
    judged = {test: found[method] for test, found in runs.items() if method in found and test not in failed}
    judged |= {test: runs[test][method] for test in suspects}
    outcomes = [outcome for outcome in judged.values() if outcome["pipelines"]]
    return {
        "settings": ZERO[method],
        "tests": len(outcomes),
        "with a computed step": sum(outcome["computed"] > 0 for outcome in outcomes),
        **{key: sum(outcome[key] for outcome in outcomes) for key in SUMS},
        "refused": sum(bool(outcome["refusals"]) for outcome in outcomes),
        "refusals": dict(Counter(text for outcome in outcomes for text in outcome["refusals"])),
        "not run": sum(next_run(found, [method]) is not None for found in runs.values() if needs(method, found)),
        "unstable": sorted(set(repeated) - set(differing)),
        "differences": {test: runs[test][method]["message"] for test in differing},
    }


def needs(method: str, runs: Runs) -> bool:
    """Whether a test is to run with a method, as far as its other runs tell."""
    return not any(is_idle(found) for run, found in runs.items() if run != PLAIN) and passed(
        runs.get(PLAIN, {"outcome": "passed"})
    )
