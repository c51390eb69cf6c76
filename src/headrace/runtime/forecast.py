"""What a configuration would take and hold on devices that need not be here: `settle` on the facts of a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.config.kernels import DecodeCudaGraphConfig
from headrace.config.kv import window_of
from headrace.config.llm_args import COMPUTE_DTYPES, LlmArgs
from headrace.hub.rank_share import (
    DTYPE_BITS,
    CacheTypes,
    PlannedGroup,
    Ranks,
    rank_groups,
    weight_bytes,
)
from headrace.hub.shape import AttentionShape, Form, ModelShape, Storage, activation_bytes, graph_bytes, logits_bytes
from headrace.hub.stages import stages
from headrace.hub.storage import in_fp8_on_load, quantised
from headrace.runtime.gpus import Device
from headrace.runtime.settle import NoRoom, Settled, length_limit, settle
from headrace.seam import EngineFacts

FP8 = "fp8"
MIN_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranks and devices."""

    device: Device
    ranks: Ranks
    replicas: int = 1
    """Copies of the whole model, each on devices of its own."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: its ranks are alike."""

    layers: range
    groups: tuple[PlannedGroup, ...]
    weights: dict[Form, int]
    facts: EngineFacts
    settled: Settled | None
    problem: str = ""
    """Why nothing fits."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer for one configuration."""

    shape: ModelShape
    args: LlmArgs
    spread: Spread
    storage: Storage
    dtype: str
    """Of activations, and of weights that are not quantised."""
    stages: tuple[Stage, ...]

    @property
    def problem(self) -> str:
        return next((stage.problem for stage in self.stages if stage.problem), "")

    @property
    def tightest(self) -> Stage:
        """The stage that decides how much fits."""
        return min(self.stages, key=lambda stage: stage.settled.num_tokens if stage.settled else -1)

    @property
    def num_caches(self) -> int:
        """Caches that hold different requests: those of data-parallel ranks and of replicas."""
        return self.spread.replicas * (self.spread.ranks.tensor if self.spread.ranks.attention_data else 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that all caches hold together."""
        settled = self.tightest.settled
        return settled.num_tokens * self.num_caches if settled else 0

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest request that fits."""
        return min(
            min(stage.settled.max_seq_len, stage.settled.num_tokens) if stage.settled else 0 for stage in self.stages
        )

    def num_requests(self, length: int) -> int:
        """Requests of this length, prompt and answer, that run at the same time."""
        if not 0 < length <= self.max_seq_len:
            return 0
        counts: list[int] = []
        for stage in self.stages:
            assert stage.settled is not None
            usable = [count - 1 for count in stage.settled.sizes.num_blocks]
            held = stage.settled.demand.sequences_held(stage.facts.groups, usable, length)
            slots = stage.settled.scheduler.max_batch_size
            counts.append(slots if held is None else min(held, slots))
        return min(counts) * self.num_caches


def forecast(args: LlmArgs, shape: ModelShape, spread: Spread) -> Forecast:
    """Settle every stage's sizes.

    Raises:
        ValueError: settings that contradict the model, by name.
    """
    if args.force_dynamic_quantization and not shape.storage.bits and args.dtype in COMPUTE_DTYPES:
        shape = in_fp8_on_load(shape)
    storage = quantised(args.dtype) if args.dtype not in COMPUTE_DTYPES else shape.storage
    dtype = shape.dtype if args.dtype == "auto" or args.dtype not in COMPUTE_DTYPES else args.dtype
    if dtype not in DTYPE_BITS:
        raise ValueError(f"dtype: the checkpoint's '{dtype}' is not one to compute with: choose one with --dtype")
    ranks, parts = spread.ranks, stages(shape.layers, spread.ranks.pipeline, args.pp_partition)
    types = _cache_types(args, shape, dtype)
    planned: list[Stage] = []
    for number, layers in enumerate(parts):
        held = [shape.layers[place] for place in layers]
        first, last = number == 0, number == len(parts) - 1
        weights = weight_bytes(shape, held, ranks, plain=dtype, storage=storage, first=first, last=last)
        groups = tuple(rank_groups(held, layers, ranks, types))
        facts = _facts(args, shape, spread, groups, sum(weights.values()), dtype)
        settled, problem = _settled(args, facts, spread.device)
        planned.append(Stage(layers, groups, weights, facts, settled, problem))
    return Forecast(shape, args, spread, storage, dtype, tuple(planned))


def _settled(args: LlmArgs, facts: EngineFacts, device: Device) -> tuple[Settled | None, str]:
    length_limit(args, facts)
    args.kv_cache_config.check_groups(len(facts.groups))
    if facts.free_bytes <= 0:
        least = facts.weight_bytes + device.reserved_bytes
        return None, (
            f"the weights of a rank take {facts.weight_bytes:,} bytes, which is {least:,} with what the device keeps"
            f" for itself, and {device.name} has {device.memory_bytes:,}"
        )
    try:
        return settle(args, facts), ""
    except NoRoom as error:
        return None, str(error)


def _facts(
    args: LlmArgs, shape: ModelShape, spread: Spread, groups: tuple[PlannedGroup, ...], held_bytes: int, dtype: str
) -> EngineFacts:
    activations, graphs = _device_bytes(args, shape, spread.device.name, int(DTYPE_BITS[dtype]) // 8)
    return EngineFacts(
        model_type=shape.model_type,
        vocab_size=shape.vocab_size,
        num_valid_ids=shape.vocab_size,
        max_position=shape.max_position,
        groups=tuple(group.spec for group in groups),
        weight_bytes=held_bytes,
        activation_bytes=activations,
        graph_bytes=graphs,
        free_bytes=spread.device.memory_bytes - spread.device.reserved_bytes - held_bytes,
        device=spread.device.name,
    )


def _cache_types(args: LlmArgs, shape: ModelShape, dtype: str) -> CacheTypes:
    kv = args.kv_cache_config
    stored = dtype if kv.dtype == "auto" else kv.dtype
    if stored not in DTYPE_BITS:
        raise ValueError(
            f"kv_cache_config.dtype: the size of '{stored}' is not known here: use {', '.join(DTYPE_BITS)}"
        )
    state = kv.mamba_ssm_cache_dtype
    longest = args.max_seq_len if isinstance(args.max_seq_len, int) else shape.max_position
    windows = tuple(
        window_of(
            place,
            layer.mixer.window if isinstance(layer.mixer, AttentionShape) else None,
            windows=kv.max_attention_window or (),
            longest=longest,
        )
        for place, layer in enumerate(shape.layers)
    )
    return CacheTypes(
        kv=stored,
        state=(shape.state_dtype or dtype) if state == "auto" else state,
        activations=dtype,
        windows=windows,
        sink_tokens=kv.sink_token_length or 0,
    )


def _device_bytes(args: LlmArgs, shape: ModelShape, device: str, item_bytes: int) -> tuple[int, int]:
    """-> (activations of a step, CUDA graphs)"""

    def step(num_tokens: int) -> int:
        return activation_bytes(
            shape.hidden_size, shape.intermediate_size, max_num_tokens=num_tokens, item_bytes=item_bytes
        )

    if device.startswith("cpu"):
        return step(args.max_num_tokens), 0
    logits = logits_bytes(shape.vocab_size, num_rows=args.max_batch_size, item_bytes=item_bytes)
    graphs = args.cuda_graph_config
    sizes = graphs.capture_sizes() if isinstance(graphs, DecodeCudaGraphConfig) else []
    sizes = [size for size in sizes if size <= args.max_batch_size]
    return step(args.max_num_tokens) + logits, graph_bytes(
        sizes, vocab_size=shape.vocab_size, step_bytes=step(max(sizes, default=0)), item_bytes=item_bytes
    )


# ---- what to turn down -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One setting turned, on top of those before it, and what then fits."""

    setting: str
    value: Any
    num_requests: int
    problem: str
    """Why nothing fits even then."""

    @property
    def yaml(self) -> str:
        """The value as a file has it."""
        return "null" if self.value is None else str(self.value).lower()


def turn_down(start: Forecast, *, length: int, concurrency: int) -> list[Change]:
    """Settings to change until `concurrency` requests of `length` tokens fit, the cheapest first.

    Changes add up; one that helps nothing is left out. Empty when they fit already. The last change need not be enough.
    """
    changes: list[Change] = []
    now = start
    while now.num_requests(length) < concurrency:
        better = next(_better(now, length=length, concurrency=concurrency), None)
        if better is None:
            break
        change, now = better
        if changes and changes[-1].setting == change.setting:  # the same one again, turned farther
            changes.pop()
        changes.append(change)
    return changes


def _better(now: Forecast, *, length: int, concurrency: int) -> Iterator[tuple[Change, Forecast]]:
    """The changes that let more requests fit, or that come nearer to fitting at all."""
    before = now.num_requests(length)
    for setting, value, turned in _turns(now, length=length, concurrency=concurrency):
        try:
            after = turned()
        except ValueError:
            continue
        count = after.num_requests(length)
        if count > before or (now.problem and _missing_bytes(after) < _missing_bytes(now)):
            yield Change(setting, value, count, after.problem), after


def _missing_bytes(forecast: Forecast) -> int:
    """What weights, activations and live states take beyond the tightest device's memory; 0 when they fit."""
    needs = (
        stage.facts.activation_bytes
        - stage.facts.free_bytes
        + forecast.args.max_batch_size * sum(group.state_bytes for group in stage.facts.groups)
        for stage in forecast.stages
    )
    return max(*needs, 0)


def _turns(now: Forecast, *, length: int, concurrency: int) -> Iterator[tuple[str, Any, Callable[[], Forecast]]]:
    """Every single change that makes sense, cheapest first: (setting, value, the forecast with it)."""
    args, kv = now.args, now.args.kv_cache_config

    def with_args(**changes: Any) -> Callable[[], Forecast]:
        return lambda: forecast(_changed(args, **changes), now.shape, now.spread)

    if kv.max_tokens is not None:
        yield "kv_cache_config.max_tokens", None, with_args(max_tokens=None)
    if kv.max_gpu_total_bytes:
        yield "kv_cache_config.max_gpu_total_bytes", 0, with_args(max_gpu_total_bytes=0)
    each = -(-concurrency // now.num_caches)
    if each > args.max_batch_size:
        yield "max_batch_size", each, with_args(max_batch_size=each)
    if len(now.tightest.groups) > 1 and kv.avg_seq_len != length and kv.pool_ratio is None:
        yield "kv_cache_config.avg_seq_len", length, with_args(avg_seq_len=length)
    if kv.free_gpu_memory_fraction < 0.95:
        yield "kv_cache_config.free_gpu_memory_fraction", 0.95, with_args(free_gpu_memory_fraction=0.95)
    if args.max_num_tokens > MIN_STEP_TOKENS:
        fewer = max(args.max_num_tokens // 2, MIN_STEP_TOKENS)
        yield "max_num_tokens", fewer, with_args(max_num_tokens=fewer)
    if args.max_batch_size > each:
        fewer = max(args.max_batch_size // 2, each)
        yield "max_batch_size", fewer, with_args(max_batch_size=fewer)
    if kv.dtype == "auto":
        yield "kv_cache_config.dtype", FP8, with_args(kv_dtype=FP8)
    if not now.storage.bits:
        yield "force_dynamic_quantization", True, with_args(force_dynamic_quantization=True)
    ranks, spread = now.spread.ranks, now.spread
    if not spread.device.name.startswith("cpu") and ranks.tensor < 64:
        wider = Ranks(
            ranks.tensor * 2, ranks.pipeline, ranks.expert * (2 if ranks.expert > 1 else 1), ranks.attention_data
        )
        doubled = Spread(spread.device, wider, max(spread.replicas // 2, 1))
        yield "tensor_parallel_size", wider.tensor, lambda: forecast(args, now.shape, doubled)


def _changed(args: LlmArgs, *, kv_dtype: str | None = None, **changes: Any) -> LlmArgs:
    copy = args.thaw_copy()
    for name, value in changes.items():
        owner = copy if name in type(copy).model_fields and name != "max_tokens" else copy.kv_cache_config
        setattr(owner, name, value)
    if kv_dtype is not None:
        copy.kv_cache_config.dtype = kv_dtype
    return copy.freeze()
