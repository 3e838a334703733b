"""Every method on video pipelines through `generate`, `compare` with a report, and `POST /v1/videos`.

A sample that has every method and every pipeline with each of the three; `benchmarks/video_methods.py` runs all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.video_methods import ENTRANCES, HOLDING, PIPELINES

from holdover import selector

METHODS = [name for name in selector.methods() if name in HOLDING]


def test_every_method_has_settings_that_hold() -> None:
    assert list(selector.methods()) == METHODS


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("index", range(len(PIPELINES)), ids=list(PIPELINES))
def test_methods_on_video_pipelines(index: int, entrance: str, tmp_path: Path) -> None:
    shift = index + list(ENTRANCES).index(entrance)  # each pipeline has every fifth method, others with each entrance
    methods = METHODS[shift % len(PIPELINES) :: len(PIPELINES)]
    assert dict(ENTRANCES[entrance](list(PIPELINES.values())[index], methods, tmp_path)) == dict.fromkeys(methods, "")
