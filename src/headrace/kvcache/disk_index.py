"""What the disk tier holds, kept beside it, so that the same model finds its prefixes again after a restart.

The file is a journal that is only appended to, and written anew when most of it is out of date. Reading ends at the
first record that is damaged. A header of another model, shape or version makes the whole file foreign.

Nodes are named by content (a SHA-256 chain over namespace and keys), never by number, so no mixture of records of
different lives can tie a block to tokens that are not its own. Whether a block's bytes are those of its record is told
by the stamp, which the engine writes with the bytes and checks when it reads them: a record that is out of date is a
miss. That is why nothing here waits for the disk.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.kvcache.events import chain_hash, root_hash
from headrace.kvcache.journal import Journal, num_bytes, split
from headrace.kvcache.radix import NONE, Namespace, RadixIndex
from headrace.log import get
from headrace.seam import GroupSpec

log = get("kvcache")

MAGIC = b"headrace kv index 1\n"
SPACE, NODE, STORED, REMOVED = b"S", b"N", b"B", b"R"
BLOCK = struct.Struct("<HII")
"""Group, block, stamp."""
STAMP_MASK = (1 << 31) - 1
COMPACT_BYTES = 16 << 20
"""Least that is out of date before the file is written anew."""


class DiskBlock(NamedTuple):
    group: int
    block: int
    stamp: int


class Record(NamedTuple):
    """A node. It may have no block itself: then some node below it has."""

    space: Namespace
    parent: int
    """Position of the parent's record in the list, which is smaller than its own; NONE for a first block."""
    key: bytes
    blocks: list[DiskBlock]


@dataclass(slots=True)
class _Node:
    """A node of the index, or the root of a namespace."""

    above: bytes
    """Hash of the parent; empty for a root."""
    key: bytes
    """Of a root: the namespace, encoded."""
    num_uses: int = 0
    """Blocks + children."""
    id: int = NONE
    """Its number in the index, once it was met there."""

    @property
    def record(self) -> bytes:
        return NODE + self.above + self.key if self.above else SPACE + self.key


class DiskIndex:
    """The journal of one folder. No method raises for a fault of the disk: what can't be written isn't kept.

    A folder belongs to one process at a time; in a second one nothing is found and nothing kept.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: str,
        groups: Sequence[GroupSpec],
        tokens_per_block: int,
        *,
        num_blocks: Sequence[int],
    ) -> None:
        """
        Args:
            fingerprint: `EngineFacts.fingerprint`.
            num_blocks: of each group on disk, block 0 included; blocks beyond are forgotten.
        """
        shapes = [
            (g.layers, g.num_kv_heads, g.head_dim, g.dtype, g.window, g.sink_tokens, g.block_bytes(tokens_per_block))
            for g in groups
        ]
        facts = repr((fingerprint, shapes, tokens_per_block, Namespace._fields)).encode()
        name = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        header = MAGIC + hashlib.sha256(facts).digest()
        self._journal = Journal(Path(folder) / f"kv-{name}.index", header)
        self._num_blocks = tuple(num_blocks)
        self._live_bytes = 0
        """Of the journal: what a new one would hold, without the header."""
        self._rewrite_at_bytes = 0
        self._is_failing = False
        """The last record could not be written."""
        self._nodes: dict[bytes, _Node] = {}
        """By hash."""
        self._by_id: dict[int, bytes] = {}
        self._blocks: dict[tuple[int, int], tuple[int, bytes]] = {}
        """By (group, block): (stamp, hash of its node)."""
        self._stamp = secrets.randbits(31)

    # ---- reading -----------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._journal.path

    def load(self) -> list[Record]:
        """What an earlier run of the same model left, parents before children. Once, before all else."""
        try:
            data = self._journal.read()
        except OSError as error:
            log.warning("%s can't be used: %s: the disk tier is not kept", self.path, error.strerror or error)
            return []
        if data is None:
            log.warning("%s is of another model, shape or version: it is ignored and written anew", self.path)
        self._replay(data or b"")
        self._tidy()
        problem = self._rewrite()
        if problem:
            log.warning("%s can't be written: %s: the disk tier is not kept", self.path, problem)
        return self._records()

    def _replay(self, data: bytes) -> None:
        for at, record in enumerate(split(data)):
            try:
                _require(record is not None)
                self._apply(record or b"")
            except (msgspec.MsgspecError, struct.error, ValueError):
                log.warning("%s is damaged after %d records: what follows is ignored", self.path, at)
                return

    def _apply(self, record: bytes) -> None:
        kind, body = record[:1], record[1:]
        if kind == SPACE:
            self._nodes.setdefault(root_hash(_decode_space(body)), _Node(b"", body))
        elif kind == NODE:
            above, key = body[:32], body[32:]
            _require(above in self._nodes)
            self._nodes.setdefault(chain_hash(above, key), _Node(above, key))
        elif kind == STORED:
            group, block, stamp = BLOCK.unpack(body[: BLOCK.size])
            name = body[BLOCK.size :]
            _require(name in self._nodes and bool(self._nodes[name].above))
            self._blocks[group, block] = stamp, name
        else:
            _require(kind == REMOVED)
            group, block, _ = BLOCK.unpack(body)
            self._blocks.pop((group, block), None)

    def _tidy(self) -> None:
        """After a replay: drop blocks that can't be, and nodes that lead to no block."""
        names: dict[tuple[int, bytes], tuple[int, int]] = {}
        for (group, block), (_, name) in list(self._blocks.items()):
            fits = group < len(self._num_blocks) and 0 < block < self._num_blocks[group]
            twin = names.setdefault((group, name), (group, block)) if fits else (group, block)
            if not fits or twin != (group, block):
                del self._blocks[group, block]
        for node in self._nodes.values():
            if node.above:
                self._nodes[node.above].num_uses += 1
        for _, name in self._blocks.values():
            self._nodes[name].num_uses += 1
        for name in list(self._nodes):
            self._prune(name)
        self._live_bytes = sum(map(num_bytes, self._everything()))

    def _records(self) -> list[Record]:
        positions: dict[bytes, int] = {}
        records: list[Record] = []
        spaces: dict[bytes, Namespace] = {}
        for name, node in self._in_order():
            if not node.above:
                spaces[name] = _decode_space(node.key)
                continue
            parent = positions.get(node.above, NONE)
            space = spaces[node.above] if parent == NONE else records[parent].space
            positions[name] = len(records)
            records.append(Record(space, parent, node.key, []))
        for (group, block), (stamp, name) in self._blocks.items():
            records[positions[name]].blocks.append(DiskBlock(group, block, stamp))
        return records

    # ---- keeping -----------------------------------------------------------------------------

    def next_stamp(self) -> int:
        """For a block that is about to be written: 31 bits that tell its bytes from those of any other life."""
        self._stamp = (self._stamp + 1) & STAMP_MASK
        return self._stamp

    def stored(self, index: RadixIndex, node: int, *, group: int, block: int, stamp: int) -> bool:
        """The block's bytes are on disk. False: no room for the record, so the next run won't find the block.

        Until `removed`, the node has to stay in the index.
        """
        if not self._journal.is_open:
            return False
        self._forget(group, block)
        name, records = self._name(index, node)
        records.append(STORED + BLOCK.pack(group, block, stamp) + name)
        self._nodes[name].num_uses += 1
        self._blocks[group, block] = stamp, name
        self._live_bytes += sum(map(num_bytes, records))
        if not self._append(records):
            self._forget(group, block)
            return False
        return True

    def removed(self, group: int, block: int) -> None:
        """The block is about to be written again, or its node names it no more. Nothing for one that isn't kept."""
        if self._journal.is_open and (group, block) in self._blocks:
            self._forget(group, block)
            # Lost, this record does no harm: the block's bytes will have another stamp.
            self._append([REMOVED + BLOCK.pack(group, block, 0)])

    def close(self) -> None:
        """Another process may have the folder."""
        self._journal.close()

    def _name(self, index: RadixIndex, node: int) -> tuple[bytes, list[bytes]]:
        """The hash of a node of the index, and what has to be written about it and its ancestors."""
        path: list[int] = []
        while node not in self._by_id and node not in index.spaces:
            path.append(node)
            node = index.parent[node]
        records: list[bytes] = []
        if node in self._by_id:
            name = self._by_id[node]
        else:
            space = index.spaces[node]
            name = root_hash(space)
            self._meet(name, _Node(b"", msgspec.msgpack.encode(space)), records)
        for node in reversed(path):
            above, key = name, index.key[node]
            name = chain_hash(above, key)
            self._meet(name, _Node(above, key), records)
            self._nodes[name].id = node
            self._by_id[node] = name
        return name, records

    def _meet(self, name: bytes, node: _Node, records: list[bytes]) -> None:
        if name not in self._nodes:
            self._nodes[name] = node
            records.append(node.record)
            if node.above:
                self._nodes[node.above].num_uses += 1

    def _forget(self, group: int, block: int) -> None:
        stamp, name = self._blocks.pop((group, block), (0, b""))
        if name:
            self._live_bytes -= num_bytes(STORED + BLOCK.pack(group, block, stamp) + name)
            self._nodes[name].num_uses -= 1
            self._prune(name)

    def _prune(self, name: bytes) -> None:
        """Drop the node and its ancestors as far as nothing uses them."""
        while name in self._nodes and not self._nodes[name].num_uses:
            node = self._nodes.pop(name)
            self._live_bytes -= num_bytes(node.record)
            self._by_id.pop(node.id, None)
            name = node.above
            if name:
                self._nodes[name].num_uses -= 1

    # ---- the file ----------------------------------------------------------------------------

    def _append(self, records: list[bytes]) -> bool:
        problem = self._journal.append(records)
        if problem and not self._journal.is_open:
            log.warning("%s can't be written: %s: blocks are not kept from now on", self.path, problem)
        elif problem and not self._is_failing:
            log.warning("%s: %s: blocks are not kept until there is room", self.path, problem)
        self._is_failing = bool(problem)
        if not problem and self._journal.size > self._rewrite_at_bytes:
            trouble = self._rewrite()
            if trouble:
                log.warning("%s can't be written anew: %s", self.path, trouble)
                self._rewrite_at_bytes *= 2
        return not problem

    def _rewrite(self) -> str:
        problem = self._journal.rewrite(self._everything())
        if not problem:
            self._rewrite_at_bytes = 2 * self._journal.size + COMPACT_BYTES
        return problem

    def _everything(self) -> Iterable[bytes]:
        for _, node in self._in_order():
            yield node.record
        for (group, block), (stamp, name) in self._blocks.items():
            yield STORED + BLOCK.pack(group, block, stamp) + name

    def _in_order(self) -> Iterator[tuple[bytes, _Node]]:
        """All nodes, each after its parent."""
        done: set[bytes] = set()
        for name in self._nodes:
            chain: list[bytes] = []
            while name and name not in done:
                done.add(name)
                chain.append(name)
                name = self._nodes[name].above
            for link in reversed(chain):
                yield link, self._nodes[link]


def _decode_space(data: bytes) -> Namespace:
    return msgspec.msgpack.decode(data, type=Namespace)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("a record names what is not there")
