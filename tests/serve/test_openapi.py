"""The OpenAPI document, and the server against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from holdover.serve import running
from holdover.serve.schemas import EXAMPLES


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with low limits, so that no request takes long."""
    with running(max_steps=1, max_images=1, max_size=64, cache_backend="mag_cache") as server:
        yield server.url


@pytest.fixture(scope="module")
def api(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
OPERATIONS = [
    ("GET", "/health", RIGHT),
    ("GET", "/ready", RIGHT),
    ("GET", "/metrics", RIGHT),
    ("GET", "/v1/cache", RIGHT),
    ("GET", "/v1/models", RIGHT),
    ("GET", "/v1/models/{model}", RIGHT),
    ("POST", "/v1/images/compare", RIGHT),
    ("POST", "/v1/images/compare", WRONG),
    ("POST", "/v1/images/edits", RIGHT),
    ("POST", "/v1/images/generations", RIGHT),
    ("POST", "/v1/images/generations", WRONG),
]


@pytest.mark.parametrize(("verb", "path", "mode"), OPERATIONS)
def test_the_server_conforms_to_its_document(api: Any, verb: str, path: str, mode: schemathesis.GenerationMode) -> None:
    operation = api[path][verb]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def keeps(case: Any) -> None:
        answer = case.call(timeout=300)
        # No schema says that a PNG is one or that two fields agree; and a limit is answered with 413.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance, negative_data_rejection])
        assert answer.status_code < 500
        assert not mode.is_negative or answer.status_code >= 400, answer.text

    keeps()


def test_the_document_is_complete(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json", timeout=300).json()
    assert set(document["paths"]) == {
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/compare",
        "/v1/videos",
        "/v1/videos/{video_id}",
        "/v1/videos/{video_id}/content",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/cache",
        "/health",
        "/ready",
        "/metrics",
    }
    responses = document["paths"]["/v1/images/generations"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "403", "404", "413", "429", "499", "500", "503"}
    assert "422" not in str(document)
    request = document["components"]["schemas"]["ImageRequest"]
    assert request["examples"] == EXAMPLES
    assert request["properties"]["steps"]["anyOf"][0]["maximum"] == 1
    assert all("description" in field for field in request["properties"].values())
    assert "Did you mean" in responses["400"]["content"]["application/json"]["example"]["error"]["message"]
    named = {option["title"]: option for option in request["properties"]["cache"]["anyOf"] if "title" in option}
    assert named["mag_cache"]["properties"]["mag_retention_ratio"]["maximum"] == 1
    assert named["tea_cache"]["properties"]["coefficients"]["anyOf"][0]["maxItems"] == 16
    edit = document["components"]["schemas"]["EditRequest"]
    assert edit["required"] == ["image", "prompt"]
    assert set(edit["properties"]) == {*request["properties"], "image", "strength", "input_fidelity"}
    video = document["components"]["schemas"]["VideoRequest"]["properties"]
    assert set(video) - set(request["properties"]) == {
        "seconds",
        "num_frames",
        "fps",
        "input_reference",
        "guidance_scale_2",
        "compare",
    }
    form = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]["$ref"]
    assert document["components"]["schemas"][form.rpartition("/")[2]]["properties"].keys() == video.keys()
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            assert operation["description"]
