"""The planner of a profile on the very grid it was measured on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..plan.making import kind_of
from ..plan.planner import Planner
from ..plan.response import euler
from ..plan.setting import Setting
from ..profiles import Profile


def planner_for(profile: Profile) -> Planner:
    """Finds schedules as if for Euler steps; the weights of a plan are made for the scheduler that runs."""
    noise, starts = np.array(profile.facts.noise), profile.facts.starts
    ranges = tuple((first, after - 1) for first, after in pairwise((*starts, len(noise))))
    planner = kind_of(Setting(noise, ranges, euler(noise)), profile).planner
    assert planner is not None
    return planner
