"""Compare methods and settings with uncached images of the same seeds, and with running fewer steps.

from holdover.compare import Comparison, MethodCandidate, compare

results = compare(pipe, Comparison(prompts=("red apple",), candidates=(MethodCandidate("tea_cache"),)))
print(results)
"""

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
