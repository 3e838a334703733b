"""Image files: encoding what is generated, decoding what a request sends, and requests that may have a file."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import typing
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from .errors import invalid, invalid_json, too_large
from .queue import Pixels, Size
from .schemas import MAX_FIELDS, EditRequest, Format, GenerationRequest, VideoRequest
from .settings import Settings

_DEFAULT_QUALITY = 95  # of jpeg and webp; above it files grow, but hardly their quality
_UNREADABLE = (PIL.Image.DecompressionBombError, OSError, ValueError, SyntaxError)


def encode_image(pixels: Pixels, size: Size, kind: Format = "png", quality: int | None = None) -> str:
    """An image of (H, W, 3) bytes as a file in base64, resized to `size` if it has another."""
    image = PIL.Image.fromarray(pixels)
    if image.size != size:
        image = image.resize(size, PIL.Image.Resampling.LANCZOS)
    file = io.BytesIO()
    options = {} if kind == "png" else {"quality": _DEFAULT_QUALITY if quality is None else quality}
    image.save(file, kind.upper(), **options)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_png(name: str, text: str, max_size: int) -> torch.Tensor:
    """A PNG in base64 as a tensor (3, H, W) in [0, 1]; `name` is its field."""
    try:
        image = PIL.Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
        if max(image.size) > max_size:
            raise too_large(f"{name} is {image.width}x{image.height}; the longest side may have {max_size}.", name)
        pixels = np.array(image.convert("RGB"))
    except (binascii.Error, *_UNREADABLE):
        raise invalid(f"{name} is not a PNG in base64.", name) from None
    return torch.from_numpy(pixels).permute(2, 0, 1).double() / 255


def decode_upload(content: bytes, max_size: int, field: str = "image") -> PIL.Image.Image:
    """An uploaded file as an upright RGB image, scaled down to the size that the server allows."""
    try:
        image = PIL.Image.open(io.BytesIO(content), formats=["PNG", "JPEG", "WEBP"])
        if max(image.size) > 4 * max_size:
            limit = f"the longest side may have {4 * max_size} pixels."
            raise too_large(f"{field} is {image.width}x{image.height}; {limit}", field)
        upright: PIL.Image.Image = PIL.ImageOps.exif_transpose(image).convert("RGB")
        upright.thumbnail((max_size, max_size))
    except _UNREADABLE:
        raise invalid(f"{field} is not a PNG, JPEG or WebP file.", field) from None
    return upright


async def read_edit(request: Request, max_size: int) -> tuple[EditRequest, PIL.Image.Image]:
    """The fields and the image of an edit."""
    if _media_type(request) != "multipart/form-data":
        raise invalid("The request must be multipart/form-data with the file in the field image.", code="invalid_form")
    fields, files = await _read_form(request, EditRequest, "image", MAX_PART)
    if len(files) != 1:
        raise invalid(f"One image is needed, not {len(files)}.", "image")
    return fields, await asyncio.to_thread(decode_upload, files[0], max_size)


async def read_video_request(request: Request, settings: Settings) -> tuple[VideoRequest, PIL.Image.Image | None]:
    """The fields of a form or of JSON, and the image to start from if there is one."""
    field, media_type = "input_reference", _media_type(request)
    if media_type == "multipart/form-data":
        fields, files = await _read_form(request, VideoRequest, field, settings.max_body)
    elif media_type in ("", "application/json") or media_type.endswith("+json"):
        try:
            values = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise invalid_json(error) from None
        fields, files = _check_fields(request, VideoRequest, values), []
    else:
        message = "The request must be application/json, or multipart/form-data if it has a file"
        raise invalid(f"{message}, not {media_type[:100]}.", code="invalid_json")
    if fields.input_reference is not None:
        head, _, data = fields.input_reference.image_url.partition("base64,")
        try:
            if not head.startswith("data:"):
                raise invalid("image_url must be a data: URL, or send a file: this server fetches nothing.", field)
            files.append(base64.b64decode(data, validate=True))
        except ValueError:  # also for text that is not ASCII
            raise invalid(f"{field} is not in base64.", field) from None
    if len(files) > 1:
        raise invalid(f"One image is needed, not {len(files)}.", field)
    return fields, await asyncio.to_thread(decode_upload, files[0], settings.max_size, field) if files else None


def _media_type(request: Request) -> str:
    """The type of the body in lower case, without parameters; empty if the request names none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


Fields = TypeVar("Fields", bound=GenerationRequest)


class _FormParser(MultiPartParser):
    """Starlette's parser, which drops a part that is cut off; `complete` once the closing boundary was read."""

    complete = False

    def on_end(self) -> None:
        self.complete = True


async def _read_form(request: Request, schema: type[Fields], field: str, max_part: int) -> tuple[Fields, list[bytes]]:
    """The fields of a multipart request, as OpenAI's clients send it, and the files in `field`.

    Form fields are text: what is not text in the request is parsed as JSON. `cache[method]` is a key of `cache`.
    """
    files, values, hints = list[bytes](), dict[str, Any](), typing.get_type_hints(schema)

    async def chunks() -> AsyncGenerator[bytes, None]:
        async for chunk in request.stream():
            yield chunk
        if not parser.complete:  # raised here, so that the parser closes its files
            raise MultiPartException("It ends early, before its closing boundary.")

    parser = _FormParser(request.headers, chunks(), max_files=4, max_fields=MAX_FIELDS, max_part_size=max_part)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise invalid(f"The form cannot be read: {error.message}", code="invalid_form") from None
    except UnicodeError:
        raise invalid("The form cannot be read: Its text is not in its charset.", code="invalid_form") from None
    try:
        for name, value in form.multi_items():
            if name in (field, f"{field}[]") and isinstance(value, UploadFile):
                files.append(await value.read())
            elif name == "mask":
                raise invalid("mask is not supported: this server changes the whole image.", "mask")
            elif isinstance(value, UploadFile):
                message = f"There is no file {name[:100]!r}: send the image in the field {field}."
                raise invalid(message, name, "unknown_field")
            elif name.endswith("]") and "[" in name:
                outer, _, inner = name[:-1].partition("[")
                others = values[outer] if isinstance(values.get(outer), dict) else {}
                values[outer] = {**others, inner: _parse(value)}
            else:
                is_text = str in (hints.get(name), *typing.get_args(hints.get(name)))
                values[name] = value if is_text else _parse(value)
    finally:
        await form.close()
    return _check_fields(request, schema, values), files


def _check_fields(request: Request, schema: type[Fields], values: Any) -> Fields:
    """The fields of a request that FastAPI does not read, with the errors of those that it reads."""
    request.state.schema = schema  # for a hint at the right name
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(problems) from None


MAX_PART = 100_000  # bytes of a form field that is not a file


def _parse(text: str) -> Any:
    """A form field as the JSON value that it spells, else as text, which the schema then refuses or takes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
