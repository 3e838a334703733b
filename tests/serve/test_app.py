"""Paths other than generations: models, cache, compare, metrics, the page; and what every response has."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from holdover.selector import config_class, methods

from .servers import Server, eventually

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


def png(color: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> str:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_every_response_has_a_request_id_and_keeps_the_clients(server: Server) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", server.http.get("/health").headers["x-request-id"])
    assert server.http.get("/nothing", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert server.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(server: Server) -> None:
    assert "Did you mean" not in server.http.get("/nothing/like/it").text
    missing = server.http.get("/v1/modles")
    assert missing.status_code == 404
    assert "Did you mean '/v1/models'?" in missing.json()["error"]["message"]
    wrong = server.http.put("/health")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "GET"
    assert server.http.get("/page/../settings.py").status_code == 404


def test_a_request_beyond_the_limit_is_not_read(server: Server) -> None:
    answer = server.http.post("/v1/images/generations", content=b" " * 8_000_001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "limit_exceeded")

    def chunks() -> object:
        for _ in range(9):
            yield b" " * 1_000_000

    chunked = server.http.post(
        "/v1/images/generations",
        content=chunks(),
        headers={"content-type": "application/json"},  # type: ignore[arg-type]
    )
    assert chunked.status_code == 413


def test_a_request_with_a_million_coefficients_costs_nothing(server: Server) -> None:
    def ask(count: int) -> tuple[int, str]:
        cache = {"method": "tea_cache", "coefficients": [0.1] * count}
        answer = server.generate(cache=cache)
        return answer.status_code, answer.json()["error"]["message"]

    assert ask(1_000_000) == (413, "The request is larger than 1000000 bytes.")
    assert ask(100_000) == (413, "cache.coefficients has 100000 values; at most 16 are allowed.")


def test_a_request_with_many_fields_is_one_error(server: Server) -> None:
    answer = server.generate(**{f"a{i}": 0 for i in range(50_000)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, None)
    assert "at most 64 are allowed" in answer.json()["error"]["message"]


def test_a_model_has_its_defaults_and_limits(server: Server) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["size"], model["steps"], model["partial_images"]) == ("emoji", "64x64", 30, True)
    assert model["styles"]["fluent3d"] == "glossy 3d style"
    limits = {"max_size": 1024, "max_steps": 100, "max_images": 4, "max_prompt": 1000, "max_previews": 20}
    limits["max_frames"] = 161
    assert model["limits"] == limits
    assert (model["square"], model["guidance"], model["negative_prompt"], model["edits"]) == (True, 3.0, True, False)
    assert server.http.get("/v1/models/emoji").json() == model


def test_the_cache_reports_its_default_and_totals(server: Server) -> None:
    before = server.http.get("/v1/cache").json()
    generated = server.generate(steps=6).json()["data"][0]["holdover"]
    after = server.http.get("/v1/cache").json()
    assert (after["method"], after["settings"]["mag_threshold"]) == ("mag_cache", 0.24)
    assert after["last"] == generated
    assert after["profile"]["name"] == "emoji"
    assert after["profile"]["source"]
    done = before["totals"].get("mag_cache", {"computed": 0, "held": 0, "images": 0})
    gained = {name: after["totals"]["mag_cache"][name] - done[name] for name in done if name != "peak_bytes"}
    assert (gained["computed"], gained["held"]) == (generated["computed"]["cond"], generated["held"]["cond"])
    assert gained["images"] == 1
    assert after["totals"]["mag_cache"]["peak_bytes"] >= generated["held_bytes"] > 0


def test_the_methods_are_listed_with_their_settings(server: Server) -> None:
    listed = server.http.get("/v1/cache").json()["methods"]
    assert [entry["method"] for entry in listed] == list(methods())
    for entry in listed:
        names = [setting["name"] for setting in entry["settings"]]
        assert set(names) <= set(config_class(entry["method"]).field_names())
        assert not [name for name in names if "path" in name or "calibrate" in name or name == "profile"]
    mag = next(entry for entry in listed if entry["method"] == "mag_cache")
    ratio = next(setting for setting in mag["settings"] if setting["name"] == "mag_retention_ratio")
    assert (ratio["kind"], ratio["default"], ratio["minimum"], ratio["maximum"]) == ("number", 0.1, 0, 1)


def test_two_images_are_compared(server: Server) -> None:
    def compare(a: str, b: str) -> dict[str, object]:
        answer: dict[str, object] = server.http.post("/v1/images/compare", json={"a": a, "b": b}).json()
        return answer

    assert compare(png((0, 0, 0)), png((0, 0, 0))) == {"psnr": None, "ssim": None, "lpips": None, "equal": True}
    apart = compare(png((0, 0, 0)), png((51, 51, 51)))
    assert apart["equal"] is False
    large = compare(png((0, 0, 0), (32, 32)), png((0, 0, 0), (32, 32)))
    assert large == {"psnr": None, "ssim": 1.0, "lpips": 0.0, "equal": True}
    assert apart["psnr"] == pytest.approx(13.979, abs=1e-3)  # 20 log10(255 / 51)
    for a, b in ((png((0, 0, 0)), png((0, 0, 0), (4, 4))), (png((0, 0, 0)), "nonsense"), ("AAAA", "AAAA")):
        assert compare(a, b)["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert server.http.post("/v1/images/compare", json={"a": png((0, 0, 0), (2000, 1)), "b": "x"}).status_code == 413


def test_metrics_count_what_happened(server: Server) -> None:
    def counts() -> dict[str, float]:
        return {
            "ok": server.metric("holdover_requests_total", route="/v1/images/generations", status="200"),
            "computed": server.metric("holdover_steps_total", method="mag_cache", kind="computed"),
            "held": server.metric("holdover_steps_total", method="mag_cache", kind="held"),
            "images": server.metric("holdover_images_total", method="mag_cache"),
            "hits": server.metric("holdover_prompt_cache_total", result="hit"),
            "latency": server.metric("holdover_request_seconds_count", route="/v1/images/generations"),
            "queue": server.metric("holdover_queue_seconds_count"),
            "batches": server.metric("holdover_batch_size_count"),
        }

    server.generate()
    before = counts()
    info = server.generate(steps=6).json()["data"][0]["holdover"]
    gained = {
        "ok": 1,
        "computed": info["computed"]["cond"],
        "held": info["held"]["cond"],
        "images": 1,
        "hits": 1,
        "latency": 1,
        "queue": 1,
        "batches": 1,
    }
    assert eventually(lambda: {name: value - before[name] for name, value in counts().items()} == gained)
    assert server.metric("holdover_held_bytes", method="mag_cache") == info["held_bytes"]
    assert server.metric("holdover_ready") == 1


def test_the_dashboard_uses_metrics_that_exist(server: Server) -> None:
    server.generate()
    text = server.http.get("/metrics").text
    known = set(re.findall(r"^(holdover_\w+?)(?:_total|_bucket|_sum|_count|_created)?(?:\{| )", text, re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {
        re.sub(r"_(total|bucket|sum|count)$", "", name)
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"holdover_\w+", target["expr"])
    }
    assert len(asked) >= 9
    assert asked <= known


def test_the_page_loads_nothing_from_elsewhere(server: Server) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert "/page/main.js" in parts
    parts += re.findall(r'(?:src|href)="([^"#]+)"', server.http.get("/docs").text)
    for part in {*parts, "/page/api.js", "/page/controls.js", "/page/charts.js"} - {"/openapi.json"}:
        answer = server.http.get(part)
        assert answer.status_code == 200, part
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), part


def test_other_pages_may_not_use_the_server(server: Server) -> None:
    answer = server.http.get("/v1/models", headers={"origin": "https://example.com"})
    assert "access-control-allow-origin" not in answer.headers
