"""Who may use the server: hosts, origins, keys and rates. The application is never started, so nothing is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from holdover.serve import Settings, create_app
from holdover.serve.errors import ApiError
from holdover.serve.middleware import RateLimits


def ask(settings: Settings, path: str = "/health", method: str = "GET", **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(settings, ["right", "other"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(
                method, path, headers=headers, json={"prompt": "x"} if method == "POST" else None
            )

    return asyncio.run(send())


LOCAL = ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "page.localhost", "LOCALHOST."]


@pytest.mark.parametrize("host", LOCAL)
def test_addresses_and_localhost_are_always_allowed(host: str) -> None:
    for settings in (Settings(), Settings(allowed_host=("images.example",)), Settings(host="0.0.0.0")):
        assert ask(settings, host=host).status_code == 200


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "rebound.example", 403),
        ({"host": "localhost"}, "rebound.example:8000", 403),
        ({"host": "::1"}, "rebound.example", 403),
        ({"host": "0.0.0.0"}, "images.example", 200),
        ({"host": "192.168.1.7"}, "images.example", 200),
        ({"allowed_host": ("images.example", "*.lan")}, "images.example:443", 200),
        ({"allowed_host": ("images.example", "*.lan")}, "box.lan", 200),
        ({"allowed_host": ("images.example", "*.lan")}, "evil.example", 403),
        ({"host": "0.0.0.0", "allowed_host": ("images.example",)}, "evil.example", 403),
        ({"allowed_host": ("*",)}, "anything", 200),
    ],
)
def test_a_host_name_must_be_this_servers(settings: dict[str, Any], host: str, status: int) -> None:
    answer = ask(Settings(**settings), host=host)
    assert answer.status_code == status
    if status == 403:
        assert "--allowed-host" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 503),  # the model is not loaded
        ({"origin": "http://localhost"}, 503),
        ({"origin": "https://pages.example"}, 503),
        ({"origin": "https://other.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_cannot_post(headers: Mapping[str, str], status: int) -> None:
    settings = Settings(cors_origin=("https://pages.example",))
    for path in ("/v1/images/generations", "/v1/images/edits"):
        answer = ask(settings, path, "POST", authorization="Bearer right", **headers)
        assert answer.status_code == status


def test_a_wrong_key_is_not_called_missing() -> None:
    missing, wrong = (ask(Settings(), "/v1/models", **headers) for headers in ({}, {"authorization": "Bearer wrong"}))
    assert (missing.status_code, wrong.status_code) == (401, 401)
    assert "requires a key" in missing.json()["error"]["message"]
    assert wrong.json()["error"]["message"] == "This key is wrong."


def test_a_request_without_images_is_small() -> None:
    async def send(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(create_app(Settings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=b" " * 1_000_001)

    assert asyncio.run(send("/v1/images/generations")).status_code == 413
    assert asyncio.run(send("/v1/images/compare")).status_code == 400


def test_requests_are_counted_by_client_and_refilled_evenly() -> None:
    rates = RateLimits(3)
    for _ in range(3):
        rates.check("a", now=100.0)
    with pytest.raises(ApiError, match="At most 3 requests per minute are allowed. Try again in 20 s.") as refused:
        rates.check("a", now=100.0)
    assert (refused.value.status_code, refused.value.headers) == (429, {"Retry-After": "20"})
    rates.check("b", now=100.0)
    with pytest.raises(ApiError, match="Try again in 1 s"):
        rates.check("a", now=119.5)
    rates.check("a", now=120.0)
    for _ in range(3):  # a minute's worth is kept, never more
        rates.check("a", now=1000.0)
    with pytest.raises(ApiError):
        rates.check("a", now=1000.0)


def test_no_limit_counts_nothing() -> None:
    rates = RateLimits(0)
    for _ in range(100):
        rates.check("a", now=0.0)


def test_the_number_of_counted_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RateLimits, "MAX_CLIENTS", 10)
    rates = RateLimits(60)
    for i in range(100):
        rates.check(str(i), now=float(i))
    assert len(rates._buckets) <= 11


def test_rates_are_those_of_a_key() -> None:
    async def send() -> list[int]:
        transport = httpx.ASGITransport(create_app(Settings(rate_limit=2), ["right", "other"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            keys = ["right", "right", "right", "other", "wrong"]
            path, body = "/v1/images/generations", {"prompt": "x"}
            answers = [await client.post(path, json=body, headers={"authorization": f"Bearer {key}"}) for key in keys]
            assert int(answers[2].headers["retry-after"]) >= 1
            assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
            reading = await client.get("/v1/models", headers={"authorization": "Bearer right"})
            return [answer.status_code for answer in (*answers, reading)]

    assert asyncio.run(send()) == [503, 503, 429, 503, 401, 503]  # 503: the model is not loaded
