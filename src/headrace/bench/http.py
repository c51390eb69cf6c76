"""A small HTTP/1.1 client over asyncio: one request a connection, the answer's lines as they come."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Reply", "Server"]

MAX_LINE_BYTES = 1 << 24
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Reply:
    """The head of an answer; its body is still to come."""

    status: int
    _reader: asyncio.StreamReader
    _is_chunked: bool

    async def blocks(self) -> AsyncIterator[bytes]:
        if not self._is_chunked:
            while block := await self._reader.read(BLOCK_BYTES):
                yield block
            return
        while size := int((await self._reader.readline()).split(b";")[0] or b"0", 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)

    async def lines(self) -> AsyncIterator[bytes]:
        rest = b""
        async for block in self.blocks():
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def body(self) -> bytes:
        return b"".join([block async for block in self.blocks()])


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where a server is, and what every request to it carries."""

    url: str
    """`http://HOST:PORT`, perhaps with a path before /v1."""
    api_key: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url must be http://HOST:PORT or https://HOST:PORT, got {self.url!r}")

    @asynccontextmanager
    async def ask(self, method: str, path: str, data: bytes = b"") -> AsyncIterator[Reply]:
        """Raises OSError: nobody there, or the connection broke."""
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=MAX_LINE_BYTES)
        try:
            head = [
                f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
                f"Host: {parts.netloc}",
                "Connection: close",
                "Content-Type: application/json",
                f"Content-Length: {len(data)}",
            ]
            if self.api_key:
                head.append(f"Authorization: Bearer {self.api_key}")
            writer.write("\r\n".join([*head, "", ""]).encode() + data)
            await writer.drain()
            try:
                answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            except asyncio.IncompleteReadError:
                raise ConnectionError("the server closed the connection without an answer") from None
            yield Reply(int(answer.split(" ", 2)[1]), reader, "transfer-encoding: chunked" in answer)
        finally:
            writer.close()

    async def get_json(self, path: str) -> Any:
        """The JSON at `path`; None where the server has none there.

        Raises:
            ValueError: nobody answers at this address, or not without a key.
        """
        try:
            async with self.ask("GET", path) as reply:
                body = await reply.body()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ValueError(f"--url: no server answers at {self.url} ({error}): start one, or mend the URL") from None
        if reply.status in (401, 403):
            raise ValueError(f"--api_key: {self.url}{path} answered {reply.status}: give the server's key")
        return json.loads(body) if reply.status == 200 else None
