"""`headrace bench`: throughput of many requests, latency of one at a time. Ids in, ids out, in this process."""

from __future__ import annotations

import functools
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace import __version__
from headrace.cli.models import model_argument
from headrace.cli.options import _Option, _state, llm_options, resolved_from_click
from headrace.config.resolution import Resolved, Typed

if TYPE_CHECKING:
    from headrace.bench.dataset import Dataset
    from headrace.bench.record import Record
    from headrace.bench.workload import Task
    from headrace.config.llm_args import LlmArgs
    from headrace.hub.source import ModelSource
    from headrace.text.tokenizer import Tokenizer
    from headrace.wire import ModelInfo

OUTPUT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

Command = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed about the workload and the reports."""

    dataset: Dataset
    warmup: int
    concurrency: int | None
    eos_id: int
    report_json: Path | None
    output_json: Path | None
    request_json: Path | None
    iteration_log: Path | None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.eos_id < 0 else (self.eos_id,)


DATASET_OPTIONS = ("num_requests", "input_len", "output_len", "min_input_len", "max_input_len", "seed")


@click.group()
@click.option("-m", "--model", metavar="MODEL", help="Model to measure; may also stand behind the command.")
@click.option("--model_path", metavar="FOLDER", help="Where its files are, if they are not found by its name.")
@click.option("-w", "--workspace", hidden=True, expose_value=False, help="For old command lines; has no effect.")
@click.pass_context
def bench(ctx: click.Context, model: str | None, model_path: str | None) -> None:
    """Measure throughput and latency of MODEL, with ids in and ids out.

    The engine runs in this process and nothing is detokenised, so the figures are the engine's own.
    """
    ctx.obj = model_path or model


def _bench_options(command: Command) -> Command:
    """The options of both commands, as trtllm-bench spells them."""
    for option in reversed(_options()):
        command = option(command)
    return command


def _options() -> list[Callable[[Command], Command]]:
    def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
        return click.option(*names, cls=_Option, **{"show_default": settings.get("default") is not None, **settings})

    def engine_option(name: str, path: str, **settings: Any) -> Callable[[Command], Command]:
        """Another spelling of an engine's setting."""

        def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
            if value is not None:
                _state(ctx).llm[path] = Typed(name, value)

        return option(name, expose_value=False, callback=keep, **settings)

    def inert(name: str, **settings: Any) -> Callable[[Command], Command]:
        return option(name, expose_value=False, **settings)

    policies = click.Choice(["guaranteed_no_evict", "max_utilization", "static_batch"], case_sensitive=False)
    return [
        option("--dataset", default="random", metavar="random|sharegpt|FILE",
               help="Where requests come from: random ids, ShareGPT's first turns (fetched once, 27 MB), a file of "
               "JSON lines with output_tokens and input_ids or prompt (- is standard input), or a JSON array of "
               "conversations."),
        option("--num_requests", type=click.IntRange(0), default=0,
               help="Number of requests; 0 is all of the file, or 32 if they are made or drawn."),
        option("--warmup", type=click.IntRange(0), default=2, help="Requests before the clock starts."),
        option("--input_len", "--target_input_len", "input_len", type=click.IntRange(1), default=128,
               help="Prompt tokens of random requests."),
        option("--output_len", "--target_output_len", "output_len", type=click.IntRange(1), default=128,
               help="New tokens of random and ShareGPT requests; a file has its own."),
        option("--min_input_len", type=click.IntRange(1), default=16, help="Shortest ShareGPT prompt in tokens."),
        option("--max_input_len", type=click.IntRange(1), default=512, help="Longest ShareGPT prompt in tokens."),
        option("--seed", type=click.IntRange(0), default=0, help="Draws random ids and ShareGPT turns."),
        option("--eos_id", type=click.IntRange(-1), default=-1,
               help="Token that ends a request early; -1 lets every request run to its length."),
        inert("--streaming", is_flag=True, help="No effect: every token is timed as it arrives, always."),
        option("--report_json", type=OUTPUT_FILE, help="File for the report."),
        option("--output_json", type=OUTPUT_FILE, help="File for the generated ids."),
        option("--request_json", type=OUTPUT_FILE, help="File for the figures of each request."),
        option("--iteration_log", type=OUTPUT_FILE, help="JSON-lines file for statistics of each step; collects them."),
        engine_option("--scheduler_policy", "scheduler_config.capacity_scheduler_policy", type=policies,
                      help="When a waiting request may start.  [default: guaranteed_no_evict]"),
        engine_option("--enable_chunked_context", "enable_chunked_prefill", is_flag=True, default=None,
                      help="The same as --enable_chunked_prefill."),
        engine_option("--tp", "tensor_parallel_size", type=int, help="The same as --tp_size."),
        engine_option("--pp", "pipeline_parallel_size", type=int, help="The same as --pp_size."),
        engine_option("--ep", "moe_expert_parallel_size", type=int, help="The same as --ep_size."),
    ]  # fmt: skip


def _concurrency(default: int) -> Callable[[Command], Command]:
    def check(ctx: click.Context, param: click.Parameter, value: int) -> int | None:
        if value == 0 or value < -1:
            raise click.BadParameter(f"must be at least 1, or -1 for no limit, got {value}")
        return None if value == -1 else value

    return click.option("--concurrency", type=int, default=default, show_default=True, callback=check,
                        help="Most requests at once; -1 hands all of them over together.")  # fmt: skip


@bench.command("throughput")
@model_argument
@_concurrency(-1)
@_bench_options
@llm_options
@click.pass_context
def throughput(ctx: click.Context, model: str | None, **options: Any) -> None:
    """Measure tokens per second with many requests at once.

    All requests are handed over together, EOS is ignored, and the clock runs over the whole batch.
    """
    _bench(ctx, "throughput", model, _typed(options))


@bench.command("latency")
@model_argument
@_concurrency(1)
@_bench_options
@llm_options
@click.pass_context
def latency(ctx: click.Context, model: str | None, **options: Any) -> None:
    """Measure how long a request takes, one at a time."""
    _bench(ctx, "latency", model, _typed(options))


def _typed(options: dict[str, Any]) -> Options:
    from headrace.bench.dataset import Dataset

    if options["dataset"] == "-" and sys.stdin is None:
        raise click.UsageError("there is no standard input: give a --dataset")
    sizes = {name: options.pop(name) for name in DATASET_OPTIONS}
    return Options(dataset=Dataset(name=options.pop("dataset"), **sizes), **options)


def _bench(ctx: click.Context, kind: str, model: str | None, options: Options) -> None:
    from headrace import log

    resolved = resolved_from_click(ctx, _model_name(ctx, model))
    log.setup(resolved.server.log_level)
    if log.LEVELS[resolved.server.log_level] == log.LEVELS["info"]:
        log.get("scheduler").setLevel(log.LEVELS["warning"])  # a line for each request is too much here
    resolved.take_effect()
    _check_files(options)
    args = _engine_args(resolved, options)
    gc.set_threshold(args.garbage_collection_gen0_threshold)

    from headrace.hub.source import resolve_model

    source = resolve_model(args.model, revision=args.revision)
    tasks = _tasks(args, source, options.dataset)
    _run(ctx, kind, args, source, tasks, options)


def _model_name(ctx: click.Context, model: str | None) -> str | None:
    named: str | None = ctx.obj
    if model is not None and named is not None and model != named:
        raise click.UsageError(f"the model is {named} before the command and {model} behind it: keep one")
    return model or named


def _check_files(options: Options) -> None:
    """A report that can't be written is no news for the end of an hour."""
    for path in (options.report_json, options.output_json, options.request_json, options.iteration_log):
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ValueError(f"can't write {path}: there is no folder {path.absolute().parent}")
        was_there = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise OSError(f"can't write {path}: {error.strerror}: choose another file") from None
        if not was_there:
            path.unlink()


def _engine_args(resolved: Resolved, options: Options) -> LlmArgs:
    """As resolved, but without a tokenizer in the engine, and with statistics of all steps where they are logged."""
    args = resolved.args.thaw_copy()
    args.skip_tokenizer_init = True
    if options.iteration_log is not None:
        args.enable_iter_perf_stats = True
        args.iter_stats_max_iterations = -1
    return args.freeze()


def _tasks(args: LlmArgs, source: ModelSource, dataset: Dataset) -> list[Task]:
    from headrace.bench.dataset import load_tasks
    from headrace.hub.config import read_config, text_config
    from headrace.text.load import load_tokenizer

    def vocab_size() -> int:
        stated = text_config(read_config(source, model_kwargs=args.model_kwargs)).get("vocab_size")
        return stated if isinstance(stated, int) and stated > 0 else tokenizer().vocab_size

    @functools.cache
    def tokenizer() -> Tokenizer:
        return load_tokenizer(args.tokenizer or source, mode=args.tokenizer_mode)

    return load_tasks(dataset, vocab_size=vocab_size, tokenizer=tokenizer)


def _run(
    ctx: click.Context, kind: str, args: LlmArgs, source: ModelSource, tasks: Sequence[Task], options: Options
) -> None:
    from headrace.bench.drive import Driver, check_tasks
    from headrace.bench.report import as_table, make_report
    from headrace.runtime.launch import LocalRuntime

    how = {"concurrency": options.concurrency, "stop_ids": options.stop_ids}
    driver = Driver(lambda on_message: LocalRuntime(args, source, on_message))
    with driver as info:
        check_tasks(tasks, info)
        gc.collect()
        gc.freeze()  # as in a runtime's own process
        warm = [tasks[number % len(tasks)] for number in range(options.warmup)]
        if warm:
            driver.run(warm, **how, cache_salt="warm-up")
        if options.iteration_log is not None:
            driver.iterations()
        with _progress(kind, sum(task.num_output for task in tasks)) as progress:
            record = driver.run(tasks, **how, progress=progress)
        iterations = driver.iterations() if options.iteration_log is not None else []
        facts = _facts(args, source, info, tasks, options)
    report = make_report(record, kind=kind, facts=facts)
    click.echo(as_table(report))
    _write(options, report, record, iterations)
    for line in report["result"]["first_errors"]:
        click.echo(f"headrace: {line}", err=True)
    if report["result"]["num_failed"]:
        ctx.exit(1)


@contextmanager
def _progress(kind: str, num_tokens: int) -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    with tqdm(total=num_tokens, desc=kind, unit="token", disable=None, file=sys.stderr) as bar:
        yield bar.update


def _facts(
    args: LlmArgs, source: ModelSource, info: ModelInfo, tasks: Sequence[Task], options: Options
) -> dict[str, Any]:
    from headrace.bench.report import workload_facts
    from headrace.config.show import as_dict

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"name": info.model, "type": info.model_type, "dtype": _dtype(args, source)},
        "machine": machine_facts(),
        "settings": {
            "changed": as_dict(args),
            "max_batch_size": info.max_batch_size,
            "max_num_tokens": info.max_num_tokens,
            "max_seq_len": info.max_seq_len,
            "tokens_per_block": info.tokens_per_block,
            "tensor_parallel_size": args.tensor_parallel_size,
        },
        "workload": {
            "dataset": options.dataset.name,
            "seed": options.dataset.seed,
            "concurrency": options.concurrency,
            "warmup": options.warmup,
            "eos_id": options.eos_id,
            **workload_facts(tasks),
        },
        "memory": _memory_facts(info),
        "startup_s": info.startup_s,
    }


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
        "versions": {"headrace": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _memory_facts(info: ModelInfo) -> dict[str, Any]:
    import torch

    from headrace.bench.machine import peak_rss_bytes

    return {
        "kv_cache_tokens": info.max_kv_tokens,
        "peak_rss_bytes": peak_rss_bytes(),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def _write(options: Options, report: dict[str, Any], record: Record, iterations: list[dict[str, Any]]) -> None:
    from headrace.bench.report import output_rows, request_rows

    if options.report_json is not None:
        options.report_json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(output_rows(record)) + "\n", encoding="utf-8")
    if options.request_json is not None:
        options.request_json.write_text(json.dumps(request_rows(record), indent=2) + "\n", encoding="utf-8")
    if options.iteration_log is not None:
        lines = "".join(json.dumps(each) + "\n" for each in iterations)
        options.iteration_log.write_text(lines, encoding="utf-8")
