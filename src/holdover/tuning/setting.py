"""The planner of a profile on the very grid it was measured on."""

from __future__ import annotations

import numpy as np

from ..plan.making import kind_of
from ..plan.planner import Planner
from ..plan.response import euler
from ..plan.setting import Setting
from ..profiles import Profile


def planner_for(profile: Profile) -> Planner:
    """Finds schedules as if for Euler steps; the weights of a plan are made for the scheduler that runs."""
    noise = np.array(profile.facts.noise)
    planner = kind_of(Setting(noise, ((0, len(noise) - 1),), euler(noise)), profile).planner
    assert planner is not None
    return planner
