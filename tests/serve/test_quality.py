"""A quality by name over HTTP, with a profile of the model that is served and without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdover
from holdover.serve import running
from holdover.serve.model import ServedModel
from tiny.prompted import prompted_flux, prompted_wan

from .servers import Client, eventually

STEPS = 8
FIELDS: dict[str, Any] = {"prompt": "yellow car", "steps": STEPS, "seed": 7, "guidance": 3.5}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    """The same tiny FLUX with a profile that is certified for 45 dB, and without a profile."""
    pipe, path = prompted_flux(), tmp_path_factory.mktemp("profile") / "tiny.safetensors"
    measured = holdover.calibrate(pipe, ["red apple", "a blue dog"], STEPS, effort="quick", progress=False)
    prompts, sure = ["a green tree", "a house", "a tram", "a hat"], {"share": 0.5, "confidence": 0.9}
    found = holdover.tune(pipe, measured, prompts, "psnr>=45", progress=False, **sure)
    assert found.certificate is not None
    found.profile.with_quality("balanced", "psnr>=60").save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdover.serve.worker.load_model", lambda settings: ServedModel("tiny", prompted_flux()))
        config = json.dumps({"profile": str(path), "budget": 4})
        with running(model="tiny", cache_backend="plan", cache_config=config) as planned, running(model="tiny") as bare:
            yield Client(planned.url), Client(bare.url)


def image(client: Client, **request: Any) -> dict[str, Any]:
    answer = client.generate(**FIELDS | request)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return {"notes": body["notes"], **body["data"][0]}


def test_a_quality_is_the_plan_of_its_target(servers: tuple[Client, Client]) -> None:
    planned, _ = servers
    top, inside = image(planned, quality="high"), image(planned, cache={"quality": "high"})
    target = image(planned, cache={"target": "psnr>=40"})
    assert top["b64_json"] == inside["b64_json"] == target["b64_json"]
    assert top["holdover"]["trace"] == inside["holdover"]["trace"] == target["holdover"]["trace"]
    assert (top["holdover"]["method"], top["holdover"]["settings"]["quality"], top["notes"]) == ("plan", "high", [])
    (note,) = top["holdover"]["notes"]
    assert "quality high is psnr>=40: certified for psnr>=45" in note


def test_the_profile_sets_the_target(servers: tuple[Client, Client]) -> None:
    planned, _ = servers
    balanced, target = image(planned, quality="balanced"), image(planned, cache={"target": "psnr>=60"})
    assert balanced["holdover"]["trace"] == target["holdover"]["trace"] != image(planned)["holdover"]["trace"]
    assert "quality balanced is psnr>=60: expected, not certified" in balanced["holdover"]["notes"][0]


def test_a_stream_says_it_too(servers: tuple[Client, Client]) -> None:
    planned, _ = servers
    text = planned.generate(**FIELDS, quality="draft", stream=True).text
    done = json.loads(text.rpartition("data: ")[2])
    assert "quality draft is psnr>=30: certified for psnr>=45" in done["holdover"]["notes"][0]


@pytest.mark.parametrize("quality", ["lossless", "balanced", "draft"])
def test_without_a_profile_it_is_an_error_that_says_how_to_make_one(
    servers: tuple[Client, Client], quality: str
) -> None:
    _, bare = servers
    answer = bare.generate(**FIELDS, quality=quality)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("quality", "cannot_cache")
    assert f"quality '{quality}' needs a profile of tiny: measure one with `holdover calibrate" in error["message"]


def test_without_a_profile_openais_high_is_ignored_with_a_note(servers: tuple[Client, Client]) -> None:
    _, bare = servers
    plain = image(bare)
    for quality in ("high", "medium"):
        ignored = image(bare, quality=quality)
        assert ignored["b64_json"] == plain["b64_json"]
        assert ignored["holdover"]["method"] == "none"
        (note,) = ignored["notes"]
        assert note.startswith("quality is ignored: lossless, high, balanced, draft choose a plan")
    inside = bare.generate(**FIELDS, cache={"quality": "high"})  # no other API has this field
    assert (inside.status_code, inside.json()["error"]["param"]) == (400, "cache.quality")
    assert "holdover.calibrate" in inside.json()["error"]["message"]


def test_a_video_has_a_quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 5}
    pipe, path = prompted_wan(), tmp_path / "wan.safetensors"
    holdover.calibrate(pipe, ["a cat", "a boat"], STEPS, effort="quick", progress=False, **size).save(path)
    monkeypatch.setattr("holdover.serve.worker.load_model", lambda settings: ServedModel("tiny", pipe))
    asked = {"prompt": "a cat runs", "size": "64x64", "num_frames": 5, "steps": STEPS, "seed": 3}
    config = json.dumps({"profile": str(path)})
    with running(model="tiny", video_dir=str(tmp_path / "v"), cache_backend="plan", cache_config=config) as server:
        http = Client(server.url).http

        def video(**request: Any) -> dict[str, Any]:
            created = http.post("/v1/videos", json=asked | request).json()
            assert eventually(lambda: http.get(f"/v1/videos/{created['id']}").json()["status"] == "completed")
            found: dict[str, Any] = http.get(f"/v1/videos/{created['id']}").json()
            return found

        draft, target = video(quality="draft"), video(cache={"target": "psnr>=30"})
    assert draft["holdover"]["trace"] == target["holdover"]["trace"]
    assert "quality draft is psnr>=30: expected, not certified" in draft["holdover"]["notes"][0]
    with running(model="tiny", video_dir=str(tmp_path / "v")) as server:
        http = Client(server.url).http
        refused = http.post("/v1/videos", json=asked | {"quality": "draft"}).json()["error"]
        assert refused["param"] == "quality"
        assert http.post("/v1/videos", json=asked | {"quality": "high"}).json()["notes"][0].startswith("quality is ign")
