"""The contract of a model file: its logits and greedy tokens are those of transformers, whatever the schedule.

A case is a tiny random checkpoint that transformers wrote, of the config in the model type's row of `tests.kits.tiny`.
`Sequences` drives the runner as an engine would: packed rows, chunks, a block table with blocks in any order, blocks
and states that a row takes over from another.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.attention.port import AttentionBackend, AttentionStep
from headrace.engine.backends import Backends
from headrace.engine.build import build_model
from headrace.engine.groups import group_layers
from headrace.engine.pools import KvPools
from headrace.engine.runner import GroupStep, Runner
from headrace.engine.states import States, state_specs
from headrace.engine.weights import LoadReport, load_weights
from headrace.hub.config import read_config
from headrace.hub.source import ModelSource, resolve_model
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Model, RecurrentLayer, StateStep
from headrace.quant.none import Dense
from headrace.seam import ints
from tests.kits.tiny import TINY as TINY
from tests.kits.tiny import VOCAB_SIZE, tiny_model
from tests.kits.tiny import WINDOW as WINDOW

BLOCK_SIZE = 4
NUM_SLOTS = 16
NUM_BLOCKS = 64
TOLERANCE = 1e-4


def save_tiny(folder: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """Write a random float32 checkpoint; returns transformers' model of it.

    Args:
        model_type: or another row of `tests.kits.tiny`.
    """
    import transformers  # here, since it takes seconds and the ranks of a group don't need it

    row = tiny_model(model_type)
    model_type = row.of or model_type
    known = row.oracle or model_type
    if known == "glm5_next_text":
        from tests.kits.causal import register

        register()
    declared = transformers.AutoConfig.for_model(known).to_dict()
    tiny = {key: value for key, value in TINY.items() if key in declared}
    wanted = copy.deepcopy({**tiny, **row.changes, **changes})  # some write to lists that they get
    config = transformers.AutoConfig.for_model(known, **wanted)
    torch.manual_seed(seed)
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, value in oracle.named_parameters():
            # Larger than usual, norms and biases too: what is loaded to a wrong place must show in the logits.
            value.copy_(torch.randn_like(value) * 0.15 + (value if "norm" in name else 0.0))
        for name, value in oracle.named_buffers():
            if name not in oracle.state_dict():
                continue
            if value.is_floating_point():  # what experts' scores are corrected with
                value.copy_(torch.randn_like(value) * 0.15)
            else:  # experts by token id
                value.copy_(torch.randint_like(value, config.n_routed_experts))
    oracle.save_pretrained(folder)
    if known != model_type:
        oracle.config.model_type = model_type
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | {"model_type": model_type}))
    return oracle


def oracle_with(folder: Path, **changes: Any) -> Any:
    """transformers' model of a checkpoint under another config."""
    import transformers

    stated = json.loads((folder / "config.json").read_text())["model_type"]
    known = transformers.CONFIG_MAPPING[tiny_model(stated).oracle or stated]
    config = known.from_pretrained(folder, **changes)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()


@dataclass
class Case:
    """One checkpoint, loaded here and in transformers."""

    oracle: Any
    source: ModelSource
    model: Model
    report: LoadReport

    @functools.cached_property
    def window(self) -> int | None:
        layers = [layer for layer in self.model.layers if not isinstance(layer, RecurrentLayer)]
        windows = [layer.spec.window for layer in layers if layer.spec and layer.spec.window is not None]
        return min(windows) if windows else None

    def logits(self, ids: Sequence[int], *, keep: int = 0) -> Tensor:
        """transformers' logits at the last `keep` positions, at all with 0. [tokens, vocab]"""
        with torch.inference_mode():
            return self.oracle(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=keep).logits[0].float()

    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        prompt = torch.tensor([list(ids)])
        with torch.inference_mode():
            # An explicit mask: generate would take token 0 in the prompt for padding.
            out = self.oracle.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, prompt.shape[1] :].tolist()


def load_case(source: ModelSource, oracle: Any, **options: Any) -> Case:
    model, report = load_model(source, **options)
    return Case(oracle, source, model, report)


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelContext | None = None,
    max_len: int | None = None,
    impl: str = "auto",
) -> tuple[Model, LoadReport]:
    dense = Dense()
    factory = LayerFactory(dtype=dtype, recipe=lambda name: dense, parallel=parallel, max_len=max_len)
    model = build_model(read_config(source), factory, impl=impl)
    return model, load_weights(model, source, progress=False)


def make_case(folder: Path, model_type: str, *, max_len: int | None = None, **changes: Any) -> Case:
    oracle = save_tiny(folder, model_type, **changes)
    return load_case(resolve_model(str(folder)), oracle, max_len=max_len)


@dataclass
class Row:
    """One sequence: what is in the cache, and where."""

    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    slot: int | None = None
    """Of its recurrent states, from its first step on."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Of a snapshot: by recurrent group, the block."""


class Sequences:
    """Sequences over one runner. Blocks are dealt in random order, and never dealt twice."""

    def __init__(
        self,
        model: Model,
        *,
        block_size: int = BLOCK_SIZE,
        num_blocks: int = NUM_BLOCKS,
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
    ) -> None:
        backends = Backends(chosen=[backend] if backend else [])
        self.block_size = block_size
        self.groups = group_layers(model.layers, dtype)
        self.pools = KvPools(self.groups, [num_blocks] * len(self.groups), block_size=block_size, backends=backends)
        self.states = States(self.groups, state_specs(model.layers), num_slots=NUM_SLOTS)
        self.num_slots = 0
        self.runner = Runner(model, backends, self.pools, states=self.states.layers)
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)

    def fork(self, row: Row) -> Row:
        """A row that begins where this one is: a prefix hit of its full blocks and of a snapshot of its states."""
        assert row.num_cached % self.block_size == 0, "only full blocks are shared"
        other = Row(list(row.blocks), row.num_cached, self._new_slot())
        for tensors in self.states.layers.values():
            for tensor in tensors:
                tensor[other.slot] = tensor[row.slot]
        return other

    def save(self, row: Row) -> Row:
        """A snapshot of a row: its full blocks, and its states in a block of each recurrent group. It takes no step."""
        assert row.num_cached % self.block_size == 0 and row.slot is not None
        saved = Row(list(row.blocks), row.num_cached)
        for group in [at for at, spec in enumerate(self.groups) if spec.is_recurrent]:
            saved.snapshots[group] = self.free.pop()
            self.states.save(ints([[group, row.slot, saved.snapshots[group]]]), self.pools.arenas)
        return saved

    def resume(self, saved: Row) -> Row:
        """A row that begins at a snapshot."""
        row = Row(list(saved.blocks), saved.num_cached, self._new_slot())
        for group, block in saved.snapshots.items():
            self.states.restore(ints([[group, block, row.slot]]), self.pools.arenas)
        return row

    def _new_slot(self) -> int:
        self.num_slots += 1
        assert self.num_slots <= NUM_SLOTS
        return self.num_slots - 1

    def step(self, chunks: Sequence[tuple[Row, Sequence[int]]], *, keep: int | None = None) -> list[Tensor]:
        """Compute chunks of rows in one step. -> by row, logits of its last `keep` tokens (or all): [tokens, vocab]"""
        for row, ids in chunks:
            if row.slot is None:
                row.slot = self._new_slot()
            while len(row.blocks) * self.block_size < row.num_cached + len(ids):
                row.blocks.append(self.free.pop())
        ends = torch.tensor([len(ids) for _, ids in chunks]).cumsum(0).tolist()
        lengths = [len(ids) if keep is None else min(keep, len(ids)) for _, ids in chunks]
        rows = torch.cat([torch.arange(end - length, end) for end, length in zip(ends, lengths)])
        ids = torch.tensor([token for _, ids in chunks for token in ids])
        groups: list[GroupStep] = [
            self._state_step(chunks) if group.is_recurrent else self._attention_step(chunks) for group in self.groups
        ]
        hidden = self.runner.forward(ids, groups, rows=rows)
        for row, chunk in chunks:
            row.num_cached += len(chunk)
        return list(self.runner.logits(hidden).split(lengths))

    def _state_step(self, chunks: Sequence[tuple[Row, Sequence[int]]]) -> StateStep:
        positions = [row.num_cached + i for row, ids in chunks for i in range(len(ids))]
        starts = torch.tensor([0] + [len(ids) for _, ids in chunks]).cumsum(0).int()
        num_context = _num_context_rows(chunks)
        return StateStep(
            slots=torch.tensor([row.slot for row, _ in chunks]),
            query_starts=starts,
            positions=torch.tensor(positions),
            max_query=max(len(ids) for _, ids in chunks),
            num_context_rows=num_context,
            context_starts=tuple(starts[: num_context + 1].tolist()),
        )

    def _attention_step(self, chunks: Sequence[tuple[Row, Sequence[int]]]) -> AttentionStep:
        positions = [row.num_cached + i for row, ids in chunks for i in range(len(ids))]
        rows = [row for row, ids in chunks for _ in ids]
        slots = [
            row.blocks[at // self.block_size] * self.block_size + at % self.block_size
            for row, at in zip(rows, positions)
        ]
        starts = torch.tensor([0] + [len(ids) for _, ids in chunks]).cumsum(0)
        kv_lens = [row.num_cached + len(ids) for row, ids in chunks]
        tables = torch.zeros(len(chunks), max(len(row.blocks) for row, _ in chunks), dtype=torch.int32)
        for table, (row, _) in zip(tables, chunks):
            table[: len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
        return AttentionStep(
            block_size=self.block_size,
            query_starts=starts.int(),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            positions=torch.tensor(positions),
            block_tables=tables,
            write_slots=torch.tensor(slots),
            max_query=max(len(ids) for _, ids in chunks),
            max_kv=max(kv_lens),
            num_context_rows=_num_context_rows(chunks),
        )


def _num_context_rows(chunks: Sequence[tuple[Row, Sequence[int]]]) -> int:
    return max((place + 1 for place, (_, ids) in enumerate(chunks) if len(ids) != 1), default=0)


def prompt(length: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return [random.Random(f"{seed}:{length}:{i}").randrange(vocab_size) for i in range(length)]


def edge_lengths(case: Case) -> list[int]:
    """Prompt lengths around block and window edges."""
    lengths = {1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 2}
    if case.window is not None:
        lengths |= {case.window - 1, case.window, case.window + 1, 3 * case.window}
    return sorted(lengths)


def check_prefill(case: Case) -> None:
    for length in edge_lengths(case):
        ids = prompt(length)
        (logits,) = Sequences(case.model).step([(Row(), ids)])
        assert_close(logits, case.logits(ids), f"prompt of {length} tokens")


def check_chunks(case: Case) -> None:
    ids = prompt(max(edge_lengths(case)))
    expected = case.logits(ids)
    for size in (1, 3, BLOCK_SIZE, BLOCK_SIZE + 1):
        sequences, row = Sequences(case.model), Row()
        parts = [sequences.step([(row, ids[at : at + size])])[0] for at in range(0, len(ids), size)]
        assert_close(torch.cat(parts), expected, f"chunks of {size} tokens")


def check_decode(case: Case, *, num_tokens: int = 24) -> None:
    for length in (1, BLOCK_SIZE, 2 * BLOCK_SIZE + 3):
        ids = prompt(length, seed=1)
        assert greedy(case.model, ids, num_tokens) == case.greedy(ids, num_tokens), f"prompt of {length} tokens"


def check_mixed_batch(case: Case, *, backend: AttentionBackend | None = None) -> None:
    """Rows of different ages in one step: whole prompts, chunks and single tokens."""
    longest = max(edge_lengths(case))
    texts = [prompt(length, seed=2) for length in (longest, 7, 2 * BLOCK_SIZE, longest - 1, 3)]
    cuts = [[longest - 4, 1, 3], [5, 1, 1], [BLOCK_SIZE, 1, BLOCK_SIZE - 1], [1, longest - 3, 1], [1, 1, 1]]
    sequences, rows = Sequences(case.model, num_blocks=2 * NUM_BLOCKS, backend=backend), [Row() for _ in texts]
    got: list[list[Tensor]] = [[] for _ in texts]
    for turn in range(3):
        chunks = [(row, ids[row.num_cached : row.num_cached + cut[turn]]) for row, ids, cut in zip(rows, texts, cuts)]
        for parts, logits in zip(got, sequences.step(chunks)):
            parts.append(logits)
    for ids, parts in zip(texts, got):
        assert_close(torch.cat(parts), case.logits(ids), f"row of {len(ids)} tokens")


def check_prefix_hit(case: Case) -> None:
    """A row begins on what another has computed; both go on, in one step and then token by token."""
    shared = prompt(-(-max(edge_lengths(case)) // BLOCK_SIZE) * BLOCK_SIZE, seed=4)
    texts = [shared + prompt(length, seed=5) for length in (BLOCK_SIZE + 1, 3)]
    sequences, first = Sequences(case.model), Row()
    sequences.step([(first, shared)])
    rows = [first, sequences.fork(first)]
    got = [[logits] for logits in sequences.step([(row, ids[len(shared) : -1]) for row, ids in zip(rows, texts)])]
    for parts, logits in zip(got, sequences.step([(row, ids[-1:]) for row, ids in zip(rows, texts)])):
        parts.append(logits)
    for ids, parts in zip(texts, got):
        assert_close(torch.cat(parts), case.logits(ids)[len(shared) :], f"prefix of {len(shared)} in {len(ids)} tokens")


def check_snapshots(case: Case) -> None:
    """Prompts beyond several snapshots: a row begins at one that another has gone on from, and then at a later one."""
    interval = 2 * BLOCK_SIZE
    ids = prompt(3 * interval + BLOCK_SIZE, seed=6)
    expected = case.logits(ids)
    sequences, first = Sequences(case.model), Row()
    saved: list[Row] = []
    for at in range(0, len(ids), interval):
        sequences.step([(first, ids[at : at + interval])])
        if first.num_cached % interval == 0:
            saved.append(sequences.save(first))
    assert [row.num_cached for row in saved] == [interval, 2 * interval, 3 * interval]
    rows = [sequences.resume(row) for row in (saved[0], saved[2], saved[1])]
    for logits in sequences.step([(row, ids[row.num_cached :]) for row in rows]):
        place = len(ids) - len(logits)
        assert_close(logits, expected[place:], f"resumed at {place}")


def check_branches(case: Case, branches: Mapping[str, Any]) -> None:
    """The longest prompt reaches what each of these keys is about: with another value transformers differs."""
    ids = prompt(max(edge_lengths(case)))
    expected = case.logits(ids)
    for key, value in branches.items():
        with torch.inference_mode():
            other = oracle_with(case.source.path, **{key: value})(torch.tensor([ids]), use_cache=False).logits[0]
        assert float((other - expected).abs().max()) > 100 * TOLERANCE, (
            f"{key} makes no difference to {len(ids)} tokens"
        )


def check_all(case: Case) -> None:
    check_prefill(case)
    check_prefix_hit(case)
    check_snapshots(case)
    check_chunks(case)
    check_decode(case)
    check_mixed_batch(case)


def greedy(model: Model, ids: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    sequences, row = Sequences(model, **options), Row()
    (logits,) = sequences.step([(row, list(ids))], keep=1)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < num_tokens:
        (logits,) = sequences.step([(row, tokens[-1:])])
        tokens.append(int(logits[-1].argmax()))
    return tokens


def assert_close(got: Tensor, expected: Tensor, what: str, *, tolerance: float = TOLERANCE) -> None:
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert got.dtype == torch.float32, f"{what}: logits are {got.dtype}"
    worst = float((got - expected).abs().max())
    assert worst < tolerance, f"{what}: logits differ by {worst:.2e} from transformers"
