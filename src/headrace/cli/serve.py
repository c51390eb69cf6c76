"""`headrace serve`: a model over HTTP."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

import click

from headrace import __version__
from headrace.cli.models import model_argument
from headrace.cli.options import resolved_from_click, serve_options

WORKERS_TIMEOUT_S = 0.5


@click.command()
@model_argument
@serve_options
@click.pass_context
def serve(ctx: click.Context, model: str | None) -> None:
    """Serve MODEL over HTTP with the OpenAI API.

    MODEL is a short name (see `headrace pull --list`), a folder, a .gguf file or a hub id; a --config file may name it.
    """
    from headrace import log

    resolved = resolved_from_click(ctx, model)
    args, options = resolved.args, resolved.server
    level = options.log_level
    log.setup(level)
    resolved.take_effect()

    from headrace.config.show import as_yaml
    from headrace.front.text_side import load_text_side
    from headrace.hub.source import resolve_model
    from headrace.runtime.launch import RuntimeProcess
    from headrace.server.run import Outcome, bind
    from headrace.server.run import serve as run
    from headrace.server.service import WORKER_NAME, ServiceOptions

    source = resolve_model(args.model, revision=args.revision)
    listener = bind(options.host, options.port)
    log.get("config").info("configuration:\n%s", as_yaml(resolved).rstrip())
    gc.set_threshold(args.garbage_collection_gen0_threshold)
    serving = ServiceOptions(
        model_name=options.served_model_name or args.model,
        stream_interval=args.stream_interval,
        request_timeout_s=args.request_timeout_s,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        shutdown_timeout_s=args.shutdown_timeout_s,
        num_workers=options.num_input_processor_workers,
        api_keys=tuple(key.get_secret_value() for key in options.api_keys),
        cache_salt_from_api_key=options.cache_salt_from_api_key,
    )
    runtime = RuntimeProcess(args, source, log_level=level)
    outcome: Outcome = run(
        listener,
        runtime,
        lambda: load_text_side(args, source, chat_template=options.chat_template),
        serving,
        version=__version__,
    )
    if outcome.message:
        if level in ("debug", "trace") and outcome.traceback:
            click.echo(outcome.traceback, err=True)
        click.echo(f"headrace: {outcome.message}", err=True)
    _leave_workers(WORKER_NAME, outcome.exit_code)
    ctx.exit(outcome.exit_code)


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
