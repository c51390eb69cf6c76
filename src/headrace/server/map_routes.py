"""The route that shows what the KV cache's blocks are in use for, and the top of its prefix tree."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace import wire
from headrace.server.replies import reply
from headrace.server.service import Service
from headrace.server.tenancy import Caller, salt_of

__all__ = ["add_map_routes"]

MAX_AGE_S = 1.0
"""However many look, the engine is asked once in so long for each salt."""
MAX_KEPT = 32
TOKENS_PER_PREFIX = 48
"""As many as are told of a prefix's text."""


def add_map_routes(app: FastAPI, service: Service) -> None:
    app.add_route("/kv_cache/map", _MapRoutes(service).map, ["GET"])


class _Kept(NamedTuple):
    made_s: float
    answer: asyncio.Task[bytes]


class _MapRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._kept: dict[str, _Kept] = {}
        """By salt."""

    async def map(self, request: Request) -> Response:
        """The blocks by tier and layer group, and the top of the prefix tree; at most a second old."""
        return await reply(lambda: self._map(Caller.of(request.headers)))

    async def _map(self, caller: Caller) -> bytes:
        salt = salt_of(caller, None, from_api_key=self._service.options.cache_salt_from_api_key)
        now_s = time.monotonic()
        kept = self._kept.get(salt)
        if kept is None or now_s - kept.made_s > MAX_AGE_S:
            self._kept = {key: one for key, one in self._kept.items() if now_s - one.made_s <= MAX_AGE_S}
            kept = _Kept(now_s, asyncio.create_task(self._ask(salt)))
            if len(self._kept) < MAX_KEPT:
                self._kept[salt] = kept
        return await asyncio.shield(kept.answer)

    async def _ask(self, salt: str) -> bytes:
        service = self._service
        options, info = service.options, service.info()
        told = options.operations.show_cached_text
        question = wire.GetCacheMap(
            salt=salt,
            with_others=not options.cache_salt_from_api_key,  # they are other tenants
            max_tokens=TOKENS_PER_PREFIX if told else 0,
        )
        answer = await service.ask(question)
        assert isinstance(answer, wire.CacheMap)
        texts = await asyncio.get_running_loop().run_in_executor(service.workers, self._texts, answer)
        values: dict[str, Any] = {
            "tokens_per_block": info.tokens_per_block,
            "block_reuse": info.reuse.is_on,
            "has_text": told,
            "is_own_only": options.cache_salt_from_api_key,
            "num_hidden": answer.num_hidden,
            "pools": [{**msgspec.structs.asdict(pool), "num_free": pool.num_free} for pool in answer.pools],
            "prefixes": [
                {**msgspec.structs.asdict(prefix), "tokens": [], "text": text}
                for prefix, text in zip(answer.prefixes, texts)
            ],
        }
        return msgspec.json.encode(values)

    def _texts(self, answer: wire.CacheMap) -> list[str | None]:
        tokenizer = self._service.kitchen().tokenizer
        return [
            tokenizer.decode(prefix.tokens, skip_special_tokens=False) if tokenizer and prefix.tokens else None
            for prefix in answer.prefixes
        ]
