"""What runs a request of the model for a route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from headrace.server.errors import error_response
from headrace.server.prepare import Kitchen, Prepared
from headrace.server.replies import Refuse
from headrace.server.tenancy import Caller

__all__ = ["Generate", "Prepare"]

Prepare = Callable[[Kitchen, bytes, Caller], Prepared]


class Generate(Protocol):
    async def __call__(self, request: Request, prepare: Prepare, refuse: Refuse = error_response) -> Response: ...
