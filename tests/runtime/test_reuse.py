from __future__ import annotations

import re
from typing import Any

import pytest

from headrace.kvcache.settings import CacheSettings
from headrace.runtime.reuse import reuse_of
from headrace.seam import GroupSpec

FULL = GroupSpec((0,), 1, 8, "float32", bytes_per_token=64)
WINDOW = GroupSpec((1,), 1, 8, "float32", window=64, bytes_per_token=64)
STATE = GroupSpec((2,), 1, 8, "float32", state_bytes=64)


@pytest.mark.parametrize(
    ("groups", "settings", "granularity", "words"),
    [
        ((FULL,), {}, 1, "from 1 shared token .*copied"),
        ((FULL, WINDOW), {"copy_on_partial_reuse": False}, 1, "taken over"),
        ((FULL,), {"partial_reuse": False}, 32, "whole blocks of 32"),
        ((FULL,), {"reuse": False}, 0, "off .*enable_block_reuse"),
        ((FULL, STATE), {}, 0, "off, .*periodic_snapshot_interval is 0"),
        ((FULL, STATE), {"reuse": False, "snapshot_interval": 256}, 0, "off .*enable_block_reuse"),
        ((FULL, STATE), {"snapshot_interval": 256}, 256, "every 256 tokens$"),
        (
            (FULL, STATE),
            {"snapshot_interval": 256, "snapshots_from_end": (0,)},
            32,
            "every 256 tokens and at the extra",
        ),
        ((STATE,), {"branch_snapshots": True}, 32, "kept: at the extra places"),
    ],
)
def test_what_is_reused_in_the_end(groups: Any, settings: dict[str, Any], granularity: int, words: str) -> None:
    found = reuse_of(CacheSettings(tokens_per_block=32, **settings), groups)
    assert found.granularity == granularity
    assert re.search(words, found.text) and "\n" not in found.text
