"""The page for people at `/`: a playground and a dashboard, of plain files beside this one.

The files themselves are open to everybody. They have no data in them: what they show they ask the other routes for,
with the key that a person has entered. The headers let a browser load nothing from elsewhere and run no text as code.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["PAGE_PATHS", "add_page"]

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class _File(NamedTuple):
    data: bytes
    kind: str
    etag: str


def _read() -> dict[str, _File]:
    """By path of the URL. Names are looked up, never joined to a folder."""
    files: dict[str, _File] = {}
    for file in sorted(FOLDER.iterdir()):
        kind = KINDS.get(file.suffix)
        if kind is not None:
            data = file.read_bytes()
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            files[path] = _File(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return files


_FILES = _read()
PAGE_PATHS = frozenset(_FILES)


def add_page(app: FastAPI) -> None:
    app.add_route("/", _page, ["GET"], include_in_schema=False)
    app.add_route("/page/{name}", _page, ["GET"], include_in_schema=False)


async def _page(request: Request) -> Response:
    """A file of the page."""
    file = _FILES.get(request.url.path)
    if file is None:
        return Response("There is no such file. The page is at /.\n", 404, HEADERS, "text/plain; charset=utf-8")
    headers = {**HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.kind)
