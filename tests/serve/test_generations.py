"""Images over HTTP: requests as curl sends them, and those of OpenAI's client."""

from __future__ import annotations

import base64
import io
from typing import Any

import openai
import pytest
import torch
from PIL import Image

import holdover
from holdover.selector import methods

from .servers import Server, image_bytes, nearly_equal

PROMPT = "red apple, glossy 3d style"
FEW = {"steps": 3, "guidance": 1.0}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def pipe() -> Any:
    pipe = holdover.load("emoji")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def opened(b64: str | None) -> Image.Image:
    assert b64 is not None
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def generated_here(pipe: Any, seed: int = 1, steps: int = 3) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    image: Image.Image = pipe(PROMPT, num_inference_steps=steps, guidance_scale=1.0, generator=generator).images[0]
    return image


# The request of the proposal, as written there


def test_the_request_of_the_proposal_works_as_written(server: Server) -> None:
    answer = server.http.post(
        "/v1/images/generations",
        json={
            "prompt": "a dragon laying over the spine of the Green Mountains of Vermont",
            "size": "1024x1024",
            "num_inference_steps": 50,
            "cfg_scale": 4.0,
            "guidance_scale": 4.0,
            "seed": 42,
        },
    )
    assert answer.status_code == 200
    image = answer.json()["data"][0]
    assert opened(image["b64_json"]).size == (1024, 1024)
    how = image["holdover"]
    assert (how["method"], how["steps"], how["seed"], how["drawn_size"]) == ("mag_cache", 50, 42, "64x64")
    assert how["settings"]["mag_threshold"] == 0.24
    assert how["computed"]["cond"] + how["held"]["cond"] == 50
    assert how["held"]["cond"] > 25


# OpenAI's client


def test_a_plain_image_is_the_one_the_pipeline_generates(client: openai.OpenAI, pipe: Any) -> None:
    answer = client.images.generate(prompt=PROMPT, extra_body={"seed": 1, "cache": {"method": "none"}, **FEW})
    assert answer.data is not None
    assert nearly_equal(image_bytes(answer.data[0].b64_json), generated_here(pipe).tobytes())
    how = answer.data[0].holdover  # type: ignore[attr-defined]
    assert how["computed"] == {"cond": 3}
    assert how["held"] == {"cond": 0}
    assert how["trace"] == {"cond": "CCC"}


def test_a_cached_image_is_the_one_holdover_generates(client: openai.OpenAI, pipe: Any) -> None:
    settings = {"mag_threshold": 0.5, "mag_max_skip_steps": 2, "mag_retention_ratio": 0.1}
    asked = {"seed": 4, "steps": 8, "guidance": 1.0, "cache": {"method": "mag_cache", **settings}}
    answer = client.images.generate(prompt=PROMPT, extra_body=asked)
    assert answer.data is not None
    with holdover.enable(pipe, "mag_cache", **settings) as cache:
        here = generated_here(pipe, seed=4, steps=8)
        last = cache.stats().last
    assert last is not None
    assert last.held_total > 0
    assert answer.data[0].holdover["trace"] == {"cond": last.trace("cond")}  # type: ignore[attr-defined]
    assert nearly_equal(image_bytes(answer.data[0].b64_json), here.tobytes())


def test_another_method_for_one_request_leaves_no_trace_in_the_next(server: Server) -> None:
    before = server.generate(steps=6).json()["data"][0]
    for method in [name for name in methods() if name != "mag_cache"]:
        other = server.generate(steps=6, cache={"method": method}).json()["data"][0]
        after = server.generate(steps=6).json()["data"][0]
        assert (other["holdover"]["method"], after["holdover"]["method"]) == (method, "mag_cache")
        assert after["holdover"]["trace"] == before["holdover"]["trace"] != other["holdover"]["trace"]
        assert after["b64_json"] == before["b64_json"] != other["b64_json"]


def test_settings_without_a_method_change_the_default(server: Server) -> None:
    how = server.generate(steps=6, cache={"mag_max_skip_steps": 1}).json()["data"][0]["holdover"]
    assert how["method"] == "mag_cache"
    assert (how["settings"]["mag_threshold"], how["settings"]["mag_max_skip_steps"]) == (0.24, 1)
    assert "hh" not in how["trace"]["cond"]


def test_several_images_have_consecutive_seeds(client: openai.OpenAI, server: Server) -> None:
    answer = client.images.generate(prompt=PROMPT, n=2, extra_body={"seed": 7, **FEW})
    assert answer.data is not None
    hows = [image.holdover for image in answer.data]  # type: ignore[attr-defined]
    assert [how["seed"] for how in hows] == [7, 8]
    alone = server.generate(seed=8).json()["data"][0]
    assert nearly_equal(image_bytes(alone["b64_json"]), image_bytes(answer.data[1].b64_json), share=0.001)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2 * 256


def test_without_a_seed_every_image_is_different(server: Server) -> None:
    first, second = (server.generate(seed=None).json()["data"][0] for _ in range(2))
    assert first["holdover"]["seed"] != second["holdover"]["seed"]
    assert server.generate(seed=first["holdover"]["seed"]).json()["data"][0]["b64_json"] == first["b64_json"]


def test_a_url_is_the_image_itself(client: openai.OpenAI) -> None:
    asked = {"seed": 1, **FEW}
    image = client.images.generate(prompt=PROMPT, response_format="url", extra_body=asked).data
    assert image is not None
    assert image[0].b64_json is None
    kind, _, b64 = (image[0].url or "").partition(",")
    assert kind == "data:image/png;base64"
    assert opened(b64).size == (64, 64)


def test_a_stream_has_previews_and_the_image(client: openai.OpenAI, server: Server) -> None:
    asked = {"seed": 3, "steps": 6, "guidance": 1.0}
    stream = client.images.generate(prompt=PROMPT, stream=True, partial_images=2, extra_body=asked)
    *partial, done = list(stream)
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 2
    assert [event.partial_image_index for event in partial] == [0, 1]  # type: ignore[union-attr]
    assert [event.step for event in partial] == [2, 4]  # type: ignore[union-attr]
    assert done.type == "image_generation.completed"
    assert done.usage.input_tokens == server.generate(steps=1).json()["usage"]["input_tokens"] > 3
    assert done.b64_json == server.generate(**asked).json()["data"][0]["b64_json"]
    whole = done.holdover["trace"]["cond"]  # type: ignore[attr-defined]
    assert [event.trace["cond"] for event in partial] == [whole[:2], whole[:4]]  # type: ignore[union-attr]
    apart = [distance(event.b64_json, done.b64_json) for event in partial]
    assert apart[0] > apart[1] > 0  # each is nearer to the image than the one before


def distance(a: str, b: str) -> int:
    return sum(abs(x - y) for x, y in zip(image_bytes(a), image_bytes(b), strict=True))


def test_a_stream_without_partial_images_is_one_event(client: openai.OpenAI) -> None:
    (done,) = client.images.generate(prompt=PROMPT, stream=True, extra_body={"seed": 1, **FEW})
    assert done.type == "image_generation.completed"


def test_a_failure_inside_a_stream_reaches_the_client(client: openai.OpenAI) -> None:
    asked = {**FEW, "cache": {"method": "tea_cache", "signal": "no such signal"}}
    with pytest.raises(openai.APIError, match="signal"):
        list(client.images.generate(prompt=PROMPT, stream=True, extra_body=asked))


# Fields of OpenAI's API


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")])
def test_the_output_format_is_honoured(client: openai.OpenAI, kind: Any, magic: bytes) -> None:
    answer = client.images.generate(prompt=PROMPT, output_format=kind, size="auto", extra_body={"seed": 1, **FEW})
    assert answer.data is not None
    assert base64.b64decode(answer.data[0].b64_json or "").startswith(magic)
    assert (answer.output_format, answer.notes) == (kind, [])  # type: ignore[attr-defined]
    (done,) = client.images.generate(prompt=PROMPT, output_format=kind, stream=True, extra_body={"seed": 1, **FEW})
    assert base64.b64decode(done.b64_json).startswith(magic)
    assert done.output_format == kind
    url = client.images.generate(prompt=PROMPT, output_format=kind, response_format="url", extra_body=FEW).data
    assert url is not None
    assert (url[0].url or "").startswith(f"data:image/{kind};base64,")


def test_a_lower_compression_quality_gives_a_smaller_file(server: Server) -> None:
    sizes = []
    for quality in (100, 10):
        answer = server.generate(output_format="jpeg", output_compression=quality, size="256x256")
        sizes.append(len(answer.json()["data"][0]["b64_json"]))
    assert sizes[0] > 2 * sizes[1]


def test_fields_without_a_meaning_are_ignored_with_a_note(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt=PROMPT,
        quality="hd",
        style="vivid",
        background="transparent",
        moderation="low",
        output_compression=50,
        user="someone",
        extra_body={"seed": 1, **FEW},
    )
    notes: list[str] = answer.notes  # type: ignore[attr-defined]
    named = ["quality", "style", "background", "moderation", "user", "output_compression"]
    assert [note.split(" is ignored: ")[0] for note in notes] == named
    silent = client.images.generate(prompt=PROMPT, quality="auto", background="opaque", extra_body={"seed": 1, **FEW})
    assert silent.notes == []  # type: ignore[attr-defined]
    assert silent.data is not None
    assert answer.data is not None
    assert silent.data[0].b64_json == answer.data[0].b64_json
    asked = {"seed": 1, "quality": "low", **FEW}
    (done,) = client.images.generate(prompt=PROMPT, stream=True, extra_body=asked)
    (note,) = done.notes  # type: ignore[union-attr]
    assert "lossless, high, balanced, draft choose a plan" in note


# Errors


WRONG: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"promt": "x"}, 400, "promt", "Did you mean 'prompt'?"),
    ({"anything": "x"}, 400, "anything", "There is no field 'anything'. Fields: prompt, "),
    ({"quality": "ultra"}, 400, "quality", "'auto', 'low'"),
    ({"quality": "high", "cache": {"method": "mag_cache"}}, 400, "quality", "a setting of 'plan', not of 'mag_cache'"),
    ({"quality": "high", "cache": {"method": "plan", "budget": 2}}, 400, "quality", "not budget and quality"),
    ({"quality": "high", "cache": {"schedule": [0]}}, 400, "quality", "not quality and schedule"),
    ({"quality": "high", "cache": {"quality": "draft"}}, 400, "quality", "send only one"),
    ({"quality": "high", "cache": {"mag_threshold": 0.1}}, 400, "cache.mag_threshold", "a setting of 'mag_cache'"),
    ({"cache": {"quality": "hihg"}}, 400, "cache.quality", "Did you mean 'high'?"),
    ({"cache": {"quality": "high", "target": "psnr>=30"}}, 400, "cache", "not target and quality"),
    ({"output_format": "gif"}, 400, "output_format", "'png', 'jpeg' or 'webp'"),
    ({"prompt": ""}, 400, "prompt", "at least 1 character"),
    ({"prompt": 3}, 400, "prompt", "valid string"),
    ({"prompt": "x" * 1001}, 413, "prompt", "1001 characters; at most 1000"),
    ({"model": "emojy"}, 404, "model", "Did you mean 'emoji'?"),
    ({"n": 5}, 413, "n", "at most 4 images"),
    ({"n": 0}, 400, "n", "greater than or equal to 1"),
    ({"n": 2, "stream": True}, 400, "n", "A stream has one image"),
    ({"size": "64 by 64"}, 400, "size", "match pattern"),
    ({"size": "64x32"}, 400, "size", "generates squares, such as 64x64"),
    ({"size": "1025x1025"}, 413, "size", "1024 pixels"),
    ({"steps": 101}, 413, "steps", "at most 100"),
    ({"num_inference_steps": 4}, 400, "num_inference_steps", "steps is 3 and num_inference_steps is 4"),
    ({"cfg_scale": 2.0}, 400, "cfg_scale", "guidance is 1 and cfg_scale is 2"),
    ({"partial_images": 2}, 400, "partial_images", "set stream to true"),
    ({"partial_images": 21, "stream": True}, 413, "partial_images", "at most 20"),
    ({"seed": -1}, 400, "seed", "greater than or equal to 0"),
    ({"cache": {"method": "magcache"}}, 400, "cache.method", "Did you mean 'mag_cache'?"),
    ({"cache": {"method": 3}}, 400, "cache.method", "must be a name"),
    ({"cache": {"mag_treshold": 0.1}}, 400, "cache.mag_treshold", "Did you mean 'mag_threshold'?"),
    ({"cache": {"rel_l1_thresh": 0.1}}, 400, "cache.rel_l1_thresh", "a setting of 'tea_cache'"),
    ({"cache": {"mag_threshold": -1}}, 400, "cache.mag_threshold", "at least 0"),
    ({"cache": {"mag_ratios": [0]}}, 400, "cache.mag_ratios", "positive"),
    ({"cache": {"calibration_path": "/tmp/x"}}, 400, "cache.calibration_path", "--cache-config"),
    ({"cache": {"profile": "/etc/passwd"}}, 400, "cache.profile", "--cache-config"),
    ({"cache": {"method": "tea_cache", "signal": "nothing"}}, 400, "cache", "nothing"),
    ({"cache": {"method": "tea_cache", "coefficients": [0.1] * 17}}, 413, "cache.coefficients", "at most 16"),
    ({"cache": {"mag_ratios": [1.0] * 101}}, 413, "cache.mag_ratios", "at most 100"),
    ({"cache": {"mag_ratios": {"cond": [1.0] * 101}}}, 413, "cache.mag_ratios", "at most 100"),
    ({"cache": {"mag_ratios": [[[1.0]]]}}, 400, "cache.mag_ratios", "lists inside lists"),
    ({"cache": {"method": "plan", "schedule": list(range(101))}}, 413, "cache.schedule", "at most 100"),
    ({"cache": {"method": "plan", "budget": "1" * 201}}, 413, "cache.budget", "at most 200"),
    ({"cache": {"method": "cache_dit", "max_warmup_steps": 10**9}}, 413, "cache.max_warmup_steps", "at most 1000"),
    ({"cache": {"mag_max_skip_steps": 1001}}, 413, "cache.mag_max_skip_steps", "at most 1000"),
    ({"cache": {"x" * 201: 1}}, 413, "cache", "201 characters"),
    ({"cache": {f"x{i}": 1 for i in range(65)}}, 413, "cache", "65 settings; at most 64"),
    ({"cache": {"target": "psnr>40"}}, 400, "cache.target", "A target looks like 'psnr>=40'"),
    ({"cache": {"method": "plan", "target": "pnsr>=40"}}, 400, "cache.target", "Did you mean 'psnr'?"),
]


@pytest.mark.parametrize(("change", "status", "param", "said"), WRONG, ids=[str(row[0])[:40] for row in WRONG])
def test_an_error_says_what_is_wrong_with_the_request(
    server: Server, change: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    answer = server.generate(**change)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ('{"prompt":', "application/json", "not JSON"),
        ("[1]", "application/json", "must be a JSON object"),
        ('{"prompt": "x"}', "text/plain", "application/json"),
        ('{"prompt": "\\ud800"}', "application/json", "unicode"),
        ('{"prompt": "x", "guidance": NaN}', "application/json", "finite"),
    ],
)
def test_a_body_that_is_no_request_is_an_error(server: Server, content: str, kind: str, said: str) -> None:
    answer = server.http.post("/v1/images/generations", content=content, headers={"content-type": kind})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.images.generate(prompt=PROMPT, size="64x32")  # type: ignore[call-overload]
    assert (wrong.value.param, wrong.value.code, wrong.value.type) == ("size", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt=PROMPT, model="dall-e-3")
    assert [model.id for model in client.models.list()] == ["emoji"]
    assert client.models.retrieve("emoji").id == "emoji"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")
