"""What `chat` and `generate` share: sampling flags and a model opened from the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.options import resolved_from_click

if TYPE_CHECKING:
    from headrace.front.request_output import RequestOutput
    from headrace.llm import LLM
    from headrace.params import SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])


def sampling_options(command: _Command) -> _Command:
    """Add `--max_tokens` and its like; `sampling_params` reads them."""
    options = (
        click.option("--max_tokens", "--max-tokens", "-n", type=click.IntRange(1), help="Most new tokens."),
        click.option("--temperature", "-t", type=click.FloatRange(0), help="0 always takes the likeliest token."),
        click.option("--top_p", "--top-p", type=click.FloatRange(0, 1), help="Sample from this much of the mass."),
        click.option("--top_k", "--top-k", type=click.IntRange(-1), help="Sample from this many tokens."),
        click.option("--seed", type=int, help="Repeats the answer."),
        click.option("--stop", multiple=True, help="Text that ends the answer; repeatable."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def sampling_params(given: dict[str, Any], *, default_max_tokens: int | None) -> SamplingParams:
    """The parameters of `sampling_options`, greedy unless something says otherwise."""
    from headrace.params import SamplingParams

    max_tokens = given["max_tokens"] if given["max_tokens"] is not None else default_max_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given["temperature"],
        top_p=given["top_p"],
        top_k=given["top_k"],
        seed=given["seed"],
        stop=list(given["stop"]) or None,
    )


def check_finish(output: RequestOutput) -> None:
    """An answer that was cut off is not a whole one.

    Raises:
        TimeoutError: the request's time was over.
    """
    if output.outputs[0].finish_reason == "timeout":
        raise TimeoutError("the answer was cut off: request_timeout_s is over; raise it, or ask for fewer tokens")


def open_llm(ctx: click.Context, model: str | None) -> LLM:
    """Load the model that the command line describes. Logs only warnings unless `--log_level` was typed."""
    from headrace import log

    resolved = resolved_from_click(ctx, model)
    level = resolved.server.log_level
    was_chosen = resolved.origin("log_level") == "--log_level" or level != "info"
    log.setup(level if was_chosen else "warning")
    resolved.take_effect()

    if sys.stderr.isatty():
        click.secho(f"loading {resolved.args.model} ...", dim=True, err=True)
    from headrace.llm import LLM

    return LLM.from_args(resolved.args)
