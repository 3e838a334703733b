"""Which cache a request gets."""

from __future__ import annotations

from typing import Any

import pytest

from holdover.selector import methods
from holdover.serve.choice import choice, fields, requested, schemas
from holdover.serve.errors import ApiError

STANDING = choice("mag_cache", {"mag_threshold": 0.5, "mag_max_skip_steps": 2, "profile": "emoji"})
PLANNED = choice("plan", {"target": "psnr>=35", "profile": "mine.safetensors"})


def test_who_asks_for_nothing_gets_the_servers_own() -> None:
    assert requested(None, STANDING) is STANDING
    assert requested({}, STANDING) == STANDING


def test_settings_alone_change_the_servers_own() -> None:
    changed = requested({"mag_threshold": 0.1}, STANDING)
    assert changed.config == STANDING.config.replaced(mag_threshold=0.1)


def test_a_method_by_name_has_its_own_defaults_but_the_servers_profile() -> None:
    named = requested({"method": "mag_cache", "mag_threshold": 0.1}, STANDING)
    assert named == choice("mag_cache", {"mag_threshold": 0.1, "profile": "emoji"})
    assert requested({"method": "plan", "budget": "2x"}, PLANNED) == choice(
        "plan", {"budget": "2x", "profile": "mine.safetensors"}
    )


def test_a_target_is_a_plan() -> None:
    assert requested({"target": "psnr>=40"}, STANDING) == choice("plan", {"target": "psnr>=40"})
    assert requested({"target": "psnr>=40"}, PLANNED).config.as_dict()["profile"] == "mine.safetensors"


@pytest.mark.parametrize(
    ("cache", "param"),
    [
        ({"method": "plan", "budget": "2x", "target": "psnr>=40"}, "cache"),
        ({"budget": "0x"}, "cache.budget"),
        ({"method": "plan", "schedule": [0, 0]}, "cache.schedule"),
        ({"method": "plan", "profile": "/etc/passwd"}, "cache.profile"),
        ({"method": ["plan"]}, "cache.method"),
        ({"method": "pian"}, "cache.method"),
    ],
)
def test_the_field_that_is_wrong_is_named(cache: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        requested(cache, PLANNED)
    assert (refused.value.status_code, refused.value.param) == (400, param)


@pytest.mark.parametrize("method", methods())
def test_no_request_can_name_a_file(method: str) -> None:
    names = [field.name for field in fields(method)]
    assert list(schemas(method)) == names
    assert not [name for name in names if "path" in name or "profile" in name or "calibrate" in name]
