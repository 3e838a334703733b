"""The planned cache: which steps to compute, and how the others are predicted, is decided before the first step.

A held step's output is a weighted sum of outputs computed before it. Inner products of outputs, measured on a few
uncached generations, are enough to compute the best schedule and the best weights in advance.

Prior work: schedules by dynamic programming (DPCache, arXiv:2602.22654), fitted linear weights for each step (L2P,
2604.26365), path search under a budget (LeMiCa 2511.00090, MeanCache 2601.19961, BudCache 2606.13496), learned linear
solvers (bespoke non-stationary solvers, 2403.01329), forecasts over all computed steps (Spectrum, 2603.01623). Not
found in them: fitting along the trajectory that the plan really takes, weights for each guidance branch, and
certificates.
"""

from .config import PlanConfig
from .measure import calibrate
from .method import PlanBackend
from .polish import polish
from .tune import TuningResult, tune

__all__ = ["PlanBackend", "PlanConfig", "TuningResult", "calibrate", "polish", "tune"]
