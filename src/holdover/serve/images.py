"""Image files: encoding what is generated, decoding what a request sends, and the form of a request with a file."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import typing
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from .errors import ApiError, invalid, too_large
from .queue import Pixels, Size
from .schemas import MAX_FIELDS, EditRequest, Format

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


def decode_upload(content: bytes, max_size: int) -> PIL.Image.Image:
    """An uploaded file as an upright RGB image, scaled down to the size that the server allows."""
    try:
        image = PIL.Image.open(io.BytesIO(content), formats=["PNG", "JPEG", "WEBP"])
        if max(image.size) > 4 * max_size:
            limit = f"the longest side may have {4 * max_size} pixels."
            raise too_large(f"image is {image.width}x{image.height}; {limit}", "image")
        upright: PIL.Image.Image = PIL.ImageOps.exif_transpose(image).convert("RGB")
        upright.thumbnail((max_size, max_size))
    except _UNREADABLE:
        raise invalid("image is not a PNG, JPEG or WebP file.", "image") from None
    return upright


async def read_edit_form(request: Request, max_size: int) -> tuple[EditRequest, PIL.Image.Image]:
    """The fields and the image of a multipart request, as OpenAI's clients send it.

    Form fields are text: what is not text in the request is parsed as JSON. `cache[method]` is a key of `cache`.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise invalid("The request must be multipart/form-data with the file in the field image.", code="invalid_form")
    try:
        form = await request.form(max_files=4, max_fields=MAX_FIELDS, max_part_size=MAX_PART)
    except ApiError:
        raise
    except HTTPException as error:
        raise invalid(f"The form cannot be read: {error.detail}", code="invalid_form") from None
    try:
        return await _read_fields(form, max_size)
    finally:
        await form.close()


async def _read_fields(form: FormData, max_size: int) -> tuple[EditRequest, PIL.Image.Image]:
    files, values = list[UploadFile](), dict[str, Any]()
    for name, value in form.multi_items():
        if name in ("image", "image[]") and isinstance(value, UploadFile):
            files.append(value)
        elif name == "mask":
            raise invalid("mask is not supported: this server changes the whole image.", "mask")
        elif isinstance(value, UploadFile):
            raise invalid(f"There is no file {name[:100]!r}: send the image in the field image.", name, "unknown_field")
        elif name.endswith("]") and "[" in name:
            outer, _, inner = name[:-1].partition("[")
            values[outer] = {**(values[outer] if isinstance(values.get(outer), dict) else {}), inner: _parse(value)}
        else:
            values[name] = value if name in _TEXTS else _parse(value)
    if len(files) != 1:
        raise invalid(f"One image is needed, not {len(files)}.", "image")
    try:
        fields = EditRequest.model_validate(values)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(problems) from None
    content = await files[0].read()
    return fields, await asyncio.to_thread(decode_upload, content, max_size)


MAX_PART = 100_000  # bytes of a form field that is not a file

_TEXTS = frozenset(
    name for name, hint in typing.get_type_hints(EditRequest).items() if str in (hint, *typing.get_args(hint))
)
"""Fields that are text in the request too."""


def _parse(text: str) -> Any:
    """A form field as the JSON value that it spells, else as text, which the schema then refuses or takes."""
    try:
        return json.loads(text)
    except ValueError:
        return text
