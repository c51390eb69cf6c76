"""The seam between the control half and the device half: StepPlan down, StepResult up.

The control half plans with integers and never sees a tensor; the device half computes and never
sees a request. Both meet in the two frozen values of this module, and the engine port is five
calls. One controller can drive one rank or many, because the plan is all that is broadcast.

Truth and bounds. The device's slot state is the truth: `last_token`, `num_tokens` (tokens whose KV
is in the cache), `done`. A plan may be made while earlier plans are still in flight, so what a
generation row starts from is read on the device, and the counts of a plan are upper bounds.
A row whose slot is `done` writes its KV to the dummy block (block 0 of every group, never handed
out) and accepts no token.

Order. Plans run in the order of `submit`. Within a plan: slots are freed, slots begin, blocks are
appended to tables, a connector saves, copies run one after another, a connector begins to load,
states are restored, rows are computed, states are saved. A copy is ordered before every reader and
writer of its blocks in the same or a later plan. A transfer runs beside the steps: until it is
reported, its destination belongs to it and its source is only read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.types import Grammar, Sampling, ThinkingCap

Ints = NDArray[np.int32]

FROM_DEVICE = -1
"""`Section.start` of a generation row: begin at the slot's own `num_tokens` with its `last_token`."""

SAMPLE = 1
"""Row flag: the row's last position yields a token."""
PROMPT_LOGPROBS = 2
"""Row flag: log-probabilities of every prompt token of the chunk are wanted."""
HOST_TOKEN = 4
"""Row flag: the sampled token is reported but not committed; the host chooses (beam search)."""
LAST_HIDDEN = 8
"""Row flag: the hidden state of the row's last token, after the last norm, is wanted."""
SUM_HIDDEN = 16
"""Row flag: the sum of the hidden states of all tokens of the row is wanted. A prompt's chunks are added up by whoever
knows where it begins and ends, so no slot holds a sum, and a prompt that begins anew needs no word."""

NO_TOKEN = "no token is left to choose: the grammar, the bad words and the biases of the request rule out all"
"""What a row's error says where the request itself is at fault."""

DUMMY_BLOCK = 0

DEVICE, HOST, DISK = 0, 1, 2
"""Tiers. Blocks of each tier and group are numbered from 0, block 0 is never used."""


NO_INTS: Ints = np.zeros(0, np.int32)
"""Most fields of most plans: one for all of them."""


def ints(values: Any = ()) -> Ints:
    return np.asarray(values, dtype=np.int32)


def int_rows(values: Sequence[tuple[int, ...]], width: int) -> Ints:
    """[n, width], also for no values."""
    if not values:
        return _no_rows(width)
    return np.asarray(values, dtype=np.int32).reshape(len(values), width)  # pyright: ignore[reportUnknownMemberType]


def token_bits(tokens: Collection[int], num_words: int) -> Ints:
    """[num_words] with a bit for each of these tokens: that of token 32 * w + i is bit i of word w."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.frombuffer(np.packbits(bits, bitorder="little").tobytes(), np.int32)


@cache
def _no_rows(width: int) -> Ints:
    return np.zeros((0, width), np.int32)


def _empty() -> Ints:
    return NO_INTS


def _empty_triples() -> Ints:
    return _no_rows(3)


def _empty_copies() -> Ints:
    return _no_rows(6)


def _empty_transfers() -> Ints:
    return _no_rows(7)


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A slot begins (or resumes after preemption): all that sampling and stopping need on the device."""

    slot: int
    request_id: int
    sampling: Sampling
    prompt_len: int
    min_len: int
    """Stop ids are masked while the sequence, with the token being sampled, is not longer than this."""
    max_len: int
    """The slot is done when prompt and output together reach this length."""
    stop_ids: tuple[int, ...]
    history: Ints | None = None
    """All tokens so far, when `sampling.needs_history` or there is a grammar or a cap."""
    grammar: Grammar | None = None
    thinking: ThinkingCap | None = None


@dataclass(frozen=True, slots=True)
class ExternalWork:
    """What a KV connector's worker side is told. It saves before the plan's copies and loads behind them; blocks that
    are loaded belong to it until they are reported as a transfer is: finished, or finished and failed."""

    meta: Any = None
    """From its scheduler side; nobody else looks into it."""
    loads: tuple[tuple[int, int], ...] = ()
    """(copy id, request id): the request's blocks begin to come. Ids are negative, those of copies aren't."""
    kept: tuple[tuple[int, int], ...] = ()
    """(copy id, request id): the request has ended; its blocks stay as they are until this is reported."""


@dataclass(frozen=True, slots=True)
class Section:
    """One data-parallel rank's share of a step. Rows with host ids come before generation rows."""

    slot: Ints = field(default_factory=_empty)  # [rows]
    num_tokens: Ints = field(default_factory=_empty)  # [rows] tokens to compute, drafts included
    start: Ints = field(default_factory=_empty)  # [rows] first position, or FROM_DEVICE
    num_drafts: Ints = field(default_factory=_empty)  # [rows]
    tree: Ints = field(default_factory=_empty)  # [rows] draft tree id, 0 = a chain
    flags: Ints = field(default_factory=_empty)  # [rows] SAMPLE | PROMPT_LOGPROBS | ...
    num_context_rows: int = 0
    ids: Ints = field(default_factory=_empty)  # [sum of num_tokens over context rows]
    next_ids: Ints = field(default_factory=_empty)  # [context rows] the prompt token after the chunk, -1 at the end
    blocks: tuple[Ints, ...] = ()  # per group: [n, 3] of (slot, index in its table, block)
    freed_slots: Ints = field(default_factory=_empty)
    inits: tuple[SlotInit, ...] = ()
    copies: Ints = field(default_factory=_empty_copies)
    """[n, 6] of (copy id, group, source tier, source block, destination tier, destination block), in order.

    Between DEVICE and DEVICE or HOST. Every id is reported, in any order, once its blocks are no longer touched.
    """
    transfers: Ints = field(default_factory=_empty_transfers)
    """[n, 7] of (copy id, group, source tier, source block, destination tier, destination block, stamp).

    DEVICE to HOST, HOST to DISK, DISK to HOST, in any order; ids are from the same series as those of copies. A
    transfer may fail (a full disk, a damaged block): the destination then holds nothing. A block is written to DISK
    under its stamp; read back with another one, or with another checksum, it has failed.
    """
    restores: Ints = field(default_factory=_empty_triples)
    """[n, 3] of (group, block, slot): the slot's recurrent state becomes the snapshot. Other slots begin with zeros."""
    saves: Ints = field(default_factory=_empty_triples)
    """[n, 3] of (group, slot, block): the slot's recurrent state after this plan's rows becomes a snapshot."""
    external: ExternalWork | None = None
    """None without a connector, or without anything to tell it."""

    @property
    def num_rows(self) -> int:
        return len(self.slot)

    @property
    def num_step_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class Command:
    """Work that is no step: grammars, adapters, memory release, profiling. `id` comes back in the result."""

    id: int
    name: str
    args: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    sections: tuple[Section, ...]
    commands: tuple[Command, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(section.num_rows for section in self.sections)

    @property
    def num_tokens(self) -> int:
        return sum(section.num_step_tokens for section in self.sections)

    @property
    def padded_tokens(self) -> int:
        """What every rank runs when ranks must run equal shapes: the largest section."""
        return max(section.num_step_tokens for section in self.sections)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one row: one entry a position, the chosen token first, then the top K."""

    ids: Ints  # [positions, 1 + K]
    values: NDArray[np.float32]  # [positions, 1 + K]
    ranks: Ints  # [positions] rank of the chosen token, 1 = most likely


@dataclass(frozen=True, slots=True)
class SectionResult:
    """What one section's rows brought, in the order of the plan's rows."""

    num_accepted: Ints  # [rows] 0 .. num_drafts + 1; 0 for rows without SAMPLE or already done
    tokens: Ints  # [sum of num_accepted]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict[int, RowLogprobs])  # by row
    prompt_logprobs: dict[int, RowLogprobs] = field(
        default_factory=dict[int, RowLogprobs]
    )  # by row, the chunk's targets
    logits: dict[int, Any] = field(default_factory=dict[int, Any])  # by row, in one process only
    errors: dict[int, str] = field(default_factory=dict[int, str])  # by row: this row's work failed, the rest holds
    hidden: dict[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[np.float32]])  # by row, [hidden]


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    sections: tuple[SectionResult, ...]
    finished_copies: Ints = field(default_factory=_empty)
    """Copies, transfers, and what a connector loads or keeps."""
    failed_copies: Ints = field(default_factory=_empty)
    """Transfers and loads whose destination holds nothing."""
    finished_commands: dict[int, Any] = field(default_factory=dict[int, Any])
    """By command, what came of it. `compile_grammar`: what is wrong with the grammar, "" when it is compiled."""
    forward_s: float = 0.0
    """The device's time for the step's rows; on a CPU from when the step was begun until its tokens were there."""
    idle_s: float = 0.0
    """On a GPU, what it waited for this step after it had ended the one before."""
    num_eager: int = 0
    """Since the start: steps of generation rows alone that ran without a CUDA graph although there are graphs."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of what one layer keeps of each token: K, V, a latent, the keys of an indexer or their scales."""

    name: str
    shape: tuple[int, ...]
    """Of one token, on one rank: (heads, features) or (features,)."""
    dtype: str


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A layer group: layers that keep the same regions over the same window, with a block pool of its own.

    A layer whose parts reach back differently far is in several groups. Recurrent layers form groups of `state_bytes`
    > 0: a block of theirs is a snapshot of all their states at one position, and the live states are the engine's, one
    a slot.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    """Tokens a query sees, itself included; None is everything."""
    bytes_per_token: int = 0
    """Over all layers of the group, on one rank; 0 for recurrent layers."""
    sink_tokens: int = 0
    """First tokens that stay in reach of a window group's queries."""
    state_bytes: int = 0
    """Recurrent state of one sequence over all layers of the group, on one rank."""
    attention: str = "heads"
    """The kind of attention that reads its blocks."""
    regions: tuple[Region, ...] = ()
    """Of each layer; () is K and V of `num_kv_heads` times `head_dim`. None are a recurrent group's."""
    every: int = 1
    """Tokens that share one entry of the regions, which is kept where the last of them is."""
    entry_bytes: int = 0
    """Of one such entry over all layers of the group, where `every` is more than 1."""

    @property
    def is_recurrent(self) -> bool:
        return self.state_bytes > 0

    def block_bytes(self, tokens_per_block: int) -> int:
        """Of one block on one rank, on any tier."""
        if self.every > 1:
            return self.entries(tokens_per_block) * self.entry_bytes
        return self.state_bytes or self.bytes_per_token * tokens_per_block

    def entries(self, tokens_per_block: int) -> int:
        """Of each region in a block."""
        return -(-tokens_per_block // self.every)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What the engine allocates, once. Blocks are by group, the unused block 0 included."""

    num_blocks: tuple[int, ...]
    num_slots: int
    host_blocks: tuple[int, ...] = ()
    """() is no host tier."""
    disk_blocks: tuple[int, ...] = ()
    """() is no disk tier."""
    disk_folder: str = ""
    """Existing folder; what other runs of the same model left there may be read."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What only the open engine knows. `settle` turns it into the final sizes."""

    model_type: str
    vocab_size: int
    num_valid_ids: int
    max_position: int
    groups: tuple[GroupSpec, ...]
    weight_bytes: int
    activation_bytes: int
    free_bytes: int
    """Memory this rank may still use, after loading."""
    device: str
    num_sections: int = 1
    hidden_size: int = 0
    """Of a hidden state after the last norm; 0: this engine gives none."""
    fingerprint: str = ""
    """Of all that changes K and V besides tokens and adapters: weights, dtypes, shapes, ranks. Names kept blocks."""
    copy_bytes_per_s: float = 0.0
    """Between device and host; 0.0 is unknown."""
    graph_bytes: int = 0
    """What CUDA graphs will take at most."""
    kept_bytes: int = 0
    """Weights for speculation, mapped from the checkpoint on the host."""
    kv_scales: tuple[tuple[int, float, float], ...] = ()
    """(layer, keys, values): what those of an FP8 cache are divided by."""


class EnginePort(Protocol):
    """One engine, or several ranks behind one. Calls come from one thread."""

    def open(self) -> EngineFacts:
        """Load weights and measure. Raises ValueError (bad input) or MemoryError with the remedy."""
        ...

    def allocate(self, sizes: PoolSizes) -> None:
        """Create KV pools and slot state. Once, after `open`. The host tier may come into being meanwhile."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Queue a step and return before it is done."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step not yet collected; blocks until it is there."""
        ...

    def close(self) -> None:
        """End threads and processes in under 5 s; safe to call twice."""
        ...
