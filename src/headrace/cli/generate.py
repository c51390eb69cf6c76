"""`headrace generate`: complete one prompt."""

from __future__ import annotations

import sys
from typing import Any

import click

from headrace.cli.models import model_argument
from headrace.cli.options import llm_options
from headrace.cli.session import check_finish, open_llm, sampling_options, sampling_params

DEFAULT_MAX_TOKENS = 128


@click.command()
@model_argument
@click.argument("prompt", required=False)
@sampling_options
@click.option("--echo", is_flag=True, help="Print the prompt before its completion.")
@llm_options
@click.pass_context
def generate(ctx: click.Context, model: str | None, prompt: str | None, echo: bool, **sampling: Any) -> None:
    """Complete PROMPT, or standard input, with MODEL, as it is: without a chat template.

    Prints the completion as it is generated (at most 128 tokens unless --max_tokens says otherwise).
    """
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("give a PROMPT, or send one on standard input")
    text = sys.stdin.read() if prompt is None else prompt
    params = sampling_params(sampling, default_max_tokens=None)
    with open_llm(ctx, model) as llm:
        inputs = llm.preprocess(text, params)
        if params.max_tokens is None:
            room = llm.max_seq_len - len(inputs.prompt_token_ids)
            params.max_tokens = max(min(DEFAULT_MAX_TOKENS, room), 1)
        if echo:
            click.echo(text, nl=False)
        output = llm.generate_async(inputs, params, streaming=True)
        for step in output:
            click.echo(step.outputs[0].text_diff, nl=False)
        click.echo()
        check_finish(output)
