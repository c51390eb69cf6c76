"""What the memory of one rank is used for: the table that is logged at start, and the same as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.seam import GroupSpec

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One use of memory."""

    name: str
    size_bytes: int
    num_tokens: int | None = None
    """Tokens that it holds, where that means something."""
    note: str = ""
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """All uses of one rank's memory."""

    device: str
    rows: tuple[MemoryRow, ...]

    def text(self) -> str:
        lines = [f"memory on {self.device}:"]
        width = max(len(row.name) for row in self.rows) + 2
        for row in self.rows:
            tokens = "" if row.num_tokens is None else f"{row.num_tokens:,} tokens"
            words = ", ".join(part for part in (tokens, row.note) if part)
            lines.append(f"  {row.name:<{width}}{row.size_bytes / GIB:>9.3f} GiB  {words}".rstrip())
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {"use": row.name, "tier": row.tier, "bytes": row.size_bytes, "tokens": row.num_tokens, "note": row.note}
            for row in self.rows
        ]
        return {"device": self.device, "rows": rows}


def describe(group: GroupSpec) -> str:
    """A group in a few words: `full attention, 3 layers`."""
    layers = f"{len(group.layers)} layer{'s' if len(group.layers) > 1 else ''}"
    if group.is_recurrent:
        return f"recurrent, {layers}"
    if group.window is None:
        return f"full attention, {layers}"
    sinks = f" and {group.sink_tokens} first" if group.sink_tokens else ""
    return f"window of {group.window}{sinks}, {layers}"


def group_rows(groups: Sequence[GroupSpec], num_blocks: Sequence[int], tokens_per_block: int) -> list[MemoryRow]:
    """A row for each group's pool. num_blocks: with the unused block 0."""
    rows: list[MemoryRow] = []
    for group, count in zip(groups, num_blocks, strict=True):
        size_bytes = count * group.block_bytes(tokens_per_block)
        if group.is_recurrent:
            rows.append(MemoryRow(f"snapshots: {describe(group)}", size_bytes, None, f"{count - 1:,} snapshots"))
            continue
        note = f"{count - 1:,} blocks of {tokens_per_block}, {group.dtype}"
        rows.append(MemoryRow(f"KV: {describe(group)}", size_bytes, (count - 1) * tokens_per_block, note))
    return rows


def tier_row(
    tier: str, groups: Sequence[GroupSpec], num_blocks: Sequence[int], tokens_per_block: int
) -> MemoryRow | None:
    """The row of a lower tier; None when it is off. Its tokens are those of the group that holds fewest."""
    if not num_blocks:
        return None
    pairs = list(zip(groups, num_blocks, strict=True))
    size_bytes = sum(count * group.block_bytes(tokens_per_block) for group, count in pairs)
    tokens = [(count - 1) * tokens_per_block for group, count in pairs if not group.is_recurrent]
    counts = " + ".join(f"{count - 1:,}" for count in num_blocks)
    return MemoryRow(f"KV, {tier} tier", size_bytes, min(tokens, default=None), f"{counts} blocks", tier)
