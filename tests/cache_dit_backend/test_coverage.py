"""Every transformer class of diffusers under cache-dit: it works as it should, or is refused with the reason."""

from __future__ import annotations

import pytest
import torch

import holdover
from holdover.support import support_of, supported
from models.support_table import MODELS, STEPS, run_cache_dit, run_generation
from snapshots import differences, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CLASSES = [row.name for row in supported()]
WORKING = [name for name in CLASSES if support_of(name).cache_dit]


@pytest.mark.parametrize("name", WORKING)
def test_a_class_that_works(name: str) -> None:
    tiny = MODELS[name]
    model = tiny.build()
    plain = run_generation(tiny, model)
    before = snapshot(model)
    own = _own_changes(tiny, model, before)
    with holdover.enable(model, "cache_dit", residual_diff_threshold=0.0, max_warmup_steps=1) as cache:
        assert all(torch.equal(a, b) for a, b in zip(run_generation(tiny, model), plain, strict=True))
        with cache.using(residual_diff_threshold=1.0):
            held = run_generation(tiny, model)
            assert cache.stats().last.trace("cond") == "Chhh" * (STEPS // 4)
        assert cache.reports()["transformer"].max_error < 1e-5
    assert all(torch.isfinite(output).all() for output in held)
    assert set(differences(before, snapshot(model))) <= own
    assert all(torch.equal(a, b) for a, b in zip(run_generation(tiny, model), plain, strict=True))


def _own_changes(tiny, model, before) -> set[str]:
    """What the plain model replaces on itself in every run."""
    run_generation(tiny, model, 2)
    return set(differences(before, snapshot(model)))


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in WORKING])
def test_a_class_that_is_refused_says_why(name: str) -> None:
    best = name if name in MODELS else next(key for key in MODELS if key.partition("[")[0] == name)
    found = run_cache_dit(MODELS[best])
    assert found == {"refused": support_of(name).cache_dit_refusal}
    assert name in found["refused"]
    assert "refused" in support_of(name).explain()


def test_at_least_45_classes_work() -> None:
    assert len(WORKING) >= 45
