"""Images that a request sends: `/v1/images/edits` with a tiny FLUX pipeline, and with a model that takes no image."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusers import FluxImg2ImgPipeline
from PIL import Image

from holdover.serve import running
from holdover.serve.model import ServedModel, to_pixels
from tiny.prompted import prompted_flux

from .servers import PATIENCE, Server

FIELDS: dict[str, Any] = {"seed": 3, "steps": 8, "strength": 0.75, "guidance": 2.0}


def picture(width: int = 64, height: int = 64, kind: str = "PNG") -> bytes:
    colors = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colors).resize((width, height), Image.Resampling.NEAREST).save(file, kind)
    return file.getvalue()


def pixels(b64: str | None) -> Pixels:
    assert b64 is not None
    return np.array(Image.open(io.BytesIO(base64.b64decode(b64))))


Pixels = np.ndarray[Any, Any]


def edit_here(model: ServedModel) -> Pixels:
    """The image that diffusers' own pipeline makes of the same parts."""
    pipe = FluxImg2ImgPipeline(**model.pipeline.components)
    pipe.set_progress_bar_config(disable=True)
    output = pipe(
        prompt=["ghost"],
        image=Image.open(io.BytesIO(picture())).convert("RGB"),
        strength=0.75,
        num_inference_steps=8,
        guidance_scale=2.0,
        height=64,
        width=64,
        generator=[torch.Generator().manual_seed(3)],
        output_type="pt",
    )
    return to_pixels(output.images)[0]


@dataclass(frozen=True)
class Tiny:
    """A server with a pipeline that takes text alone, the model it serves, and an image of it without a cache."""

    url: str
    model: ServedModel
    plain: Pixels


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    model = ServedModel("tiny", prompted_flux())
    plain = edit_here(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdover.serve.worker.load_model", lambda settings: model)
        with running(model="tiny", max_size=128) as server:
            yield Tiny(server.url, model, plain)


@pytest.fixture
def client(tiny: Tiny) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="unused", max_retries=0)


def test_openais_client_edits_an_image(client: openai.OpenAI, tiny: Tiny) -> None:
    answer = client.images.edit(image=("a.png", picture()), prompt="ghost", extra_body=FIELDS)
    assert answer.data is not None
    assert np.array_equal(pixels(answer.data[0].b64_json), tiny.plain)
    how = answer.data[0].holdover  # type: ignore[attr-defined]
    assert sum(how["computed"].values()) == 6  # three quarters of the steps


def test_a_cache_holds_steps_of_an_edit_too(client: openai.OpenAI, tiny: Tiny) -> None:
    cache = '{"method": "tea_cache", "rel_l1_thresh": 1e9, "coefficients": [1.0, 0.0]}'  # a list goes as JSON
    form = {"prompt": "ghost", "cache": cache} | {name: str(value) for name, value in FIELDS.items()}
    files = {"image": ("a.png", picture(), "image/png")}
    answer = httpx.post(f"{tiny.url}/v1/images/edits", data=form, files=files, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    image = answer.json()["data"][0]
    assert list(image["holdover"]["held"].values()) == [4]
    assert np.array_equal(pixels(image["b64_json"]), edit_here(tiny.model))  # the server leaves its last cache enabled
    assert not np.array_equal(pixels(image["b64_json"]), tiny.plain)
    nothing_held = {**FIELDS, "cache": {"method": "tea_cache", "rel_l1_thresh": 0.0}}  # OpenAI's client: cache[method]
    exact = client.images.edit(image=("a.png", picture()), prompt="ghost", extra_body=nothing_held)
    assert exact.data is not None
    assert exact.data[0].holdover["method"] == "tea_cache"  # type: ignore[attr-defined]
    assert np.array_equal(pixels(exact.data[0].b64_json), tiny.plain)


def test_an_edit_is_streamed(client: openai.OpenAI, tiny: Tiny) -> None:
    *partial, done = client.images.edit(
        image=("a.png", picture()), prompt="ghost", stream=True, partial_images=2, extra_body=FIELDS
    )
    assert [event.type for event in partial] == ["image_edit.partial_image"] * 2
    assert [(event.step, event.steps) for event in partial] == [(2, 6), (4, 6)]  # type: ignore[union-attr]
    assert done.type == "image_edit.completed"
    assert np.array_equal(pixels(done.b64_json), tiny.plain)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_size_is_that_of_the_image_unless_given(client: openai.OpenAI, kind: str) -> None:
    for size, wanted in ((None, (96, 64)), ("auto", (96, 64)), ("64x64", (64, 64))):
        extra = FIELDS | ({} if size is None else {"size": size})
        answer = client.images.edit(image=("a", picture(100, 72, kind)), prompt="ghost", extra_body=extra)
        assert answer.data is not None
        assert pixels(answer.data[0].b64_json).shape[1::-1] == wanted


def test_each_image_of_an_edit_has_its_own_seed_and_batch(client: openai.OpenAI) -> None:
    answer = client.images.edit(image=("a.png", picture()), prompt="ghost", n=2, extra_body=FIELDS)
    assert answer.data is not None
    assert [one.holdover["seed"] for one in answer.data] == [3, 4]  # type: ignore[attr-defined]
    assert [one.holdover["batch"] for one in answer.data] == [1, 1]  # type: ignore[attr-defined]


def test_a_model_says_whether_it_edits(tiny: Tiny, server: Server) -> None:
    assert httpx.get(f"{tiny.url}/v1/models", timeout=PATIENCE).json()["data"][0]["edits"] is True
    assert server.http.get("/v1/models").json()["data"][0]["edits"] is False


def test_a_model_without_images_refuses_in_words(server: Server) -> None:
    answer = server.http.post("/v1/images/edits", data={"prompt": "ghost"}, files={"image": picture()})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "image"
    assert "emoji takes no image: EmojiPipeline generates from text" in answer.json()["error"]["message"]


WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"files": {"image": b"no image"}}, "image", "not a PNG, JPEG or WebP file"),
    ({"files": {"picture": picture()}}, "picture", "There is no file 'picture'"),
    ({"files": {"image": picture(), "mask": picture()}}, "mask", "mask is not supported"),
    ({"files": [("image[]", picture()), ("image[]", picture())]}, "image", "One image is needed, not 2"),
    ({"files": {"image": picture()}, "data": {}}, "prompt", "prompt is missing"),
    ({"files": {"image": picture()}, "data": {"prompt": "x", "stepz": "3"}}, "stepz", "Did you mean 'steps'?"),
    ({"files": {"image": picture()}, "data": {"prompt": "x", "strength": "2"}}, "strength", "less than or equal to 1"),
    (
        {"files": {"image": picture()}, "data": {"prompt": "x", "strength": "0.1", "steps": "3"}},
        "strength",
        "leaves none",
    ),
    ({"files": {"image": picture()}, "data": {"prompt": "x", "n": "two"}}, "n", "valid integer"),
    (
        {"files": {"image": picture()}, "data": {"prompt": "x", "cache": "x", "cache[method]": "pian"}},
        "cache.method",
        "plan",
    ),
    ({"json": {"prompt": "x"}}, None, "must be multipart/form-data"),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, None, "cannot be read"),
    ({"files": {"image": picture(600, 8)}}, "image", "the longest side may have 512 pixels"),
    ({"files": {"image": picture()}, "data": {f"a{i}": "x" for i in range(70)}}, None, "Too many fields"),
]


@pytest.mark.parametrize(("sent", "param", "said"), WRONG, ids=[row[2][:30] for row in WRONG])
def test_what_is_wrong_with_a_form_is_said(tiny: Tiny, sent: dict[str, Any], param: str | None, said: str) -> None:
    form = {"data": {"prompt": "x"}} | sent if "files" in sent else sent
    answer = httpx.post(f"{tiny.url}/v1/images/edits", timeout=PATIENCE, **form)
    assert answer.status_code in (400, 413)
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]
