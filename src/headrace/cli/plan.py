"""`headrace plan`: what a model takes and how much fits, without its weights and without a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.models import model_argument
from headrace.cli.options import _Option, _state, llm_options
from headrace.config.resolution import Resolved, Typed, resolve

if TYPE_CHECKING:
    from headrace.config.llm_args import LlmArgs
    from headrace.runtime.forecast import Spread

Command = Callable[..., Any]
THIS_MACHINE = "cpu"


def _engine_option(name: str, path: str, type_: Any, text: str) -> Callable[[Command], Command]:
    """A short spelling of an engine's setting."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            state = _state(ctx)
            state.llm[path] = Typed(state.spelling(param, name), value)

    return click.option(name, cls=_Option, type=type_, expose_value=False, callback=keep, help=text)


@click.command()
@model_argument
@click.option(
    "--gpu",
    cls=_Option,
    default=THIS_MACHINE,
    show_default="this machine's memory",
    help="Device: h100, h200, b200, a100, l40s and others by name, or the size of its memory (80GiB).",
)
@click.option(
    "--gpus",
    cls=_Option,
    type=click.IntRange(1),
    help="How many there are; those beyond the ranks hold copies of the model.  [default: one for each rank]",
)
@click.option("--isl", cls=_Option, type=click.IntRange(1), help="Prompt tokens of a request.")
@click.option("--osl", cls=_Option, type=click.IntRange(1), help="Answer tokens of a request.")
@click.option(
    "--seq_len",
    cls=_Option,
    type=click.IntRange(1),
    help="Tokens of a request in place of both.  [default: max_seq_len]",
)
@click.option(
    "--concurrency",
    cls=_Option,
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Requests that should run at a time; if they don't fit, the plan says what to turn down.",
)
@_engine_option("--tp", "tensor_parallel_size", int, "The same as --tp_size.")
@_engine_option("--pp", "pipeline_parallel_size", int, "The same as --pp_size.")
@_engine_option("--ep", "moe_expert_parallel_size", int, "The same as --ep_size.")
@_engine_option("--kv_dtype", "kv_cache_config.dtype", str, "The same as --kv_cache_dtype.")
@click.option("--json", "is_json", is_flag=True, help="Print plain values.")
@llm_options
@click.pass_context
def plan(ctx: click.Context, model: str | None, gpu: str, gpus: int | None, isl: int | None, osl: int | None,
         seq_len: int | None, concurrency: int, is_json: bool) -> None:  # fmt: skip
    """Tell what MODEL takes and how much fits, without loading it.

    MODEL is a short name, a folder (its config.json is enough), a config.json, a .gguf file, a hub id, or one of
    glm-5.3, gpt-oss-120b, kimi-k3, llama-3.1-70b, minimax-m3, qwen3.5-397b-a17b and qwen3.8-2.4t-a95b, whose sizes are
    here as far as they are published. All settings of the engine count; features that are not there yet can be planned
    with. Exit code 1 if it does not fit.
    """
    from headrace.hub.config_only import find_config
    from headrace.hub.outlines import find_outline
    from headrace.hub.read_shape import read_shape
    from headrace.runtime.forecast import forecast, turn_down
    from headrace.runtime.forecast_report import as_dict, as_text

    args = resolved_for_planning(ctx, model).args
    shape = read_shape(find_config(args.model, revision=args.revision, model_kwargs=args.model_kwargs))
    planned = forecast(args, shape, spread_of(args, gpu, gpus))
    length = _length(isl, osl, seq_len) or (planned.max_seq_len or shape.max_position)
    outline = find_outline(args.model)
    note = None if outline is None else f"{outline.name}: {outline.written_from}"
    changes = turn_down(planned, length=length, concurrency=concurrency)
    if is_json:
        found = {"note": note, **as_dict(planned, changes, length=length, concurrency=concurrency)}
        click.echo(json.dumps(found, indent=2))
    else:
        if note is not None:
            click.echo(f"{note}\n")
        click.echo(as_text(planned, changes, length=length, concurrency=concurrency))
    if planned.num_requests(length) < concurrency:
        ctx.exit(1)


def resolved_for_planning(ctx: click.Context, model: str | None) -> Resolved:
    """What was typed; a plan may be for another machine, and for what is not built yet."""
    state = _state(ctx)
    flags = {**state.llm, **({} if model is None else {"model": Typed("MODEL", model)})}
    return resolve(
        config=state.config,
        flags=flags,
        sets=state.sets,
        refuse_missing_features=False,
        for_this_machine=False,
    )


def _length(isl: int | None, osl: int | None, seq_len: int | None) -> int | None:
    if seq_len is not None and (isl is not None or osl is not None):
        raise click.UsageError("--seq_len is --isl and --osl together: give it or them")
    if seq_len is not None or (isl is None and osl is None):
        return seq_len
    return (isl or 0) + (osl or 0)


def spread_of(args: LlmArgs, gpu: str, gpus: int | None) -> Spread:
    """The ranks that the settings ask for, on devices of this name.

    Raises:
        ValueError: fewer devices than ranks, or settings that divide nothing.
    """
    from headrace.config.machine import free_memory_bytes
    from headrace.hub.rank_share import Ranks
    from headrace.runtime.forecast import Spread
    from headrace.runtime.gpus import Device, gpu_named

    if args.context_parallel_size > 1:
        raise ValueError("context_parallel_size: a plan counts no context parallelism: leave it out")
    tensor, expert = args.tensor_parallel_size, args.moe_expert_parallel_size or -1
    ranks = Ranks(tensor, args.pipeline_parallel_size, _expert_ranks(args, expert), args.enable_attention_dp)
    if gpus is not None and gpus < ranks.count:
        raise ValueError(f"--gpus: {gpus} are fewer than the {ranks.count} ranks of tensor and pipeline parallelism")
    if gpu == THIS_MACHINE:
        each = free_memory_bytes() // ranks.count
        return Spread(Device(f"cpu of this machine, {ranks.count} ranks" if ranks.count > 1 else "cpu of this machine",
                             each, 0), ranks)  # fmt: skip
    return Spread(gpu_named(gpu, num_ranks=ranks.count), ranks, (gpus or ranks.count) // ranks.count)


def _expert_ranks(args: LlmArgs, stated: int) -> int:
    if stated > 0:
        return stated
    shared = args.moe_tensor_parallel_size or -1
    return args.tensor_parallel_size // shared if shared > 0 else 1
