"""`headrace serve`: a model over HTTP."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import click

from headrace import __version__
from headrace.cli.fronts import num_fronts
from headrace.cli.models import model_argument
from headrace.cli.options import resolved_from_click, serve_options

if TYPE_CHECKING:
    from headrace.config.resolution import Resolved
    from headrace.server.run import Outcome

WORKERS_TIMEOUT_S = 0.5


@click.command()
@model_argument
@serve_options
@click.pass_context
def serve(ctx: click.Context, model: str | None) -> None:
    """Serve MODEL over HTTP with the OpenAI API.

    MODEL is a short name (see `headrace pull --list`), a folder, a .gguf file or a hub id; a --config file may name it.
    """
    _end_well_on_signals()
    from headrace import env, log

    resolved = resolved_from_click(ctx, model)
    args, options = resolved.args, resolved.server
    level = options.log_level
    log.setup(level)
    resolved.take_effect()
    with contextlib.ExitStack() as cleanup:
        several = num_fronts(args) > 1
        # Before anything imports the library of metrics, which looks for this folder then.
        env.share_metrics(cleanup.enter_context(_metrics_folder()) if several else None)
        outcome = _serve(resolved)
    if outcome.message:
        if level in ("debug", "trace") and outcome.traceback:
            click.echo(outcome.traceback, err=True)
        click.echo(f"headrace: {outcome.message}", err=True)
    from headrace.server.service import WORKER_NAME

    _leave_workers(WORKER_NAME, outcome.exit_code)
    ctx.exit(outcome.exit_code)


def _serve(resolved: Resolved) -> Outcome:
    from headrace import log
    from headrace.cli.fronts import FrontProcesses
    from headrace.cli.serving import place_of, rpc_of, service_options, tls_of
    from headrace.config.show import as_yaml
    from headrace.front.text_side import load_text_side
    from headrace.hub.source import resolve_model
    from headrace.runtime.launch import RuntimeProcess
    from headrace.server.run import Process, bind, is_public, serve

    args, options = resolved.args, resolved.server
    tls = tls_of(options)
    serving = service_options(args, options, front=1)
    source = resolve_model(args.model, revision=args.revision)
    listener = place_of(options)
    http_listener = None if options.http_port is None else bind(options.host, options.http_port)
    log.get("config").info("configuration:\n%s", as_yaml(resolved).rstrip())
    if is_public(listener) and not options.api_keys:
        log.get("server").warning(
            "%s: everybody who reaches this address can use the server: give --api_key_file or --api_key", options.host
        )
    gc.set_threshold(args.garbage_collection_gen0_threshold)
    process = Process(tls=tls, rpc=rpc_of(options, listener, tls), http_listener=http_listener)
    if num_fronts(args) > 1:
        process = replace(process, fronts=FrontProcesses(args, source, options, version=__version__))
    return serve(
        listener,
        RuntimeProcess(args, source, log_level=options.log_level),
        lambda: load_text_side(args, source, chat_template=options.chat_template),
        serving,
        version=__version__,
        process=process,
    )


def _metrics_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="headrace-metrics-", ignore_cleanup_errors=True)


def _end_well_on_signals() -> None:
    """Until the server's own handlers are in place: the program says why it ends."""

    def end(number: int, frame: FrameType | None) -> None:
        click.echo(f"headrace: {signal.Signals(number).name} before the server was up", err=True)
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the second one, and it stays ignored
            signal.signal(number, end)


def _leave_workers(name: str, exit_code: int) -> None:
    """End now if a worker is in the middle of a huge prompt: the interpreter would wait for it."""
    deadline_s = time.monotonic() + WORKERS_TIMEOUT_S
    workers = [thread for thread in threading.enumerate() if thread.name.startswith(name)]
    for worker in workers:
        worker.join(max(deadline_s - time.monotonic(), 0))
    if any(worker.is_alive() for worker in workers):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
