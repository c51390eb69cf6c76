"""`headrace doctor`: look at this machine, and at whether a model can be served on it."""

from __future__ import annotations

import json

import click

from headrace.cli.models import model_argument
from headrace.cli.options import _Option, llm_options, resolved_from_click


@click.command()
@model_argument
@click.option("--host", cls=_Option, default="localhost", show_default=True, help="Address that would be listened on.")
@click.option("--port", cls=_Option, type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="Port that would be listened on.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print plain values.")
@llm_options
@click.pass_context
def doctor(ctx: click.Context, model: str | None, host: str, port: int, is_json: bool) -> None:
    """Look at this machine: driver, GPUs, libraries, memory, folders, limits, and which kernels would run.

    With MODEL also whether it can be served here with these settings: its form, its tokenizer, its memory. Nothing is
    loaded. Each finding has its remedy; exit code 1 if there is a problem, warnings are none.
    """
    from headrace import log
    from headrace.doctor.checks import examine
    from headrace.doctor.finding import Finding
    from headrace.doctor.gather import gather
    from headrace.doctor.report import as_dict, as_text, is_healthy

    resolved = resolved_from_click(ctx, model, needs_model=False)
    log.setup("warning")
    facts = gather(host=host, port=port)
    findings = list(examine(facts, resolved.args))
    findings += [
        Finding(
            "settings.note",
            "note" if note.level == "info" else "warning",
            str(note),
            "change it in --config or with --set, unless it is meant",
        )
        for note in resolved.notes
        if note.level != "debug"
    ]
    if resolved.args.model and facts.torch.version:
        from headrace.doctor.model import check_model

        findings += check_model(facts, resolved.args)
    if is_json:
        click.echo(json.dumps(as_dict(findings, model=str(resolved.args.model or "") or None), indent=2))
    else:
        click.echo(as_text(findings))
    if not is_healthy(findings):
        ctx.exit(1)
