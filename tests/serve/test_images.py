"""Bodies of requests that may have an image: JSON and forms that are broken, cut off, nested, or of another type."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tiny.prompted import prompted_wan

from .servers import Client, Server
from .test_edits import picture
from .test_videos import serving

JSON, FORM = "application/json", "multipart/form-data; boundary=edge"
NESTED, LONG = "[" * 100_000, "9" * 5000  # deeper than the parser goes; more digits than Python converts
HUGE = "9" * 400  # more than a float can be
PATHS = {"/v1/videos": "input_reference", "/v1/images/edits": "image"}  # and the field of the image


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(prompted_wan(), tmp_path_factory.mktemp("videos")) as tiny:
        yield tiny


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def post(client: Client, path: str, body: str | bytes, media_type: str | None) -> httpx.Response:
    headers = {} if media_type is None else {"content-type": media_type}
    return client.http.post(path, content=body, headers=headers)


def form(*fields: tuple[str, bytes]) -> bytes:
    """A form with boundary `edge`; a field whose value is an image is a file."""
    parts = []
    for name, value in fields:
        file = '; filename="a.png"' if value.startswith(b"\x89PNG") else ""
        parts.append(f'--edge\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value)
    return b"\r\n".join(parts) + b"\r\n--edge--\r\n"


def message(answer: httpx.Response, status: int = 400, param: str | None = None) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert HUGE not in answer.text
    return str(error["message"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f'{{"prompt": "x", "cache": {NESTED}', "The request is not JSON: it is nested too deeply."),
        (f'{{"prompt": "x", "steps": {LONG}}}', "The request is not JSON: a number in it has too many digits."),
        (b'{"prompt": "\xff"}', "The request is not JSON: it is not text in UTF-8."),
    ],
    ids=["nested", "digits", "bytes"],
)
def test_json_that_cannot_be_parsed_is_said(videos: Client, server: Server, body: str | bytes, said: str) -> None:
    assert message(post(videos, "/v1/videos", body, JSON)) == said
    assert message(post(server, "/v1/images/generations", body, JSON)) == said


@pytest.mark.parametrize("field", ["cache", "cache[method]", "steps"])
def test_json_in_a_form_field_that_cannot_be_parsed_is_text(
    videos: Client, server: Server, path: str, field: str
) -> None:
    client, files = (videos, []) if path == "/v1/videos" else (server, [("image", picture())])
    for value in (NESTED[:50_000], LONG):
        body = form(("prompt", b"x"), (field, value.encode()), *files)
        answer = post(client, path, body, FORM)
        assert answer.status_code in (400, 413), answer.text
        assert len(answer.text) < 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (f'"num_frames": {HUGE}', "num_frames"),
        (f'"steps": {HUGE}', "steps"),
        (f'"steps": {HUGE}, "num_inference_steps": 3', "steps"),
        (f'"guidance": {HUGE}', "guidance"),
        (f'"fps": {HUGE}', "fps"),
        (f'"seconds": {HUGE}', "seconds"),
        (f'"seconds": "{HUGE}"', "seconds"),
        (f'"seed": {HUGE}', "seed"),
        ('"seconds": [1]', "seconds"),
        ('"seconds": true', "seconds"),
        ('"seconds": "\\ud800"', "seconds"),
    ],
)
def test_a_number_that_is_too_large_is_not_repeated(videos: Client, fields: str, param: str) -> None:
    assert len(message(post(videos, "/v1/videos", f'{{"prompt": "x", {fields}}}', JSON), 400, param)) < 120


@pytest.mark.parametrize("field", ["n", "steps", "num_inference_steps", "partial_images", "output_compression", "seed"])
def test_the_same_for_images(server: Server, field: str) -> None:
    for more in ("", ', "steps": 3' if field == "num_inference_steps" else ""):
        body = f'{{"prompt": "x", "stream": true, "{field}": {HUGE}{more}}}'
        message(post(server, "/v1/images/generations", body, JSON), 400, field)
    body = form(("prompt", b"x"), ("image", picture()), (field, HUGE.encode()))
    message(post(server, "/v1/images/edits", body, FORM), 400, field)


@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}", f"[{HUGE}]", f'{{"cond": [{HUGE}]}}'])
@pytest.mark.parametrize("name", ["mag_threshold", "mag_ratios", "method"])
def test_the_same_for_the_settings_of_a_cache(server: Server, name: str, value: str) -> None:
    body = f'{{"prompt": "x", "cache": {{"{name}": {value}}}}}'
    assert message(post(server, "/v1/images/generations", body, JSON), 413, f"cache.{name}").endswith(
        "has a number above 9007199254740991."
    )


def test_a_form_that_ends_early_is_refused_wherever_it_is_cut(videos: Client, server: Server, path: str) -> None:
    client: Client = videos if path == "/v1/videos" else server
    whole = form(("prompt", b"x"), (PATHS[path], picture()))
    for cut in (0, 3, 20, 80, len(whole) // 2, len(whole) - 12, len(whole) - 3):
        said = message(post(client, path, whole[:cut], FORM))
        assert said == "The form cannot be read: It ends early, before its closing boundary.", cut
    for end in (whole[:-2], whole + b"epilogue"):  # complete
        assert "takes no image" in message(post(client, path, end, FORM), 400, PATHS[path])
    assert "ends early" in message(post(client, path, form(("prompt", b"x"))[:-6], FORM))


def test_a_charset_that_decodes_nothing_is_an_error(videos: Client) -> None:
    answer = post(videos, "/v1/videos", form(("prompt", b"x")), f"{FORM}; charset=undefined")
    assert message(answer) == "The form cannot be read: Its text is not in its charset."


def test_the_type_of_a_form_may_be_in_any_case(videos: Client, server: Server, path: str) -> None:
    client: Client = videos if path == "/v1/videos" else server
    body = form(("prompt", b"x"), (PATHS[path], picture()))
    for media_type in ("Multipart/Form-Data; Boundary=edge", "MULTIPART/FORM-DATA ;boundary=edge"):
        assert "takes no image" in message(post(client, path, body, media_type), 400, PATHS[path])


@pytest.mark.parametrize(
    "media_type", [None, "", JSON, f"{JSON}; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_json_needs_no_type(videos: Client, media_type: str | None) -> None:
    body = json.dumps({"prompt": "x", "num_frames": 6})
    assert "multiple of 4 plus 1" in message(post(videos, "/v1/videos", body, media_type), 400, "num_frames")


@pytest.mark.parametrize(
    "media_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/mixed; boundary=edge", "image/png"]
)
def test_another_type_is_refused_with_the_types_that_are_read(videos: Client, media_type: str) -> None:
    said = message(post(videos, "/v1/videos", '{"prompt": "x"}', media_type))
    name = media_type.partition(";")[0]
    assert said == f"The request must be application/json, or multipart/form-data if it has a file, not {name}."


def test_names_and_values_that_are_no_text_are_errors(videos: Client, server: Server) -> None:
    surrogate = '"\\ud800"'
    for client, path in ((videos, "/v1/videos"), (server, "/v1/images/generations")):
        for fields in (f"{surrogate}: 1", f'"cache": {{{surrogate}: 1}}', f'"cache": {{"method": {surrogate}}}'):
            more = ', "num_frames": 5' if path == "/v1/videos" else ""
            answer = post(client, path, f'{{"prompt": "x", {fields}{more}}}', JSON)
            assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("data", ["!", "\u00e9\u00e9\u00e9\u00e9"])
def test_a_reference_that_is_not_base64_is_an_error(videos: Client, data: str) -> None:
    request = {"prompt": "x", "input_reference": {"image_url": f"data:image/png;base64,{data}"}}
    answer = post(videos, "/v1/videos", json.dumps(request), JSON)
    assert message(answer, 400, "input_reference") == "input_reference is not in base64."
