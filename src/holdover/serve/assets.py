"""The page and what it loads: files of the package, nothing from elsewhere."""

from __future__ import annotations

from importlib import resources

from starlette.responses import Response

from .errors import ApiError

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_file(name: str) -> Response:
    """One file of the page."""
    folder = resources.files("holdover.serve").joinpath("page")
    known = {file.name: file for file in folder.iterdir()}
    kind = _KINDS.get(name[name.rfind(".") :] if "." in name else "")
    if name not in known or kind is None:
        raise ApiError(404, f"The page has no file {name!r}.", "not_found")
    return Response(known[name].read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
