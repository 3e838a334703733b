"""With few steps there is nothing to gain: each method says so once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import holdover
from tiny.prompted import prompted_flux

MAG = {"mag_ratios": [1.0] * 8}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return prompted_flux()


def messages(pipe: Any, method: str, steps: int, **settings: Any) -> list[str]:
    """The warnings of two generations under one cache."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", holdover.HoldoverWarning)
        with holdover.enable(pipe, method, **settings):
            for _ in range(2):
                pipe("red apple", num_inference_steps=steps, output_type="latent")
    return [str(w.message) for w in caught if issubclass(w.category, holdover.HoldoverWarning)]


def test_a_short_generation_is_mentioned_once_per_enable(pipe: Any) -> None:
    for _ in range(2):
        (message,) = messages(pipe, "mag_cache", 4, **MAG)
        assert message.startswith("With 4 steps there is little to hold: below 8 steps mag_cache")


@pytest.mark.parametrize(
    ("method", "steps", "settings"),
    [
        ("mag_cache", 8, MAG),
        ("none", 4, {}),
        ("mag_cache", 4, {"calibrate": True}),
        ("plan", 4, {"schedule": (0, 2)}),
    ],
)
def test_long_generations_measurements_and_given_schedules_are_not(
    pipe: Any, method: str, steps: int, settings: dict[str, Any]
) -> None:
    assert messages(pipe, method, steps, **settings) == []
