"""`headrace bench serve`: a running server under load."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from headrace import __version__
from headrace.cli.bench_options import take_options

if TYPE_CHECKING:
    from headrace.bench.http import Server
    from headrace.bench.report import Point, Report
    from headrace.bench.workload import Task
    from headrace.cli.bench_options import Options
    from headrace.hub.source import ModelSource
    from headrace.text.tokenizer import Tokenizer

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


def measure_server(ctx: click.Context, model: str | None, given: dict[str, Any]) -> None:
    """Raises ValueError: no server, no model of that name, or a workload that needs the model's files."""
    from headrace import log
    from headrace.bench.dataset import load_tasks
    from headrace.bench.http import Server
    from headrace.bench.serve import ServerDriver
    from headrace.cli.bench_sweep import finish, sweep

    log.setup("warning")
    options = take_options(ctx, given)
    options.outputs.check()
    if options.outputs.output_json is not None:
        raise click.UsageError("--output_json: a server sends no ids: leave it out")
    server = Server(url=given["url"].rstrip("/"), api_key=given["api_key"] or "")
    served, info = facts_of(server, given["served_model_name"])
    source = ServedModel(model or info.get("model"), is_named=model is not None)
    tasks = load_tasks(options.dataset, vocab_size=source.vocab_size, tokenizer=source.tokenizer)
    if (limit := info.get("max_seq_len")) is not None:
        _check_lengths(tasks, limit)
    num_gpus = given["num_gpus"] or stated_gpus(info)
    driver = ServerDriver(server, model=served, api=given["api"], tokenizer=source.tokenizer)
    points, records = sweep(
        driver.run, tasks, options, kind="serve", num_gpus=num_gpus, shares_cache=given["allow_cache_hits"]
    )
    report = report_of_server(server, served, info, tasks, options, api=given["api"], points=points, num_gpus=num_gpus)
    finish(ctx, report, records, options.outputs)


def report_of_server(
    server: Server,
    served: str,
    info: Mapping[str, Any],
    tasks: Sequence[Task],
    options: Options,
    *,
    api: str,
    points: list[Point],
    num_gpus: int,
) -> Report:
    """
    Args:
        served: the model's name in requests.
        info: what the server says of itself.
    """
    from headrace.bench.report import Report, Workload

    return Report(
        kind="serve",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model={"name": served, "type": info.get("model_type", "?"), "dtype": "as served"},
        machine=_machine(server, info),
        num_gpus=num_gpus,
        settings={"api": api, "server": info.get("configuration", {})},
        workload=Workload.of(
            tasks,
            dataset=options.dataset.name,
            seed=options.dataset.seed,
            warmup=options.warmup,
            eos_id=options.eos_id,
        ),
        startup_s=info.get("startup_s"),
        slo=options.slo,
        points=points,
    )


class ServedModel:
    """The files of the served model, found when they are needed."""

    def __init__(self, name: str | None, *, is_named: bool) -> None:
        self._name = name
        self._is_named = is_named

    @functools.cached_property
    def source(self) -> ModelSource:
        from headrace.hub.errors import ModelError
        from headrace.hub.source import resolve_model

        if self._name is None:
            raise ValueError("MODEL: the server doesn't say which files it serves: name the model")
        try:
            return resolve_model(self._name)
        except ModelError as error:
            if self._is_named:
                raise
            raise ValueError(f"MODEL: the server's model isn't on this machine ({error}): name the model") from None

    def vocab_size(self) -> int:
        from headrace.cli.bench import stated_vocab_size

        return stated_vocab_size(self.source) or self.tokenizer().vocab_size

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        from headrace.text.load import load_tokenizer

        return load_tokenizer(self.source)


def facts_of(server: Server, name: str | None) -> tuple[str, Mapping[str, Any]]:
    """The model's name in requests, and what a Headrace server says of itself."""

    async def ask() -> tuple[Any, Any]:
        return await server.get_json("/v1/models"), await server.get_json("/server_info")

    listed, info = asyncio.run(ask())
    names = [each["id"] for each in (listed or {}).get("data", ())]
    if name is None and not names:
        raise ValueError(f"--served_model_name: {server.url} lists no models: name one")
    if name is not None and names and name not in names:
        raise ValueError(f"--served_model_name: {server.url} has {', '.join(names)}, not {name}")
    return name or names[0], info or {}


def _check_lengths(tasks: Any, limit: int) -> None:
    from headrace.bench.workload import full_lengths

    for task, num_prompt in zip(tasks, full_lengths(tasks)):
        if num_prompt + task.num_output > limit:
            raise ValueError(
                f"request {task.task_id} of the dataset needs {num_prompt + task.num_output} tokens ({num_prompt} in,"
                f" {task.num_output} out) and the server's max_seq_len is {limit}: use shorter requests"
            )


def stated_gpus(info: Mapping[str, Any]) -> int:
    settings: Any = info.get("configuration") or {}
    product = 1
    for name in PARALLEL:
        value = settings.get(name, 1) if isinstance(settings, Mapping) else 1
        product *= value if isinstance(value, int) and value > 0 else 1
    return product


def _machine(server: Server, info: Mapping[str, Any]) -> dict[str, Any]:
    """Of the client, which is all that can be known; the server's device is the operator's to note."""
    from headrace.bench.machine import cpu_name

    return {
        "device": f"the server at {server.url}",
        "cpu": f"{cpu_name()} (the client's)",
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "versions": {"server": info.get("version", "?"), "client": __version__, "python": platform.python_version()},
    }
