"""The server whose APIs are tried field by field: small requests of each, and what reached the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headrace.front.fake import FakeLoop, fake_info, says
from headrace.front.text_side import TextSide
from headrace.types import Request

from .harness import Server, running, text_side

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ reasoning_effort or '' }}{{ suffix or '' }}"
)
HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 40},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 40},
    RESPONSES: {"input": "hi", "max_output_tokens": 40},
    MESSAGES: {"messages": HI, "max_tokens": 40},
}
BOS, EOS = 256, 257
SAID = [BOS, *b"abc", EOS, *b"def"]
NO_INT = ('"five"', "1.5", "NaN", "true", "[]")
"""JSON texts that are no whole number."""


class Served(NamedTuple):
    server: Server
    requests: list[Request]
    """Grows by each that reaches the engine."""


@contextmanager
def serve(folder: Path, **options: Any) -> Iterator[Served]:
    """A server that says SAID; options: as of `running`."""
    requests: list[Request] = []

    def script(request: Request) -> Iterator[int]:
        requests.append(request)
        return says(SAID)(request)

    def text() -> TextSide:
        return text_side(folder, template=TEMPLATE)

    with running(folder, loop=FakeLoop(fake_info(), script=script), load_text=text, **options) as server:
        yield Served(server, requests)
