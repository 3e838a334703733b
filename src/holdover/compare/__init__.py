"""Compare methods and settings with uncached images of the same seeds, and with running fewer steps.

from holdover.compare import Comparison, MethodCandidate, compare

results = compare(pipe, Comparison(prompts=("red apple",), candidates=(MethodCandidate("tea_cache"),)))
print(results)
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .baselines import SecondOrderScheduler, build_frontier_comparison, diffusers_cache
    from .results import Folder, Results, Row
    from .runner import ProgressCallback, compare
    from .spec import Candidate, Comparison, Custom, FewerSteps, MethodCandidate, from_mapping, parse_method

__all__ = [
    "Candidate",
    "Comparison",
    "Custom",
    "FewerSteps",
    "Folder",
    "MethodCandidate",
    "ProgressCallback",
    "Results",
    "Row",
    "SecondOrderScheduler",
    "build_frontier_comparison",
    "compare",
    "diffusers_cache",
    "from_mapping",
    "parse_method",
]
# A specification can be read and checked without torch, which the other modules import.
__getattr__, _ = lazy_names(
    __name__,
    {
        "baselines": "SecondOrderScheduler build_frontier_comparison diffusers_cache",
        "results": "Folder Results Row",
        "runner": "ProgressCallback compare",
        "spec": "Candidate Comparison Custom FewerSteps MethodCandidate from_mapping parse_method",
    },
)
