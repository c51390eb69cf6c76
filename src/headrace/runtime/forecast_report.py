"""A forecast as text for people, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.hub.shape import RecurrentShape
from headrace.runtime.forecast import Change, Forecast, Stage
from headrace.runtime.memory_table import GIB, describe

FORM_NAMES = {
    "linear": "linears",
    "expert": "routed experts",
    "plain": "plain (embedding, head, norms)",
    "float32": "float32",
}


def as_dict(forecast: Forecast, changes: Sequence[Change], *, length: int, concurrency: int) -> dict[str, Any]:
    """The report's content. Sizes are in bytes and of one rank, unless they say otherwise."""
    shape, spread = forecast.shape, forecast.spread
    return {
        "model": {
            "type": shape.model_type,
            "is_known": shape.is_known,
            "parameters": shape.num_parameters,
            "layers": len(shape.layers),
            "max_position": shape.max_position,
            "dtype": forecast.dtype,
            "weights": forecast.storage.name,
        },
        "device": {"name": spread.device.name, "memory_bytes": spread.device.memory_bytes},
        "ranks": {
            "tensor": spread.ranks.tensor,
            "pipeline": spread.ranks.pipeline,
            "expert": spread.ranks.expert,
            "attention_data": spread.ranks.attention_data,
            "replicas": spread.replicas,
        },
        "stages": [_stage(stage) for stage in forecast.stages],
        "fits": {
            "problem": forecast.problem or None,
            "tokens": forecast.num_tokens,
            "max_seq_len": forecast.max_seq_len,
            "request_tokens": length,
            "requests": forecast.num_requests(length),
            "wanted_requests": concurrency,
        },
        "turn_down": [
            {"setting": change.setting, "value": change.value, "requests": change.num_requests} for change in changes
        ],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    settled = stage.settled
    return {
        "layers": [stage.layers.start, stage.layers.stop],
        "weight_bytes": stage.facts.weight_bytes,
        "weight_bytes_by_form": {form: size for form, size in stage.weights.items() if size},
        "activation_bytes": stage.facts.activation_bytes,
        "groups": [
            {
                "kind": group.kind,
                "layers": list(group.spec.layers),
                "window": group.spec.window,
                "sink_tokens": group.spec.sink_tokens,
                "dtype": group.spec.dtype,
                "bytes_per_token": group.spec.bytes_per_token,
                "state_bytes": group.spec.state_bytes,
                "replicas": group.replicas,
                "formula": group.formula,
            }
            for group in stage.groups
        ],
        "problem": stage.problem or None,
        "num_blocks": None if settled is None else list(settled.sizes.num_blocks),
        "num_slots": None if settled is None else settled.sizes.num_slots,
        "memory": None if settled is None else settled.memory.as_dict(),
    }


def as_text(forecast: Forecast, changes: Sequence[Change], *, length: int, concurrency: int) -> str:
    """The report in sections: model, cache, memory, what fits, what to turn down."""
    lines = [*_model_lines(forecast), "", *_cache_lines(forecast), "", *_memory_lines(forecast), ""]
    lines += _fit_lines(forecast, length, concurrency)
    if changes:
        lines += ["", *_change_lines(forecast, changes, length, concurrency)]
    return "\n".join(lines)


def _model_lines(forecast: Forecast) -> list[str]:
    shape = forecast.shape
    quantised = f", weights {forecast.storage.name}" if forecast.storage.bits else ""
    lines = [
        f"{shape.model_type}: {_parameters(shape.num_parameters)} parameters, {len(shape.layers)} layers,"
        f" {shape.max_position:,} positions, {forecast.dtype}{quantised}"
    ]
    if not shape.is_known:
        lines.append(
            "  this model type has no rules here: read by its config's keys, compare with the checkpoint's size"
        )
    if any(isinstance(layer.mixer, RecurrentShape) for layer in shape.layers):
        state = forecast.args.kv_cache_config.mamba_state_config
        if forecast.args.kv_cache_config.enable_block_reuse and not state.periodic_snapshot_interval:
            lines.append("  its prefixes are reused at snapshots only, and mamba_state_config takes none")
    return lines


def _cache_lines(forecast: Forecast) -> list[str]:
    stage = forecast.tightest
    rows: list[tuple[str, str, str]] = []
    for group in stage.groups:
        spec = group.spec
        size = f"{spec.state_bytes:,} a sequence" if spec.is_recurrent else f"{spec.bytes_per_token:,} a token"
        copies = f" (the same on {group.replicas} ranks)" if group.replicas > 1 else ""
        rows.append((f"{group.kind}, {describe(spec)}", size, f"= {group.formula}{copies}"))
    return ["cache of a rank, in bytes", *_columns(rows)]


def _memory_lines(forecast: Forecast) -> list[str]:
    stage, spread = forecast.tightest, forecast.spread
    where = "" if len(forecast.stages) == 1 else f", layers {stage.layers.start} to {stage.layers.stop - 1}"
    head = f"memory of a rank{where}: {spread.device.name}, {spread.device.memory_bytes / GIB:.1f} GiB"
    rows = [(f"weights: {FORM_NAMES[form]}", _gib(size), "") for form, size in stage.weights.items() if size]
    if stage.settled is None:
        rows.append(("activations", _gib(stage.facts.activation_bytes), f"{forecast.args.max_num_tokens:,} tokens"))
        return [head, *_columns(rows)]
    if spread.device.reserved_bytes:
        rows.append(("context and collectives", _gib(spread.device.reserved_bytes), "about"))
    for row in stage.settled.memory.rows[1:]:
        tokens = "" if row.num_tokens is None else f"{row.num_tokens:,} tokens"
        rows.append((row.name, _gib(row.size_bytes), ", ".join(part for part in (tokens, row.note) if part)))
    return [head, *_columns(rows)]


def _fit_lines(forecast: Forecast, length: int, concurrency: int) -> list[str]:
    spread = forecast.spread
    total = spread.ranks.count * spread.replicas
    ranks = [f"tensor {spread.ranks.tensor}", f"pipeline {spread.ranks.pipeline}"]
    if spread.ranks.expert > 1:
        ranks.append(f"expert {spread.ranks.expert}")
    if spread.ranks.attention_data:
        ranks.append("attention data parallel")
    if spread.replicas > 1:
        ranks.append(f"{spread.replicas} replicas")
    where = f"{total} x {spread.device.name} ({', '.join(ranks)})"
    if forecast.problem:
        return [f"does not fit on {where}:", f"  {forecast.problem}"]
    count = forecast.num_requests(length)
    verdict = "" if count >= concurrency else f" ({concurrency:,} wanted)"
    if length > forecast.max_seq_len:
        verdict = ", which is more than the longest one has"
    return [
        f"fits on {where}",
        f"  {forecast.num_tokens:,} tokens",
        f"  {count:,} requests of {length:,} tokens at a time{verdict}",
        f"  longest request: {forecast.max_seq_len:,} tokens",
    ]


def _change_lines(forecast: Forecast, changes: Sequence[Change], length: int, concurrency: int) -> list[str]:
    rows = [
        (
            f"{change.setting}: {change.yaml}",
            "does not fit yet" if change.problem else f"{change.num_requests:,} requests",
            "",
        )
        for change in changes
    ]
    lines = ["turn first, one after another:", *_columns(rows)]
    if changes[-1].num_requests < concurrency:
        lines.append(
            f"  {concurrency:,} requests of {length:,} tokens still don't fit: more devices, or shorter requests"
        )
    return lines


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    first = max((len(row[0]) for row in rows), default=0)
    second = max((len(row[1]) for row in rows), default=0)
    return [f"  {name:<{first}}  {size:>{second}}  {note}".rstrip() for name, size, note in rows]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3f} GiB"


def _parameters(count: int) -> str:
    if count >= 10**9:
        return f"{count / 10**9:.1f} billion"
    return f"{count / 10**6:.1f} million"
