"""The contract of a model file: its logits and greedy tokens are those of transformers, whatever the schedule.

A case is a tiny random checkpoint that transformers wrote, of the config in the model type's row of `tests.kits.tiny`.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.attention.port import AttentionBackend
from headrace.engine.build import build_model
from headrace.engine.weights import LoadReport, load_weights
from headrace.hub.config import read_config
from headrace.hub.source import ModelSource, resolve_model
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Model, RecurrentLayer
from headrace.quant.none import Dense
from tests.kits.sequences import BLOCK_SIZE as BLOCK_SIZE
from tests.kits.sequences import HOST, NUM_BLOCKS, Place
from tests.kits.sequences import Row as Row
from tests.kits.sequences import Sequences as Sequences
from tests.kits.tiny import TINY as TINY
from tests.kits.tiny import VOCAB_SIZE, tiny_model
from tests.kits.tiny import WINDOW as WINDOW

TOLERANCE = 1e-4
FILE = "model.safetensors"
OLDER: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "mamba2": {"n_groups": 1},
    "minimax_m2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
}
"""Values at which an older transformers, which a machine with a GPU may have, computes the same: it has the limit as a
constant, norms over all groups, and does not read `rotary_dim`."""


def is_older(version: str) -> bool:
    """Whether this release of transformers is before the one that pyproject.toml asks for."""
    return tuple(int(part) for part in version.split(".")[:2]) < (5, 24)


def tiny_config(model_type: str, **changes: Any) -> Any:
    """transformers' config of a row, under the type by which it computes it.

    Args:
        model_type: or another row of `tests.kits.tiny`.
    """
    import transformers  # here, since it takes seconds and the ranks of a group don't need it

    row = tiny_model(model_type)
    known = row.oracle or row.of or model_type
    declared = transformers.AutoConfig.for_model(known).to_dict()
    tiny = {key: value for key, value in TINY.items() if key in declared}
    older = OLDER.get(known, {}) if is_older(transformers.__version__) else {}
    wanted = copy.deepcopy({**tiny, **row.changes, **older, **changes})  # some write to lists that they get
    return transformers.AutoConfig.for_model(known, **wanted)


def save_tiny(folder: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """Write a random float32 checkpoint; returns transformers' model of it. Args: as of `tiny_config`."""
    import transformers

    config = tiny_config(model_type, **changes)
    known, model_type = config.model_type, tiny_model(model_type).of or model_type
    if known == "glm5_next_text":
        from tests.kits.causal import register

        register()
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


def wrap_tiny(
    folder: Path, wrapper: str, *, prefix: str = "model.language_model.", head_prefix: str = "", beside: str = ""
) -> None:
    """Turn a text checkpoint into what multimodal ones look like.

    Args:
        prefix, head_prefix: of the names of the language model and of its head.
        beside: a part that is not the language model.
    """
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": wrapper, "text_config": text, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        (head_prefix + name if name.startswith("lm_head") else prefix + name.removeprefix("model.")): value
        for name, value in load_file(folder / FILE).items()
    }
    extra = {f"{beside}.layers.0.weight": torch.zeros(2, 2)} if beside else {}
    save_file({**tensors, **extra}, folder / FILE)


def oracle_with(folder: Path, **changes: Any) -> Any:
    """transformers' model of a checkpoint under another config."""
    import transformers

    stated = json.loads((folder / "config.json").read_text())["model_type"]
    known = transformers.CONFIG_MAPPING[tiny_model(stated).oracle or stated]
    config = known.from_pretrained(folder, **changes)
    config.model_type = known.model_type  # by which transformers goes when it reads a checkpoint's names
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
    place: Place = HOST

    def sequences(self, **options: Any) -> Sequences:
        return Sequences(self.model, place=self.place, **options)

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


def load_case(source: ModelSource, oracle: Any, *, place: Place = HOST, **options: Any) -> Case:
    model, report = load_model(source, device=place.device, **options)
    return Case(oracle, source, model, report, place)


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelContext | None = None,
    max_len: int | None = None,
    impl: str = "auto",
    device: str = "cpu",
) -> tuple[Model, LoadReport]:
    dense = Dense()
    factory = LayerFactory(dtype=dtype, recipe=lambda name: dense, parallel=parallel, max_len=max_len, device=device)
    model = build_model(read_config(source), factory, impl=impl)
    return model, load_weights(model, source, progress=False)


def make_case(
    folder: Path, model_type: str, *, max_len: int | None = None, place: Place = HOST, **changes: Any
) -> Case:
    oracle = save_tiny(folder, model_type, **changes)
    return load_case(resolve_model(str(folder)), oracle, max_len=max_len, place=place)


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
        (logits,) = case.sequences().step([(Row(), ids)])
        assert_close(logits, case.logits(ids), f"prompt of {length} tokens")


def check_chunks(case: Case) -> None:
    ids = prompt(max(edge_lengths(case)))
    expected = case.logits(ids)
    for size in (1, 3, BLOCK_SIZE, BLOCK_SIZE + 1):
        sequences, row = case.sequences(), Row()
        parts = [sequences.step([(row, ids[at : at + size])])[0] for at in range(0, len(ids), size)]
        assert_close(torch.cat(parts), expected, f"chunks of {size} tokens")


def check_decode(case: Case, *, num_tokens: int = 24) -> None:
    for length in (1, BLOCK_SIZE, 2 * BLOCK_SIZE + 3):
        ids = prompt(length, seed=1)
        got = greedy(case.model, ids, num_tokens, place=case.place)
        assert got == case.greedy(ids, num_tokens), f"prompt of {length} tokens"


def check_mixed_batch(case: Case, *, backend: AttentionBackend | None = None) -> None:
    """Rows of different ages in one step: whole prompts, chunks and single tokens."""
    longest = max(edge_lengths(case))
    texts = [prompt(length, seed=2) for length in (longest, 7, 2 * BLOCK_SIZE, longest - 1, 3)]
    cuts = [[longest - 4, 1, 3], [5, 1, 1], [BLOCK_SIZE, 1, BLOCK_SIZE - 1], [1, longest - 3, 1], [1, 1, 1]]
    sequences, rows = case.sequences(num_blocks=2 * NUM_BLOCKS, backend=backend), [Row() for _ in texts]
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
    sequences, first = case.sequences(), Row()
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
    sequences, first = case.sequences(), Row()
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

    def difference(**changes: Any) -> float:
        with torch.inference_mode():
            other = oracle_with(case.source.path, **changes)(torch.tensor([ids]), use_cache=False).logits[0]
        return float((other - expected).abs().max())

    assert not branches or difference() < TOLERANCE, "the checkpoint is read as another model than it was written from"
    for key, value in branches.items():
        assert difference(**{key: value}) > 100 * TOLERANCE, f"{key} makes no difference to {len(ids)} tokens"


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


def assert_close(got: Tensor, expected: Tensor, what: str, *, tolerance: float | None = None) -> None:
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert got.dtype == torch.float32, f"{what}: logits are {got.dtype}"
    worst = float((got - expected).abs().max())
    assert worst < (tolerance or TOLERANCE), f"{what}: logits differ by {worst:.2e} from transformers"
