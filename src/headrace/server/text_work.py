"""Answers that need the tokenizer and the template only: made on a worker thread, without the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.server.errors import error_response
from headrace.server.prepare import Kitchen
from headrace.server.reading import read_json
from headrace.server.replies import Refuse, reply
from headrace.server.service import Service

__all__ = ["answer_text"]


async def answer_text(
    service: Service,
    request: Request,
    work: Callable[[Kitchen, bytes], Any],
    refuse: Refuse = error_response,
) -> Response:
    """`work` makes the answer of the body; what it raises becomes `refuse`'s."""

    async def made() -> bytes:
        with service.entering() as kitchen:
            async with read_json(request) as data:
                return await asyncio.get_running_loop().run_in_executor(
                    service.workers, lambda: msgspec.json.encode(work(kitchen, data))
                )

    return await reply(made, refuse)
