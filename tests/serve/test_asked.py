"""Requests understood for models other than the one in the box."""

from __future__ import annotations

from typing import Any

import pytest

from holdover.serve.asked import Asked
from holdover.serve.choice import choice
from holdover.serve.errors import ApiError
from holdover.serve.model import Facts
from holdover.serve.schemas import ImageRequest
from holdover.serve.settings import Settings

FLUX = Facts(
    name="flux",
    pipeline="FluxPipeline",
    transformer="FluxTransformer2DModel",
    parameters=frozenset({"guidance_scale", "true_cfg_scale", "negative_prompt", "callback_on_step_end"}),
    steps=28,
    size=(512, 512),
    multiple=16,
    fixed=False,
    partial_images=True,
)
BARE = Facts("bare", "BarePipeline", "BareModel", frozenset(), 20, (64, 64), 8, False, False)


def asked(facts: Facts = FLUX, **request: Any) -> Asked:
    return Asked(ImageRequest(prompt="x", **request), facts, Settings(), choice("none", {}))


def test_what_is_left_open_is_the_models_own() -> None:
    job = asked().job
    assert (job.size, job.steps, job.guidance, job.negative) == ((512, 512), 28, (), False)
    assert asked(size="auto").size == (512, 512)


def test_a_model_with_two_scales_gets_both() -> None:
    job = asked(guidance=3.5, cfg_scale=4.0, negative_prompt="blur").job
    assert job.guidance == (("guidance_scale", 3.5), ("true_cfg_scale", 4.0))
    assert job.negative


def test_a_picture_is_drawn_in_the_size_asked_for() -> None:
    found = asked(size="640x480")
    assert (found.size, found.job.size, found.size_name) == ((640, 480), (640, 480), "640x480")


def test_the_servers_limit_holds_for_the_models_default_too() -> None:
    found = Asked(ImageRequest(prompt="x"), FLUX, Settings(max_steps=4), choice("none", {}))
    assert found.job.steps == 4


@pytest.mark.parametrize(
    ("facts", "request_", "param", "said"),
    [
        (FLUX, {"size": "500x512"}, "size", "multiples of 16"),
        (BARE, {"guidance": 2.0}, "guidance", "no guidance to set"),
        (BARE, {"negative_prompt": "blur"}, "negative_prompt", "takes no negative prompt"),
        (BARE, {"stream": True, "partial_images": 1}, "partial_images", "cannot be shown unfinished"),
    ],
)
def test_what_a_model_cannot_do_is_said(facts: Facts, request_: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        asked(facts, **request_)
    assert (refused.value.status_code, refused.value.param) == (400, param)


def test_each_picture_of_a_request_has_its_own_seed_and_the_same_job() -> None:
    found = asked(n=3, seed=5)
    tickets = [found.ticket(i, lambda event: None, "id") for i in range(3)]
    assert [ticket.order.seed for ticket in tickets] == [5, 6, 7]
    assert {ticket.job for ticket in tickets} == {found.job}
