"""`headrace chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.models import model_argument
from headrace.cli.options import llm_options
from headrace.cli.session import check_finish, open_llm, sampling_options, sampling_params

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace.params import SamplingParams

HELP = "/reset starts over, /exit (or Ctrl-D) ends, Ctrl-C stops an answer; a line that ends in \\ goes on in the next"


@dataclass
class Conversation:
    """Messages so far, and how answers are made."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def reset(self) -> None:
        self.messages.clear()

    def say(self, text: str) -> None:
        """Send the user's words and print the answer as it comes. An answer that is interrupted stays as far as it got.

        Raises:
            ValueError: the conversation has outgrown the context, or the template refuses it; it is as before then.
            TimeoutError: the answer was cut off; the conversation is as before, too.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        output = self.llm.generate_async(self.llm.chat_prompt([*system, *turn]), self.params, streaming=True)
        started_s = time.monotonic()
        try:
            for step in output:
                click.echo(step.outputs[0].text_diff, nl=False)
        except KeyboardInterrupt:
            output.abort()
            output.wait()
        answer = output.outputs[0]
        click.echo()
        if sys.stderr.isatty():
            took_s = max(time.monotonic() - started_s, 1e-9)
            click.secho(f"{answer.length} tokens, {answer.length / took_s:.1f} tokens/s", dim=True, err=True)
        check_finish(output)
        self.messages = [*turn, {"role": "assistant", "content": answer.text}]


@click.command()
@model_argument
@click.option("--prompt", "-p", help="Answer this and exit.")
@click.option("--system", "-s", help="System message.")
@sampling_options
@llm_options
@click.pass_context
def chat(ctx: click.Context, model: str | None, prompt: str | None, system: str | None, **sampling: Any) -> None:
    """Talk with MODEL.

    Commands: /reset starts a new conversation, /help shows this, /exit (or Ctrl-D) ends. Ctrl-C stops an answer.
    """
    if prompt is None and sys.stdin is None:
        raise click.UsageError("there is no standard input: give a --prompt")
    params = sampling_params(sampling, default_max_tokens=None)
    with open_llm(ctx, model) as llm:
        conversation = Conversation(llm, params, system)
        if prompt is not None:
            conversation.say(prompt)
            return
        if sys.stdin.isatty():
            enable_line_editing()
            click.secho(HELP, dim=True, err=True)
        converse(conversation)


def converse(conversation: Conversation) -> None:
    """Read lines until the end of input or /exit."""
    while (text := read_turn()) is not None:
        command = text.strip().lower()
        if command in ("/exit", "/quit"):
            return
        if command == "/reset":
            conversation.reset()
            click.secho("a new conversation", dim=True, err=True)
        elif command == "/help":
            click.secho(HELP, dim=True, err=True)
        elif command.startswith("/") and " " not in command:
            click.echo(f"unknown command {command}: {HELP}", err=True)
        elif command:
            try:
                conversation.say(text)
            except (ValueError, TimeoutError) as error:
                click.echo(f"{error} (/reset starts over)", err=True)


def read_turn() -> str | None:
    """What the user says next; None at the end of input."""
    lines: list[str] = []
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt if not lines else prompt and "| ")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            click.echo(err=True)
            return ""
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def enable_line_editing() -> None:
    """Arrow keys and history, where Python has them."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
