"""Many clients at once: batches, clients that disconnect, a full queue, a server that is stopped."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from PIL import Image

from .servers import PATIENCE, Server, eventually

LONG = {"steps": 100, "guidance": 3.0, "cache": {"method": "none"}}  # as many as the server allows


@contextmanager
def occupied(server: Server, until_waiting: int) -> Iterator[None]:
    """The worker is busy inside the block and then until the queue has so many images: they are taken together."""
    asked = {"prompt": "rocket", "stream": True, "partial_images": 20, **LONG}
    with server.http.stream("POST", "/v1/images/generations", json=asked) as answer:
        lines = answer.iter_lines()  # kept until the end: httpx closes the connection when its iterator is dropped
        next(line for line in lines if line.startswith("data:"))
        yield
        assert eventually(lambda: server.metric("holdover_queue_length") == until_waiting)


def at_once(server: Server, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first image of each request, all of which wait in the queue together."""
    with ThreadPoolExecutor(len(requests)) as pool:
        with occupied(server, len(requests)):
            answers = [pool.submit(server.generate, **request) for request in requests]
        return [answer.result().json()["data"][0] for answer in answers]


def worst(a: str, b: str) -> int:
    """The largest difference between two images, of 255."""
    first, second = (Image.open(io.BytesIO(base64.b64decode(x))).tobytes() for x in (a, b))
    return max(abs(x - y) for x, y in zip(first, second, strict=True))


# Batches


@pytest.mark.parametrize("cache", [{"method": "none"}, {"method": "mag_cache"}])
def test_images_generated_together_are_those_generated_alone(server: Server, cache: dict[str, Any]) -> None:
    subjects = ["red apple", "rocket", "ghost"]
    requests = [{"prompt": subject, "seed": i, "steps": 5, "cache": cache} for i, subject in enumerate(subjects)]
    alone = [server.generate(**request).json()["data"][0] for request in requests]
    together = at_once(server, requests)
    assert [image["holdover"]["batch"] for image in alone] == [1, 1, 1]
    assert [image["holdover"]["batch"] for image in together] == [3, 3, 3]
    for one, other in zip(alone, together, strict=True):
        assert one["holdover"]["trace"] == other["holdover"]["trace"]
        assert worst(one["b64_json"], other["b64_json"]) <= 1  # a batch rounds its sums in another order


def test_a_method_that_decides_by_the_data_generates_each_image_alone(server: Server) -> None:
    requests = [{"seed": i, "steps": 5, "cache": {"method": "tea_cache"}} for i in range(2)]
    alone = [server.generate(**request).json()["data"][0]["b64_json"] for request in requests]
    together = at_once(server, requests)
    assert [image["holdover"]["batch"] for image in together] == [1, 1]
    assert [image["b64_json"] for image in together] == alone


def test_requests_that_differ_share_no_batch(server: Server) -> None:
    changes: list[dict[str, Any]] = [{"steps": 2}, {"guidance": 2.0}, {"cache": {"mag_threshold": 0.1}}]
    for image, change in zip(at_once(server, changes), changes, strict=True):
        assert image["holdover"]["batch"] == 1
        assert image["b64_json"] == server.generate(**change).json()["data"][0]["b64_json"]


# Clients that leave


def test_when_the_client_of_a_stream_leaves_the_generation_stops_and_the_next_image_is_exact(server: Server) -> None:
    reference = server.generate(seed=5, steps=6).json()["data"][0]["b64_json"]
    (stopped, gone), complete = stops(server), finished(server)
    asked = {"prompt": "rocket", "stream": True, "partial_images": 20, **LONG}
    with server.http.stream("POST", "/v1/images/generations", json=asked) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data:"))
    assert server.generate(seed=5, steps=6).json()["data"][0]["b64_json"] == reference
    assert eventually(lambda: stops(server) == (stopped + 1, gone + 1))
    assert finished(server) == complete  # the steps did not all run


def test_when_a_client_closes_its_connection_the_generation_stops(server: Server) -> None:
    (stopped, gone), complete = stops(server), finished(server)
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    with occupied(server, 1):  # its own stream is left at the end of the block
        body = json.dumps({"prompt": "rocket", **LONG})
        connection.request("POST", "/v1/images/generations", body, {"content-type": "application/json"})
    assert eventually(lambda: server.metric("holdover_queue_length") == 0)  # the worker has taken it
    connection.close()
    assert eventually(lambda: stops(server) == (stopped + 2, gone + 2))
    assert finished(server) == complete
    assert "Traceback" not in server.log
    assert "never retrieved" not in server.log


def test_the_rest_of_a_batch_goes_on_when_one_client_leaves(server: Server) -> None:
    asked: dict[str, Any] = {"steps": 8, "guidance": 1.0, "cache": {"method": "none"}}
    alone = server.generate(seed=8, **asked).json()["data"][0]["b64_json"]

    def leave_early() -> None:
        stream = {"prompt": "rocket", "seed": 9, "stream": True, "partial_images": 7, **asked}
        with server.http.stream("POST", "/v1/images/generations", json=stream) as answer:
            next(line for line in answer.iter_lines() if line.startswith("data:"))

    with ThreadPoolExecutor(2) as pool:
        with occupied(server, 2):
            staying, leaving = pool.submit(server.generate, seed=8, **asked), pool.submit(leave_early)
        leaving.result()
        image = staying.result().json()["data"][0]
    assert image["holdover"]["batch"] == 2
    assert worst(image["b64_json"], alone) <= 1


def stops(server: Server) -> tuple[float, float]:
    """Images that were stopped, and requests whose client was gone."""
    answers = server.metric("holdover_requests_total", route="/v1/images/generations", status="499")
    return server.metric("holdover_cancelled_images_total"), answers


def finished(server: Server) -> float:
    """Images generated without a cache."""
    return server.metric("holdover_images_total", method="none")


# A server with room for one, a key and a page elsewhere that may use it; it is stopped at the end

KEY = "correct horse"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    flags = ("--queue-size", "1", "--max-images", "1", "--cors-origin", "https://pages.example")
    server = Server(*flags, environment={"HOLDOVER_API_KEYS": f"other, {KEY}"}).wait_until_ready()
    server.http.headers.update(AUTHORIZED)
    yield server
    server.stop()


@pytest.mark.parametrize("sent", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/cache", "/metrics"])
def test_a_wrong_key_is_rejected(small: Server, path: str, sent: dict[str, str]) -> None:
    answer = httpx.get(small.url + path, headers=sent, timeout=PATIENCE)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(small.url + path, headers=AUTHORIZED, timeout=PATIENCE).status_code == 200


def test_health_and_the_page_need_no_key(small: Server) -> None:
    for path in ("/health", "/ready", "/"):
        assert httpx.get(small.url + path, timeout=PATIENCE).status_code == 200


def test_pages_of_an_allowed_origin_may_use_the_server(small: Server) -> None:
    asks = {"origin": "https://pages.example", "access-control-request-method": "POST"}
    path = f"{small.url}/v1/images/generations"
    allowed = httpx.options(path, headers=asks, timeout=PATIENCE)
    assert allowed.headers["access-control-allow-origin"] == "https://pages.example"
    other = httpx.options(path, headers=asks | {"origin": "https://other.example"}, timeout=PATIENCE)
    assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_says_when_to_try_again(small: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        with occupied(small, 1):
            waiting = pool.submit(small.generate)
            assert eventually(lambda: small.metric("holdover_queue_length") == 1)
            refused = small.generate()
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert waiting.result().status_code == 200


def test_sigterm_finishes_running_requests_and_accepts_no_more(small: Server) -> None:
    asked = {"prompt": "rocket", "steps": 10, "guidance": 1.0, "seed": 1, "stream": True, "partial_images": 20}
    lines: list[str] = []
    begun = threading.Event()

    def follow() -> None:
        with httpx.stream(
            "POST", f"{small.url}/v1/images/generations", json=asked, headers=AUTHORIZED, timeout=PATIENCE
        ) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    follower = threading.Thread(target=follow)
    follower.start()
    assert begun.wait(PATIENCE)
    assert small.stop() == 0
    follower.join()
    done = json.loads([line for line in lines if line.startswith("data:")][-1].removeprefix("data:"))
    assert done["type"] == "image_generation.completed"
    assert done["holdover"]["computed"] == {"cond": 10}
    assert "Traceback" not in small.log
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{small.url}/health")
