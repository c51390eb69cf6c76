"""`headrace bench`: an engine in this process or a server under load, datasets, and reports compared."""

from __future__ import annotations

import functools
import gc
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace import __version__
from headrace.cli.bench_dataset import prepare_dataset
from headrace.cli.bench_options import Options, engine_options, load_options, option, take_options, workload_options
from headrace.cli.models import model_argument
from headrace.cli.options import llm_options, resolved_from_click
from headrace.config.resolution import Resolved

if TYPE_CHECKING:
    from headrace.bench.report import Report
    from headrace.bench.workload import Task
    from headrace.config.llm_args import LlmArgs
    from headrace.hub.source import ModelSource
    from headrace.seam import EnginePort
    from headrace.text.tokenizer import Tokenizer
    from headrace.wire import ModelInfo

INPUT_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
@click.option("-m", "--model", metavar="MODEL", help="Model to measure; may also stand behind the command.")
@click.option("--model_path", metavar="FOLDER", help="Where its files are, if they are not found by its name.")
@click.option("-w", "--workspace", hidden=True, expose_value=False, help="For old command lines; has no effect.")
@click.pass_context
def bench(ctx: click.Context, model: str | None, model_path: str | None) -> None:
    """Measure throughput and latency, of MODEL in this process or of a server; prepare datasets; compare reports.

    `throughput` and `latency` run the engine in this process and detokenise nothing: their figures are the engine's
    own. `serve` measures a server through its API.
    """
    ctx.obj = model_path or model


bench.add_command(prepare_dataset)


@bench.command("throughput")
@model_argument
@load_options(-1)
@workload_options
@engine_options
@llm_options
@click.pass_context
def throughput(ctx: click.Context, model: str | None, **options: Any) -> None:
    """Measure tokens per second with many requests at once.

    All requests are handed over together unless --concurrency, --request_rate or --trace_speed says otherwise, EOS is
    ignored, and the clock runs over the whole batch.
    """
    _bench(ctx, "throughput", model, take_options(ctx, options))


@bench.command("latency")
@model_argument
@load_options(1)
@workload_options
@engine_options
@llm_options
@click.pass_context
def latency(ctx: click.Context, model: str | None, **options: Any) -> None:
    """Measure how long a request takes, one at a time."""
    _bench(ctx, "latency", model, take_options(ctx, options))


@bench.command("serve", short_help="Measure a running server, through its API.")
@model_argument
@option("--url", default="http://localhost:8000", metavar="URL", help="Where the server is.")
@option("--api_key", envvar="HEADRACE_API_KEY", help="Key that the server asks for, or in HEADRACE_API_KEY.")
@option("--served_model_name", help="Name of the model in requests.  [default: the server's first]")
@option("--api", type=click.Choice(["completions", "chat"]), default="completions",
        help="completions takes ids; chat takes one user message, decoded by the tokenizer of MODEL.")  # fmt: skip
@option("--num_gpus", type=click.IntRange(1), help="Devices to divide by.  [default: as the server says, or 1]")
@option("--allow_cache_hits", is_flag=True, help="Let requests find the prefixes that earlier ones left.")
@load_options(-1)
@workload_options
@click.pass_context
def serve(ctx: click.Context, model: str | None, **options: Any) -> None:
    """Measure a running server (OpenAI-compatible) at --url through its streaming API.

    MODEL is what the server serves: its tokenizer is needed for texts, and its vocabulary for random ids. It may be
    left out for a Headrace server that has the model on this machine.
    """
    from headrace.cli.bench_server import measure_server

    measure_server(ctx, _model_name(ctx, model), options)


@bench.command("compare", short_help="Compare two reports of --report_json.")
@click.argument("before", metavar="A.json", type=INPUT_FILE)
@click.argument("after", metavar="B.json", type=INPUT_FILE)
@option("--threshold", type=click.FloatRange(0, 1), default=0.05, help="Change that counts, as a share of A.")
@option("--fail_if_worse", is_flag=True, help="Exit with 1 if any figure got worse.")
@click.pass_context
def compare(ctx: click.Context, before: Path, after: Path, threshold: float, fail_if_worse: bool) -> None:
    """Compare two reports of --report_json, load by load: what differed, and which figures got better or worse."""
    from headrace.bench.compare import compare as compared
    from headrace.bench.compare import comparison_table
    from headrace.bench.report import read_report

    found = compared(read_report(before), read_report(after), threshold=threshold)
    click.echo(comparison_table(found))
    if fail_if_worse and found.num_worse:
        ctx.exit(1)


def _bench(ctx: click.Context, kind: str, model: str | None, options: Options) -> None:
    from headrace import log
    from headrace.bench.machine import busy_note

    resolved = resolved_from_click(ctx, _model_name(ctx, model))
    log.setup(resolved.server.log_level)
    if log.LEVELS[resolved.server.log_level] == log.LEVELS["info"]:
        log.get("scheduler").setLevel(log.LEVELS["warning"])  # a line for each request is too much here
    resolved.take_effect()
    options.outputs.check()
    if note := busy_note():
        click.echo(f"headrace: {note}", err=True)
    args = engine_args(resolved, logs_steps=options.outputs.iteration_log is not None)
    gc.set_threshold(args.garbage_collection_gen0_threshold)

    from headrace.hub.source import resolve_model

    source = resolve_model(args.model, revision=args.revision)
    tasks = tasks_of(args, source, options)
    _run(ctx, kind, args, source, tasks, options)


def _model_name(ctx: click.Context, model: str | None) -> str | None:
    named: str | None = ctx.obj
    if model is not None and named is not None and model != named:
        raise click.UsageError(f"the model is {named} before the command and {model} behind it: keep one")
    return model or named


def engine_args(resolved: Resolved, *, logs_steps: bool) -> LlmArgs:
    """As resolved, but without a tokenizer in the engine, and with statistics of all steps where they are logged."""
    args = resolved.args.thaw_copy()
    args.skip_tokenizer_init = True
    if logs_steps:
        args.enable_iter_perf_stats = True
        args.iter_stats_max_iterations = -1
    return args.freeze()


def tasks_of(args: LlmArgs, source: ModelSource, options: Options) -> list[Task]:
    """The workload, with ids of the model's vocabulary."""
    from headrace.bench.dataset import load_tasks
    from headrace.text.load import load_tokenizer

    @functools.cache
    def tokenizer() -> Tokenizer:
        return load_tokenizer(args.tokenizer or source, mode=args.tokenizer_mode)

    def vocab_size() -> int:
        return stated_vocab_size(source, args.model_kwargs) or tokenizer().vocab_size

    return load_tasks(options.dataset, vocab_size=vocab_size, tokenizer=tokenizer)


def stated_vocab_size(source: ModelSource, model_kwargs: dict[str, Any] | None = None) -> int:
    """As the model's config says; 0 if it doesn't."""
    from headrace.hub.config import read_config, text_config

    stated = text_config(read_config(source, model_kwargs=model_kwargs)).get("vocab_size")
    return stated if isinstance(stated, int) and stated > 0 else 0


def _run(
    ctx: click.Context, kind: str, args: LlmArgs, source: ModelSource, tasks: Sequence[Task], options: Options
) -> None:
    import msgspec

    from headrace.bench.drive import Driver, check_tasks
    from headrace.cli.bench_sweep import finish, sweep
    from headrace.runtime.launch import LocalRuntime
    from headrace.simulate.recorder import Recorder

    logs_steps = options.outputs.iteration_log is not None
    num_gpus = args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size
    recorders: list[Recorder] = []

    def recorded(args: LlmArgs, source: ModelSource) -> EnginePort:
        from headrace.runtime.engines import make_engine

        recorders.append(Recorder(make_engine(args, source)))
        return recorders[0]

    make = recorded if options.records_steps else None
    driver = Driver(lambda on_message: LocalRuntime(args, source, on_message, make_engine=make))

    def begin() -> None:
        """The warm-up is over."""
        if logs_steps:
            driver.iterations()
        for recorder in recorders:
            recorder.steps.clear()

    with driver as info:
        check_tasks(tasks, info)
        gc.collect()
        gc.freeze()  # as in a runtime's own process
        points, records = sweep(
            driver.run,
            tasks,
            options,
            kind=kind,
            num_gpus=num_gpus,
            before=begin,
        )
        iterations = driver.iterations() if logs_steps else []
        report = report_of(kind, args, source, info, tasks, options, points=points, num_gpus=num_gpus)
        report = msgspec.structs.replace(report, steps=[step for recorder in recorders for step in recorder.steps])
    finish(ctx, report, records, options.outputs, iterations=iterations)


def report_of(
    kind: Any,
    args: LlmArgs,
    source: ModelSource,
    info: ModelInfo,
    tasks: Sequence[Task],
    options: Options,
    *,
    points: Any,
    num_gpus: int,
) -> Report:
    from headrace.bench.report import Report, Workload
    from headrace.config.show import as_dict

    return Report(
        kind=kind,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model={"name": info.model, "type": info.model_type, "dtype": _dtype(args, source)},
        machine=machine_facts(),
        num_gpus=num_gpus,
        settings={
            "changed": as_dict(args),
            "max_batch_size": info.max_batch_size,
            "max_num_tokens": info.max_num_tokens,
            "max_seq_len": info.max_seq_len,
            "tokens_per_block": info.tokens_per_block,
            "tensor_parallel_size": args.tensor_parallel_size,
        },
        workload=Workload.of(
            tasks,
            dataset=options.dataset.name,
            seed=options.dataset.seed,
            warmup=options.warmup,
            eos_id=options.eos_id,
        ),
        memory=_memory_facts(info),
        startup_s=info.startup.seconds,
        slo=options.slo,
        points=points,
    )


def _dtype(args: LlmArgs, source: ModelSource) -> str:
    from headrace.engine.device import compute_dtype, pick_device
    from headrace.hub.config import read_config

    config = read_config(source, model_kwargs=args.model_kwargs)
    return str(compute_dtype(args.dtype, config, pick_device(0))).removeprefix("torch.")


def machine_facts() -> dict[str, Any]:
    """The device and the versions that figures belong to. Call it while the engine is open: its threads are counted."""
    import torch

    from headrace.bench.machine import cpu_name
    from headrace.kernels._native import num_threads

    threads = num_threads()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_name()}, {threads} threads"
    return {
        "device": device,
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_threads": threads,
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "versions": {"headrace": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }


def _memory_facts(info: ModelInfo) -> dict[str, Any]:
    import torch

    from headrace.bench.machine import peak_rss_bytes

    return {
        "kv_cache_tokens": info.max_kv_tokens,
        "peak_rss_bytes": peak_rss_bytes(),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }
