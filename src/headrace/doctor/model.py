"""Checks of one model on this machine, without its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.config.llm_args import LlmArgs
from headrace.config.machine import free_memory_bytes
from headrace.doctor.backends import device_type
from headrace.doctor.facts import Facts
from headrace.doctor.finding import Finding
from headrace.doctor.system import num_ranks
from headrace.hub.config import stated_quantisation, text_config
from headrace.hub.config_only import find_config
from headrace.hub.errors import ModelError
from headrace.hub.rank_share import Ranks
from headrace.hub.read_shape import read_shape
from headrace.hub.shape import ModelShape, RecurrentShape
from headrace.runtime.forecast import Spread, forecast, turn_down
from headrace.runtime.gpus import COLLECTIVES_BYTES, CONTEXT_BYTES, Device

FP8_CAPABILITY = (8, 9)


def check_model(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """
    Raises:
        ModelError: there is no such model.
    """
    config = find_config(args.model, revision=args.revision, model_kwargs=args.model_kwargs)
    yield from _architecture(config, args)
    yield from _quantisation(config, facts, args)
    try:
        shape = read_shape(config)
    except ModelError as error:
        yield Finding("model.config", "problem", str(error), "take a folder that transformers has saved")
        return
    yield from _room(shape, facts, args)
    yield from _snapshots(shape, args)
    yield from _tokenizer(config, args)


def _architecture(config: Mapping[str, Any], args: LlmArgs) -> Iterator[Finding]:
    from headrace.engine.build import Servable

    model_type = str(config.get("model_type"))
    if model_type in Servable(args.model_impl):
        yield Finding("model.architecture", "ok", f"{model_type} is served")
    else:
        yield Finding(
            "model.architecture",
            "problem",
            f"{model_type} is no architecture that is served",
            "see 'headrace models' for those that are",
        )


def _quantisation(config: Mapping[str, Any], facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """Trap: a checkpoint in a form that the engine, or the GPU, does not have."""
    from headrace.layers.recipes import read_recipes

    stated = stated_quantisation(config)
    try:
        recipes = read_recipes({"quantization_config": stated}, force_dynamic=args.force_dynamic_quantization)
    except ValueError as error:
        yield Finding("model.quantisation", "problem", str(error), "take the checkpoint of another form")
        return
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    is_fp8 = method in ("fp8", "modelopt", "compressed-tensors") or args.force_dynamic_quantization
    slow = [gpu for gpu in facts.gpus if gpu.capability and gpu.capability < FP8_CAPABILITY]
    if is_fp8 and facts.on_gpu and slow:
        yield Finding(
            "model.quantisation",
            "problem",
            f"FP8 weights, and {slow[0].name} has no FP8 in hardware",
            "take the 16-bit checkpoint",
        )
    else:
        form = f"quantization_config: {method}" if method else "no quantization_config"
        cache = ", with an FP8 cache" if recipes.is_kv_fp8 else ""
        yield Finding("model.quantisation", "ok", f"{form}{cache}")


def _room(shape: ModelShape, facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    try:
        planned = forecast(args, shape, _spread(facts, args))
    except ValueError as error:
        yield Finding("model.settings", "problem", str(error), "mend the setting that it names")
        return
    length = planned.max_seq_len or shape.max_position
    count = planned.num_requests(length)
    if count:
        yield Finding("model.memory", "ok", f"fits: {count} requests of {length:,} tokens at a time")
        return
    changes = turn_down(planned, length=length, concurrency=1)
    helps = changes and changes[-1].num_requests
    remedy = (
        "set " + ", ".join(f"{change.setting} {change.yaml}" for change in changes)
        if helps
        else ("choose a smaller model, a quantised checkpoint, or more GPUs (headrace plan MODEL --gpu NAME --tp N)")
    )
    yield Finding("model.memory", "problem", planned.problem or f"not one request of {length:,} tokens fits", remedy)


def _spread(facts: Facts, args: LlmArgs) -> Spread:
    ranks = Ranks(args.tensor_parallel_size, args.pipeline_parallel_size, args.moe_expert_parallel_size or 1)
    if device_type(facts) == "cpu":
        return Spread(Device("cpu of this machine", free_memory_bytes() // max(ranks.count, 1), 0), ranks)
    tightest = min(facts.gpus[: ranks.count], key=lambda gpu: gpu.free_bytes)
    reserved_bytes = CONTEXT_BYTES + (COLLECTIVES_BYTES if num_ranks(args) > 1 else 0)
    return Spread(Device(tightest.name, tightest.free_bytes, reserved_bytes), ranks)


def _snapshots(shape: ModelShape, args: LlmArgs) -> Iterator[Finding]:
    """Trap: prefixes of a model with recurrent layers are found only where a state was kept."""
    states = args.kv_cache_config.mamba_state_config
    extra = states.additional_snapshot_offsets_from_start or states.additional_snapshot_offsets_from_end
    if not any(isinstance(layer.mixer, RecurrentShape) for layer in shape.layers):
        return
    if not args.kv_cache_config.enable_block_reuse or states.periodic_snapshot_interval or extra:
        return
    if not states.enable_branch_snapshot:
        yield Finding(
            "model.snapshots",
            "warning",
            "recurrent layers, and no states of them are kept: no prefix is ever reused",
            "kv_cache_config.mamba_state_config.periodic_snapshot_interval: 256",
        )


def _tokenizer(config: Mapping[str, Any], args: LlmArgs) -> Iterator[Finding]:
    """Trap: a tokenizer of another checkpoint."""
    from headrace.hub.source import resolve_model
    from headrace.text.load import load_tokenizer
    from headrace.text.tokenizer import check_vocabulary

    is_config_only = Path(str(args.model)).suffix == ".json"
    if args.skip_tokenizer_init or is_config_only or not isinstance(args.tokenizer, str | None):
        return
    if "vocab_size" not in {**config, **text_config(config)}:
        return
    try:
        source = args.tokenizer or resolve_model(args.model, revision=args.revision)
        count = check_vocabulary(load_tokenizer(source, mode=args.tokenizer_mode), config)
    except ValueError as error:
        yield Finding("model.tokenizer", "problem", str(error), "take tokenizer and weights of one checkpoint")
        return
    yield Finding("model.tokenizer", "ok", f"{count:,} ids, which the model's vocabulary holds")
