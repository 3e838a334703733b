"""The replay check by itself, on inputs the user gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import EnableError, UnsupportedModelError
from ..models.inputs import describe_structure
from ..policies.base import PolicyState
from ..policies.static import ASKED, AlwaysCompute
from .adopt import Adoptions
from .calls import Call
from .extracted import seam_of
from .generation import Track
from .method import STANDARD
from .replay import ReplayReport
from .unit import Unit


def check(transformer: nn.Module, **inputs: Any) -> ReplayReport:
    """Run one full forward and one forced hold on the same inputs and compare them, by output and by stream.

    The transformer is not changed. `str(report)` is readable; `report.max_error` is relative to the largest value.
    """
    unit = Unit("transformer", transformer)
    reason = unit.family.must_compute(inputs)
    if reason is not None:
        raise EnableError(f"A forward of {unit.class_name} with these inputs is never held: it {reason}.")
    adoptions, track = Adoptions(), Track(AlwaysCompute(), PolicyState())
    try:
        unit.install(adoptions, lambda unit, plain, args, kwargs: plain(*args, **kwargs))
        with torch.no_grad():
            seam_of(unit).run(
                Call(transformer, (), inputs, describe_structure(inputs), None, lambda _: ASKED, STANDARD, 0, track)
            )
    except UnsupportedModelError as error:
        if isinstance(error.report, ReplayReport):
            return error.report
        raise
    finally:
        adoptions.release_all()
    assert unit.report is not None
    return unit.report
