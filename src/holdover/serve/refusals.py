"""What FastAPI would say in its own words, said in the shape of every error of this server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..errors import did_you_mean
from .errors import ApiError, invalid
from .schemas import CompareRequest, ImageRequest

_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/images/generations": ImageRequest,
    "/v1/images/compare": CompareRequest,
}


def install(app: FastAPI) -> None:
    """Answer every refusal of the framework as an ApiError."""
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _not_valid)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    path = request.url.path
    if error.status_code == 404:
        paths = request.app.openapi()["paths"]
        return ApiError(404, f"There is nothing at {path}.{did_you_mean(path, paths)}", "not_found").response()
    if error.status_code == 405:
        message = f"{path} does not take {request.method}."
        return ApiError(405, message, "method_not_allowed", headers=error.headers).response()
    return ApiError(error.status_code, str(error.detail), "invalid_request").response()


async def _not_valid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = _BODIES.get(request.url.path, ImageRequest)
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    return _told(problems[0], list(body.model_fields)).response()


def _told(problem: Mapping[str, Any], known: Sequence[str]) -> ApiError:
    where = [str(part) for part in problem["loc"] if part != "body"]
    param, kind = ".".join(where) or None, problem["type"]
    if kind == "json_invalid":
        return invalid(f"The request is not JSON: {problem['ctx']['error']}.", code="invalid_json")
    if param is None:
        return invalid("The request must be a JSON object, sent as application/json.", code="invalid_json")
    if kind == "extra_forbidden":
        hint = did_you_mean(param, known) or f" Fields: {', '.join(known)}."
        return invalid(f"There is no field {param!r}.{hint}", param, "unknown_field")
    if kind == "missing":
        return invalid(f"{param} is missing.", param, "missing_field")
    return invalid(f"{param}: {problem['msg']}.", param)
