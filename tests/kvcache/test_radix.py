from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.kvcache.integrity import check_index
from headrace.kvcache.radix import Namespace, RadixIndex

BASE = Namespace()


def insert(index: RadixIndex, tokens: list[int], space: Namespace = BASE, first_block: int = 1) -> list[int]:
    """Gives every full block of `tokens` a node and a block where it has none."""
    node, path = index.root(space), []
    for at in range(len(tokens) // index.tokens_per_block):
        node = index.descend(node, index.edge(tokens, at))
        if index.blocks[0][node] < 0:
            index.set_block(0, node, first_block + at)
        path.append(node)
    return path


def test_walk_finds_the_longest_known_prefix():
    index = RadixIndex(2, num_pools=1)
    path = insert(index, [1, 2, 3, 4, 5, 6])
    assert index.walk(BASE, [1, 2, 3, 4, 5, 6], 3)[0] == path
    assert index.walk(BASE, [1, 2, 3, 4, 9, 6], 3)[0] == path[:2]
    assert index.walk(BASE, [1, 2, 3, 4, 5, 6], 1)[0] == path[:1]
    assert index.walk(BASE, [9, 2], 1)[0] == []
    assert index.walk(BASE, [3, 4], 1)[0] == [], "a block is found after its own prefix only"
    check_index(index, {}, {})


def test_arrays_and_lists_are_the_same_tokens():
    index = RadixIndex(4, num_pools=1)
    tokens = [0, 2**31 - 1, -7, 128255, 5, 6, 7, 8]
    path = insert(index, tokens)
    for dtype in (np.int32, np.int64):
        assert index.walk(BASE, np.array(tokens, dtype), 2)[0] == path
    assert index.walk(BASE, np.array([[token, 99] for token in tokens], np.int32)[:, 0], 2)[0] == path


def test_a_node_forks_and_joins():
    index = RadixIndex(1, num_pools=1)
    stem = insert(index, [1])[0]
    ends = [insert(index, [1, token], first_block=10)[1] for token in (5, 6, 7)]
    assert sorted(index.children(stem)) == sorted(ends)
    assert [index.walk(BASE, [1, token], 2)[0][-1] for token in (5, 6, 7)] == ends
    check_index(index, {}, {})
    for end in ends[:2]:
        index.clear_block(0, end)
        check_index(index, {}, {})
    assert index.children(stem) == ends[2:] and not index.forks
    assert insert(index, [1, 5], first_block=10)[1] != ends[2]
    check_index(index, {}, {})


def test_a_whole_path_is_made_like_one_node_after_the_other():
    rng = random.Random(0)
    one, other = (RadixIndex(2, num_pools=1) for _ in range(2))
    for block in range(1, 200):
        tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 5))]
        keys = one.edges(tokens, 0, len(tokens) // 2)
        assert keys == [one.edge(tokens, at) for at in range(len(tokens) // 2)]
        path = insert(one, tokens, first_block=block)
        assert other.descend_all(other.root(BASE), keys) == path
        for at, node in enumerate(path):
            if other.blocks[0][node] < 0:
                other.set_block(0, node, block + at)
        check_index(other, {}, {})
        gone = path[rng.randrange(len(path)) :]
        for index in (one, other):
            index.clear_blocks(0, gone[::-1])
            check_index(index, {}, {})


def test_old_ghosts_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.kvcache.radix.MAX_GHOSTS", 4)
    index = RadixIndex(1, num_pools=1)
    for token in range(20):
        index.clear_block(0, insert(index, [token])[0])
    known = [index.was_evicted(BASE, -1, index.edge([token], 0)) for token in range(20)]
    assert known[-4:] == [True] * 4 and not any(known[:10])


def test_namespaces_do_not_meet():
    index = RadixIndex(2, num_pools=1)
    spaces = [
        BASE,
        Namespace(salt="a"),
        Namespace(salt="a", adapter=1),
        Namespace(adapter=1),
        Namespace(revision="a"),
        Namespace(dtypes=("a",)),
        Namespace(salt="ab"),
        Namespace(salt="a", revision="b"),
        Namespace(dtypes=("a", "b")),
        Namespace(dtypes=("ab",)),
    ]
    ends = [insert(index, [1, 2], space)[0] for space in spaces]
    assert len(set(ends)) == len(spaces)
    assert [index.walk(space, [1, 2], 1)[0] for space in spaces] == [[end] for end in ends]


def test_a_hole_keeps_its_descendants_until_they_go():
    index = RadixIndex(1, num_pools=2)
    a, b = insert(index, [1, 2])
    index.set_block(1, b, 5)
    index.clear_block(0, a)
    assert index.walk(BASE, [1, 2], 2)[0] == [a, b]
    index.clear_block(0, b)
    assert index.num_nodes == 3
    index.clear_block(1, b)
    assert index.num_nodes == 0 and not index.roots and not index.spaces


def test_pins_keep_nodes_and_node_ids_are_used_again():
    index = RadixIndex(1, num_pools=1)
    a, b = insert(index, [1, 2])
    index.pin(a)
    index.clear_block(0, b)
    index.clear_block(0, a)
    assert index.num_nodes == 2
    index.unpin(a)
    assert index.num_nodes == 0
    for token in range(50):
        index.clear_block(0, insert(index, [token], Namespace(salt=str(token)))[0])
    assert len(index.key) == 3, "salts that come and go leave nothing behind"


def test_subtree_lists_parents_first():
    index = RadixIndex(1, num_pools=1)
    a, b, c = insert(index, [1, 2, 3])
    d = insert(index, [1, 4], first_block=7)[1]
    nodes = index.subtree(a)
    assert sorted(nodes) == sorted([a, b, c, d]) and nodes.index(a) < nodes.index(b) < nodes.index(c)
    assert index.ancestor(c, 2) == a and index.ancestor(c, 0) == c


@pytest.mark.parametrize("size", [1, 4])
def test_random_inserts_and_removals_equal_a_dict(size: int):
    rng = random.Random(size)
    index = RadixIndex(size, num_pools=1)
    known: dict[tuple[int, ...], int] = {}
    next_block = 1
    for _ in range(6000 // (size * size + 3)):
        tokens = [rng.randrange(3) for _ in range(size * rng.randint(1, 4))]
        path = index.walk(BASE, tokens, len(tokens) // size)[0]
        ends = [tuple(tokens[: (at + 1) * size]) for at in range(len(tokens) // size)]
        deepest = max(
            (at + 1 for at, end in enumerate(ends) if any(key[: len(end)] == end for key in known)), default=0
        )
        assert len(path) == deepest
        assert [index.blocks[0][node] for node in path] == [known.get(end, -1) for end in ends[:deepest]]
        if rng.random() < 0.5:
            insert(index, tokens, first_block=next_block)
            for at, end in enumerate(ends):
                known.setdefault(end, next_block + at)
            next_block += len(ends)
        elif known:
            end = rng.choice(list(known))
            index.clear_block(0, index.walk(BASE, end, len(end) // size)[0][-1])
            del known[end]
        check_index(index, {}, {})
