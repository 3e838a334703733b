"""Methods and settings beside the uncached pictures of the same seeds, and beside running fewer steps.

from holdover.compare import Comparison, Method, compare

results = compare(pipe, Comparison(prompts=("red apple",), candidates=(Method("tea_cache"),)))
print(results)
"""

from __future__ import annotations

from .candidates import Candidate, Custom, FewerSteps, Method, parse_method
from .folder import Folder
from .results import Results, Row
from .run import Watcher, compare
from .solver import SecondOrderScheduler
from .spec import Comparison, from_mapping

__all__ = [
    "Candidate",
    "Comparison",
    "Custom",
    "FewerSteps",
    "Folder",
    "Method",
    "Results",
    "Row",
    "SecondOrderScheduler",
    "Watcher",
    "compare",
    "from_mapping",
    "parse_method",
]
