"""The planner of a profile on the very grid it was measured on."""

from __future__ import annotations

from ..grid import Grid
from ..plan import PlanConfig
from ..plan.making import PlanMaker, Setting
from ..plan.planner import Planner
from ..profiles import Profile


def planner_for(profile: Profile) -> Planner:
    """Finds schedules as if for Euler steps; the weights of a plan are made for the scheduler that runs."""
    grid = Grid(len(profile.facts.noise), profile.facts.noise)
    planner = PlanMaker(PlanConfig(), profile).planner(Setting(grid, ((0, grid.last),)))
    assert planner is not None
    return planner
