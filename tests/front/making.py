"""What the tests of front ends share: a builder over the byte tokenizer and a client of a fake runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace import wire
from headrace.front.builder import RequestBuilder, RequestOptions
from headrace.front.client import Client
from headrace.front.fake import FakeLoop, FakeRuntime, fake_info
from headrace.front.request_output import RequestOutput
from headrace.params import SamplingParams
from headrace.text.tokenizer import ByteTokenizer
from headrace.types import Request

TOKENIZER = ByteTokenizer()
EOS = 257


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_builder(info: wire.ModelInfo | None = None, **options: Any) -> RequestBuilder:
    options.setdefault("eos_ids", frozenset({EOS}))
    return RequestBuilder(info or fake_info(), options.pop("tokenizer", TOKENIZER), **options)


def counted(start: int = 1) -> Any:
    """An allocator of request ids."""
    numbers = iter(range(start, 1 << 30))
    return lambda count: [next(numbers) for _ in range(count)]


def build(
    prompt: list[int], builder: RequestBuilder | None = None, options: RequestOptions | None = None, **params: Any
) -> list[Request]:
    builder = builder or make_builder()
    requests, _ = builder.build(prompt, SamplingParams(**params), allocate=counted(), options=options)
    return requests


@contextmanager
def client_of(loop: FakeLoop | None = None, *, step_s: float = 0.0) -> Iterator[Client]:
    loop = loop or FakeLoop(fake_info())
    client = Client(lambda on_message: FakeRuntime(on_message, loop=loop, step_s=step_s))
    client.start()
    try:
        client.wait_ready()
        yield client
    finally:
        client.close()


def submit(client: Client, text: str, *, streaming: bool = False, **params: Any) -> RequestOutput:
    assert client.info is not None
    requests, resolved = make_builder(client.info).build(
        ids_of(text), SamplingParams(**params), allocate=client.router.allocate
    )
    return client.submit(requests, resolved, tokenizer=TOKENIZER, prompt=text, streaming=streaming)
