"""What goes wrong on the way of a request, always told in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """An answer other than the one that was hoped for."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = _TYPES.get(self.status_code, "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an answer."""
        return JSONResponse(self.body, self.status_code, self.headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The request is wrong; `param` is the field that is."""
    return ApiError(400, message, code, param)


def too_large(message: str, param: str | None = None) -> ApiError:
    """The request is well formed and beyond a limit of this server."""
    return ApiError(413, message, "limit_exceeded", param)


def unavailable(message: str, code: str, seconds: int = 2) -> ApiError:
    """Not now; `seconds` is when to ask again."""
    return ApiError(503, message, code, headers={"Retry-After": str(seconds)})


def queue_full(waiting: int, seconds: int) -> ApiError:
    """Turned away: too many pictures wait."""
    message = f"{waiting} pictures wait already. Try again in {seconds} s."
    return ApiError(429, message, "queue_full", headers={"Retry-After": str(seconds)})


def client_gone() -> ApiError:
    """Nobody reads this; it is what logs and metrics count."""
    return ApiError(499, "The client went away.", "client_closed_request")


def internal() -> ApiError:
    """Something broke; what it was is in the server's log, not in the answer."""
    return ApiError(500, "The server failed at this request; its log says why, under this x-request-id.", "internal")
