from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest

from headrace.kvcache.events import EventLog, NoEvents
from headrace.kvcache.radix import Namespace, RadixIndex
from headrace.seam import GroupSpec
from headrace.types import MediaSpan

FULL = GroupSpec((0,), 1, 8, "float32", bytes_per_token=64)
WINDOW = GroupSpec((1,), 1, 8, "float32", window=4, bytes_per_token=64)
SIZE = 2
BASE = Namespace()


class World:
    def __init__(self, *groups: GroupSpec, max_size: int = 100, **options: Any) -> None:
        self.groups = groups or (FULL,)
        self.index = RadixIndex(SIZE, num_pools=len(self.groups))
        self.log = EventLog(max_size, self.groups, index=self.index, max_seq_len=64, **options)
        self.block = 0

    def store(self, tokens: list[int], *, group: int = 0, space: Namespace = BASE, only_last: bool = False, **more):
        """Every block of the tokens, as a commit does; returns the nodes."""
        node, path = self.index.root(space), []
        for at in range(len(tokens) // SIZE):
            parent, node = node, self.index.descend(node, self.index.edge(tokens, at))
            path.append(node)
            last = (at + 1) * SIZE >= len(tokens)
            if self.index.blocks[group][node] < 0 and (last or not only_last):
                self.block += 1
                self.index.set_block(group, node, self.block)
                part = tokens[at * SIZE : (at + 1) * SIZE]
                self.log.stored(group, node, parent, part, 0, 35, space, **more)
        return path

    def remove(self, node: int, *, group: int = 0) -> None:
        self.log.removed(group, node)
        self.index.clear_block(group, node)

    def take(self) -> list[dict[str, Any]]:
        return json.loads(json.dumps(self.log.take()))

    def hashes(self) -> list[str]:
        return [b["block_hash"] for e in self.take() for b in e["data"].get("blocks", [])]


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_created_comes_first_with_the_blocks_of_each_tier():
    world = World(FULL, WINDOW)
    world.log.created([(100, 50), (20, 10)])
    world.store([1, 2])
    first, second, third = world.take()
    assert first == {
        "event_id": 0,
        "data": {"type": "created", "num_blocks_per_cache_level": [100, 50]},
        "window_size": 64,
        "hash_algo": "v2_sha256",
    }
    assert (second["event_id"], second["window_size"]) == (1, 4)
    assert third["data"]["type"] == "stored"
    assert world.take() == []


def test_a_chain_that_is_stored_is_one_event():
    world = World()
    world.store([1, 2, 3, 4], space=Namespace(salt="s", adapter=7))
    (event,) = world.take()
    data = event["data"]
    assert data["type"] == "stored" and data["parent_hash"] is None
    one, two = data["blocks"]
    assert one["tokens"] == [
        {"type": "unique_token", "token_id": 1, "token_extra_id": 0},
        {"type": "unique_token", "token_id": 2, "token_extra_id": 0},
    ]
    assert (one["type"], one["cache_level"], one["priority"], one["mm_keys"]) == ("stored_block", 0, 35, [])
    assert (one["cache_salt"], one["lora_id"]) == ("s", 7)
    world.store([1, 2, 3, 4, 5, 6], space=Namespace(salt="s", adapter=7))
    (later,) = world.take()
    assert later["data"]["parent_hash"] == two["block_hash"], "the buffer was read in between"


def test_two_branches_are_two_events_with_their_common_parent():
    world = World()
    world.store([1, 2])
    (first,) = world.hashes()
    world.store([1, 2, 3, 4])
    world.store([1, 2, 5, 6])
    events = world.take()
    assert [event["data"]["parent_hash"] for event in events] == [first, first]


def test_the_hash_is_the_documented_chain():
    world = World()
    world.store([1, -2, 3, 4])
    first, second = world.hashes()
    root = hashlib.sha256(b"headrace-kv-1")
    for value in Namespace():
        text = repr(value).encode()
        root.update(struct.pack("<Q", len(text)) + text)
    one = sha(root.digest(), struct.pack("<Q", 8), struct.pack("<2i", 1, -2))
    two = sha(one, struct.pack("<Q", 8), struct.pack("<2i", 3, 4))
    assert (first, second) == (one.hex(), two.hex())


def test_short_hashes_are_the_front_of_the_long_ones():
    long, short = World(), World(algorithm="v2_sha256_64")
    long.store([1, 2])
    short.store([1, 2])
    (number,) = short.hashes()
    assert isinstance(number, int)
    assert f"{number:016x}" == long.hashes()[0][:16]


@pytest.mark.parametrize("algorithm", ["v1_block_key", "md5"])
def test_other_hashes_are_refused(algorithm: str):
    with pytest.raises(ValueError, match="kv_cache_event_hash_algo"):
        World(algorithm=algorithm)


SPACES = [
    Namespace(),
    Namespace(salt="a"),
    Namespace(salt="b"),
    Namespace(adapter=1),
    Namespace(salt="1"),
    Namespace(salt="a", adapter=1),
    Namespace(revision="a"),
    Namespace(dtypes=("a",)),
    Namespace(dtypes=("a', 'b",)),
    Namespace(dtypes=("a", "b")),
]


def test_no_two_namespaces_share_a_hash():
    world = World()
    for space in SPACES:
        world.store([1, 2, 3, 4], space=space)
    hashes = world.hashes()
    assert len(hashes) == 2 * len(SPACES) == len(set(hashes))


def test_the_same_content_has_the_same_hash_in_another_life():
    one, two = World(), World()
    two.store([9, 9, 9, 9])
    two.take()
    one.store([1, 2, 3, 4])
    two.store([1, 2, 3, 4])
    assert one.hashes() == two.hashes()


def test_removed_blocks_are_named_by_their_hash():
    world = World()
    path = world.store([1, 2, 3, 4])
    first, second = world.hashes()
    world.remove(path[1])
    world.remove(path[0])
    (event,) = world.take()
    assert event["data"] == {"type": "removed", "block_hashes": [second, first]}
    assert not world.log._hash and not world.log._uses and not world.log._above


def test_order_is_kept_between_kinds():
    world = World()
    (node,) = world.store([1, 2])
    world.remove(node)
    world.store([1, 2])
    assert [event["data"]["type"] for event in world.take()] == ["stored", "removed", "stored"]


def test_updates_name_old_and_new():
    world = World()
    (node,) = world.store([1, 2])
    (name,) = world.hashes()  # the buffer is read
    world.log.updated(0, node, level=(0, 1))
    world.log.updated(0, node, priority=(80, 35))
    world.log.updated(0, node)
    level, priority = world.take()
    assert level["data"] == {
        "type": "updated",
        "block_hash": name,
        "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
        "priority": None,
    }
    assert priority["data"]["priority"] == {"type": "event_diff", "new_value": 35, "old_value": 80}


def test_a_hole_that_is_filled_again_has_the_same_hash():
    world = World()
    path = world.store([1, 2, 3, 4, 5, 6])
    hashes = world.hashes()
    world.remove(path[1])
    world.take()
    world.store([1, 2, 3, 4])
    assert world.hashes() == [hashes[1]]


def test_nodes_below_prefixes_that_were_never_stored_have_their_chain():
    """Snapshots of recurrent layers: only some nodes have a block."""
    sparse, dense = World(), World()
    dense.store([1, 2, 3, 4, 5, 6])
    path = sparse.store([1, 2, 3, 4, 5, 6], only_last=True)
    assert sparse.hashes() == dense.hashes()[2:]
    sparse.remove(path[2])
    assert not sparse.log._hash, "its ancestors go with it"


def test_groups_share_hashes_but_not_events():
    world = World(FULL, WINDOW)
    world.store([1, 2], group=0)
    path = world.store([1, 2], group=1)
    one, two = world.take()
    assert (one["window_size"], two["window_size"]) == (64, 4)
    assert one["data"]["blocks"][0]["block_hash"] == two["data"]["blocks"][0]["block_hash"]
    world.remove(path[0], group=1)
    world.log.updated(0, path[0], level=(0, 1))
    removed, updated = world.take()
    assert removed["window_size"] == 4 and updated["window_size"] == 64


def test_media_are_shown():
    world = World()
    world.store([1, 2], media=(MediaSpan(1, 5, b"\x01\x02"),))
    (event,) = world.take()
    assert event["data"]["blocks"][0]["mm_keys"] == [{"type": "mm_key", "hash": "0102", "start_offset": 1}]


def test_a_full_buffer_drops_the_oldest_and_counts_them():
    world = World(max_size=3)
    for token in range(0, 20, 2):
        world.store([token, token + 1])
    assert [event["event_id"] for event in world.take()] == [7, 8, 9]
    assert world.log.num_dropped == 7
    world.store([100, 101])
    assert [event["event_id"] for event in world.take()] == [10]


def test_an_event_does_not_grow_without_end():
    world = World(max_size=3)
    world.store(list(range(2 * 300)))
    assert [len(event["data"]["blocks"]) for event in world.take()] == [128, 128, 44]
    world.store(list(range(10_000, 10_000 + 2 * 1000)))
    assert sum(len(event["data"]["blocks"]) for event in world.take()) <= 3 * 128


def test_nobody_asked_for_events():
    events = NoEvents()
    events.created([(1,)])
    events.stored(0, 1, 0, [1, 2], 0, 35, Namespace())
    events.updated(0, 1, level=(0, 1))
    events.removed(0, 1)
    assert events.take() == []


def test_what_changes_at_once_is_said_by_the_same_event():
    """A commit names blocks first, and gives them their priorities then."""
    world = World()
    path = world.store([1, 2, 3, 4])
    world.log.updated(0, path[0], priority=(35, 90))
    world.log.updated(0, path[1], level=(0, 1))
    (event,) = world.take()
    assert [(block["priority"], block["cache_level"]) for block in event["data"]["blocks"]] == [(90, 0), (35, 1)]
    world.log.updated(0, path[0], priority=(90, 35))
    assert [event["data"]["type"] for event in world.take()] == ["updated"]
