"""Events of the KV cache as messages of `kv_events.proto`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.server.rpc.messages import message

__all__ = ["KvBatches"]

KvEventBatch = message("smg.grpc.common.KvEventBatch")


class KvBatches:
    """Numbers batches from 1 on.

    Of a model with several groups of layers those events count whose window is the longest: a prefix can be found only
    while they have it. Blocks with a cache salt are left out, since a router goes by token ids alone. That pools were
    created, and that a block has changed its tier or priority, has no form there.
    """

    def __init__(self) -> None:
        self._number = 0
        self._longest = 0

    def batch_of(self, events: Sequence[dict[str, Any]]) -> Any | None:
        """None where nothing concerns a router."""
        batch = KvEventBatch(sequence_number=self._number + 1, timestamp=time.time())
        self._longest = max([self._longest, *(event["window_size"] for event in events)])
        for event in events:
            if event["window_size"] == self._longest:
                _add(batch.events, event["event_id"], event["data"])
        if not batch.events:
            return None
        self._number += 1
        return batch


def _add(field: Any, event_id: int, data: dict[str, Any]) -> None:
    if data["type"] == "removed":
        field.add(event_id=event_id).removed.block_hashes.extend(_hash(shown) for shown in data["block_hashes"])
        return
    blocks = [block for block in data.get("blocks", ()) if block["cache_salt"] is None]
    if data["type"] != "stored" or not blocks:
        return
    stored = field.add(event_id=event_id).stored
    if data["parent_hash"] is not None:
        stored.parent_block_hash = _hash(data["parent_hash"])
    for given in blocks:
        tokens = [token["token_id"] for token in given["tokens"]]
        block = stored.blocks.add(
            block_hash=_hash(given["block_hash"]),
            token_ids=tokens,
            block_size=len(tokens),
            cache_level=given["cache_level"],
        )
        if given["lora_id"] is not None:
            block.lora_id = given["lora_id"]


def _hash(shown: str | int) -> int:
    """The first 8 bytes as a signed integer: the form that both of our hashes have in common."""
    value = int(shown[:16], 16) if isinstance(shown, str) else shown
    return value - (1 << 64) if value >= 1 << 63 else value
