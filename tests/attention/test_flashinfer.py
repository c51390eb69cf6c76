"""The FlashInfer backend: through a stand-in for the package on a CPU, and on a GPU with the package itself."""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import plugins
from headrace.attention import _flashinfer_rules
from headrace.attention._flashinfer_plan import Kernel, pages_of, unsupported
from headrace.attention._flashinfer_rules import Rule
from headrace.attention.port import AttentionBackend, AttentionSpec, AttentionStep, LayerCache
from headrace.attention.torch import TorchAttention
from headrace.kernels.quantise import FP8, PLAIN, Form, Quantised, dequantise
from headrace.kernels.rope_write import Projected
from tests.kits import attention as kit
from tests.kits.attention import Case, World
from tests.kits.interpreter import HAS_INTERPRETER
from tests.twin.harness import VOCAB, open_runtime, request, run, tokens_of

ON_CPU = pytest.mark.skipif(not HAS_INTERPRETER, reason="needs Triton and its interpreter for generated tokens")
HAS_PACKAGE = find_spec("flashinfer") is not None
ON_GPU = pytest.mark.skipif(not HAS_PACKAGE, reason="needs the package flashinfer-python")


class StandIn:
    """FlashInfer's wrapper of paged prefill, as its documentation has it, in plain torch: for layout HND, causal."""

    runs = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND" and backend == "fa2"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        disable_split_kv: bool = False,
    ) -> None:
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(each.dtype == torch.int32 for each in arrays) and causal and disable_split_kv
        assert paged_kv_indptr[0] == qo_indptr[0] == 0 and paged_kv_indptr[-1] == len(paged_kv_indices)
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        self.rows = [each.tolist() for each in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)]
        self.indices = paged_kv_indices.clone()
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.scale = 1.0 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale
        self.window_left, self.cap, self.dtypes = window_left, logits_soft_cap or 0.0, (q_data_type, kv_data_type)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        type(self).runs += 1
        k_cache, v_cache = paged_kv_cache
        heads, kv_heads, dim, page_size = self.shape
        assert (q.dtype, k_cache.dtype) == self.dtypes and out.dtype == q.dtype and out.shape == q.shape
        assert q.shape[1:] == (heads, dim) and k_cache.shape[1:] == v_cache.shape[1:] == (kv_heads, page_size, dim)
        assert k_cache.stride() == v_cache.stride(), "a kernel has one set of strides for both"
        starts, pages, last = self.rows
        assert q.shape[0] == starts[-1]
        for row, last_len in enumerate(last):
            ids = self.indices[pages[row] : pages[row + 1]].long()
            assert (ids >= 0).all(), "tiles are read as wholes: no page may be invalid"
            length = (len(ids) - 1) * page_size + last_len
            keys, values = (part[ids].transpose(0, 1).flatten(1, 2)[:, :length].float() for part in (k_cache, v_cache))
            queries = q[starts[row] : starts[row + 1]].float()
            out[starts[row] : starts[row + 1]] = self._row(queries, keys, values, k_scale or 1.0) * (v_scale or 1.0)
        return out

    def _row(self, q: Tensor, keys: Tensor, values: Tensor, k_scale: float) -> Tensor:
        """q: [queries, heads, dim]; keys, values: [kv_heads, length, dim]"""
        group = q.shape[1] // keys.shape[0]
        scores = torch.einsum("qhd,hkd->hqk", q, keys.repeat_interleave(group, 0)) * self.scale * k_scale
        if self.cap > 0:
            scores = self.cap * torch.tanh(scores / self.cap)
        at, position = torch.arange(keys.shape[1]), torch.arange(keys.shape[1] - len(q), keys.shape[1])[:, None]
        seen = at <= position
        if self.window_left >= 0:
            seen &= at >= position - self.window_left
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, 0))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(StandIn, "runs", 0)
    return StandIn


class Moved(TorchAttention):
    """A backend on a GPU beside the kit's tensors, which the cache returns to after each step."""

    def __init__(self) -> None:
        self.backend: AttentionBackend = plugins.load("attention", "flashinfer")()

    def run(
        self, packed: Projected, *, cache: LayerCache, step: AttentionStep, spec: AttentionSpec, form: Form = PLAIN
    ) -> Quantised:
        moved = LayerCache(cache.k.cuda(), cache.v.cuda())
        projected = replace(packed, **{name: getattr(packed, name).cuda() for name in ("qkv", "cos", "sin")})
        names = ("query_starts", "kv_lens", "positions", "block_tables", "write_slots")
        here = replace(step, **{name: getattr(step, name).cuda() for name in names}, scratch={})
        out = self.backend.run(projected, cache=moved, step=here, spec=spec, form=form)
        assert not step.num_context_rows or any("flashinfer" in key for key in here.scratch), "it went there"
        cache.k.copy_(moved.k)
        cache.v.copy_(moved.v)
        return Quantised(out.data.cpu(), None if out.scales is None else out.scales.cpu())


HALF = Case(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=64, block_size=8, lengths=(37, 5, 64))
CASES = {
    "plain": HALF,
    "groups of 5": replace(HALF, group=5, num_kv_heads=1),
    "one head a group": replace(HALF, group=1, block_size=32),
    "window": replace(HALF, window=20),
    "window within a page": replace(HALF, window=3, block_size=16),
    "cap": replace(HALF, soft_cap=3.0),
    "cap and window": replace(HALF, soft_cap=3.0, window=9),
    "FP8 cache": replace(HALF, kv_dtype=FP8),
    "FP8 cache and window": replace(HALF, kv_dtype=FP8, window=20),
}
SCHEDULE = [[(0, 10), (2, 30)], [(1, 5), (0, 20)], [(2, 34), (0, 7)]]
"""Prompts alone, parts of prompts behind what is in the cache, rows in any order."""


def released(world: World, done: list[int], rows: list[tuple[int, int]]) -> None:
    """What windows have left behind has no block any more."""
    for row, _ in rows:
        if world.case.window is not None:
            gone = max(0, done[row] - world.case.window + 1) // world.case.block_size
            world.tables[row, :gone] = kit.INVALID_BLOCK


def check(backend: AttentionBackend, case: Case, schedule: list[list[tuple[int, int]]]) -> None:
    """Over a cache of NaNs, with tables that forget."""
    world = World(case)
    cache = world.new_cache(backend)
    done = [0] * len(case.lengths)
    for rows in schedule:
        released(world, done, rows)
        step = world.step(rows, done)
        backend.plan(step)
        act = backend.run(world.projected(rows, done), cache=cache, step=step, spec=world.spec)
        parts = act.data.unflatten(-1, (case.num_heads, case.head_dim)).split([count for _, count in rows])
        for (row, count), part in zip(rows, parts, strict=True):
            expected = world.reference(row)[done[row] : done[row] + count]
            torch.testing.assert_close(part.double(), expected, atol=0.02, rtol=0.02)
            done[row] += count


@ON_CPU
@pytest.mark.parametrize("name", CASES)
def test_prompts_equal_dense_attention(package: type[StandIn], name: str) -> None:
    check(plugins.load("attention", "flashinfer")(), CASES[name], SCHEDULE)
    assert package.runs == len(SCHEDULE)


@ON_CPU
@pytest.mark.parametrize("kind", ["plain", "static", "token"])
def test_generated_tokens_beside_prompts(package: type[StandIn], kind: Any) -> None:
    """They stay with the Triton kernels; scales of the cache and the form of the result are the twin's."""
    case = replace(HALF, kv_dtype=FP8, lengths=(17, 5), num_kv_heads=1)
    world, backend = World(case), plugins.load("attention", "flashinfer")()
    form = Form(kind, torch.tensor([0.02]) if kind == "static" else None)
    spec = replace(world.spec, k_scale=0.03, v_scale=0.02)
    caches = [world.new_cache(backend) for _ in range(2)]
    done = [0, 0]
    for rows, after in (([(0, 16)], [16, 0]), ([(1, 4), (0, 1)], [17, 4])):
        step = world.step(rows, done)
        ours, twin = (
            attend.run(world.projected(rows, done), cache=cache, step=step, spec=spec, form=form)
            for attend, cache in zip((backend, TorchAttention()), caches)
        )
        torch.testing.assert_close(dequantise(ours), dequantise(twin), atol=0.04, rtol=0.07)
        done = after
    assert package.runs == 2


@ON_CPU
def test_a_step_that_becomes_a_graph_stays_with_triton(package: type[StandIn]) -> None:
    world, backend = World(replace(HALF, lengths=(9,), num_kv_heads=1)), plugins.load("attention", "flashinfer")()
    step = replace(world.step([(0, 9)], [0]), context_rows=None)
    act = backend.run(world.projected([(0, 9)], [0]), cache=world.new_cache(backend), step=step, spec=world.spec)
    kit.assert_close(world, [act.data.unflatten(-1, (world.case.num_heads, world.case.head_dim))])
    assert package.runs == 0


@ON_CPU
def test_layers_of_a_step_share_a_schedule_and_steps_do_not(package: type[StandIn]) -> None:
    world, backend = World(replace(HALF, lengths=(9,))), plugins.load("attention", "flashinfer")()
    steps = [world.step([(0, 9)], [0]) for _ in range(2)]
    wrappers: list[list[Any]] = []
    for step in steps:
        for spec in (world.spec, world.spec, replace(world.spec, window=4)):
            backend.run(world.projected([(0, 9)], [0]), cache=world.new_cache(backend), step=step, spec=spec)
        wrappers.append([held.wrapper for held in step.scratch.values()])
    assert len({id(wrapper) for held in wrappers for wrapper in held}) == 4, "two layers of one kind share"
    steps[0].scratch.clear()  # the step is over
    again = world.step([(0, 9)], [0])
    backend.run(world.projected([(0, 9)], [0]), cache=world.new_cache(backend), step=again, spec=world.spec)
    assert again.scratch.popitem()[1].wrapper is wrappers[0][0]


def test_pages_of_rows() -> None:
    kernel = Kernel(4, 2, 64, 1.0, None, None, 8, torch.bfloat16, torch.bfloat16)
    pages = pages_of([(5, 5), (3, 17), (8, 16)], kernel, table_width=10)
    assert pages.query_starts.tolist() == [0, 5, 8, 16] and pages.starts.tolist() == [0, 1, 4, 6]
    assert pages.places.tolist() == [0, 10, 11, 12, 20, 21] and pages.last_lens.tolist() == [5, 1, 8]


def test_pages_before_a_window_are_not_read() -> None:
    """The first query at 30 sees 27 to 30, the first of the page that begins at 24."""
    kernel = Kernel(4, 2, 64, 1.0, 4, None, 8, torch.bfloat16, torch.bfloat16)
    assert pages_of([(10, 40)], kernel, table_width=6).places.tolist() == [3, 3, 3, 3, 4]
    assert pages_of([(40, 40)], kernel, table_width=6).places.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "dtypes", "names"),
    [
        ({"sinks": torch.zeros(4)}, {}, "attention sinks"),
        ({"window": 8, "sink_tokens": 4}, {}, "sink_token_length"),
        ({"window": 8, "is_chunked": True}, {}, "within chunks"),
        ({"head_dim": 96}, {}, "heads of 96 features"),
        ({}, {"dtype": torch.float32, "kv_dtype": torch.float32}, "float32"),
        ({}, {"kv_dtype": torch.float16}, "a KV cache of float16"),
    ],
)
def test_what_it_cannot_compute_is_named(change: dict[str, Any], dtypes: dict[str, Any], names: str) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=1.0)
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    assert unsupported(spec, **half) is None and unsupported(spec, **{**half, "kv_dtype": FP8}) is None
    found = unsupported(replace(spec, **change), **{**half, **dtypes})
    assert found is not None and names in found


@ON_CPU
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"^attn_backend FLASHINFER needs.*pip install 'headrace\[flashinfer\]'"):
        plugins.load("attention", "flashinfer")()


@ON_CPU
def test_rules_choose_by_the_longest_prompt(package: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    rules = (Rule((9, 0), 64, is_kv_fp8=False, min_query=8), Rule((10, 0), 64, is_kv_fp8=True, min_query=1))
    backend = plugins.load("attention", "flashinfer")(rules=rules)
    for case, runs in ((replace(HALF, lengths=(7,)), 0), (replace(HALF, lengths=(8, 3)), 1)):
        world = World(replace(case, num_kv_heads=1))
        kit.assert_close(world, world.attend(backend, kit.whole(case)))
        assert package.runs == runs
    assert _flashinfer_rules.min_query(rules, world.spec, kv_dtype=FP8, capability=(9, 0)) is None


# ---- with the package ------------------------------------------------------------------------


@ON_GPU
def test_the_stand_in_has_the_packages_names() -> None:
    """By position those before the star, the others by name."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    for name in ("__init__", "plan", "run"):
        ours, theirs = (inspect.signature(getattr(each, name)).parameters for each in (StandIn, real))
        ordered = [key for key, each in ours.items() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(theirs)[: len(ordered)] == ordered and set(ours) <= set(theirs)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("name", CASES)
def test_prompts_equal_dense_attention_on_a_gpu(name: str) -> None:
    case = replace(CASES[name], head_dim=128)
    check(Moved(), case, SCHEDULE)
    lengths = (700, 133, 260)
    long = replace(case, lengths=lengths, block_size=32)
    check(Moved(), long, [[(0, 300), (2, 130)], [(1, 133), (0, 400)], [(2, 130)]])


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("kind", ["plain", "static"])
def test_scales_and_generated_tokens_on_a_gpu(kind: Any) -> None:
    case = replace(HALF, kv_dtype=FP8, head_dim=128, block_size=32, lengths=(170, 75))
    world, backend = World(case), Moved()
    form = Form(kind, torch.tensor([0.02]) if kind == "static" else None)
    spec = replace(world.spec, k_scale=0.03, v_scale=0.02)
    caches = [world.new_cache(backend) for _ in range(2)]
    done = [0, 0]
    for rows, after in (([(0, 169)], [169, 0]), ([(1, 74), (0, 1)], [170, 74])):
        step = world.step(rows, done)
        ours, twin = (
            attend.run(world.projected(rows, done), cache=cache, step=step, spec=spec, form=given)
            for attend, cache, given in (
                (backend, caches[0], form if form.scale is None else replace(form, scale=form.scale.cuda())),
                (TorchAttention(), caches[1], form),
            )
        )
        of_codes = 0.13 if kind == "static" else 0.07  # the next FP8 value is up to an eighth larger
        torch.testing.assert_close(dequantise(ours), dequantise(twin), atol=0.04, rtol=of_codes)
        done = after


def greedy(folder: Path, wanted: str) -> list[tuple[int, ...]]:
    """Prompts in chunks, some behind a prefix that is in the cache, beside rows that generate."""
    core = open_runtime(
        folder,
        attn_backend=wanted,
        dtype="bfloat16",
        cuda_graph_config=None,
        max_num_tokens=160,
        kv_cache_config={"tokens_per_block": 16, "max_tokens": 8192},
    )
    try:
        ids = torch.randint(VOCAB, (8, 240), generator=torch.Generator().manual_seed(1)).tolist()
        asked = [request(index, ids[index % 6][: 240 - 17 * index], max_tokens=3) for index in range(8)]
        found = run(core, asked, stagger=2)
        return [tuple(tokens_of(found[index])) for index in range(8)]
    finally:
        core.engine.close()


@pytest.mark.gpu
@ON_GPU
def test_an_engine_with_it(tmp_path: Path) -> None:
    """In bfloat16 a close call may fall the other way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 128}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=512, initializer_range=0.3, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    ours, theirs = greedy(tmp_path, "TRTLLM"), greedy(tmp_path, "FLASHINFER")
    assert sum(one == other for one, other in zip(ours, theirs)) >= 6, (ours, theirs)
