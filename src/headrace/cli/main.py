"""The console script `headrace`: its commands, imported when they are called."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from headrace import __version__, env

COMMANDS = {
    "serve": "Serve a model over HTTP with the OpenAI API.",
    "chat": "Talk with a model in the terminal.",
    "generate": "Complete a prompt and exit.",
    "bench": "Measure throughput and latency.",
    "eval": "Judge a model's answers; compare two configurations.",
    "models": "List the architectures, and what works for each.",
    "plan": "Tell what a model takes and how much fits, without loading it.",
    "simulate": "Predict a workload on a modelled device, on one instance or a thousand.",
    "doctor": "Look at this machine, and at whether a model can be served on it.",
    "tune": "Find settings for a workload and its limits, by measuring.",
    "pull": "Fetch a model by its short name.",
    "config": "Check, show and describe configurations.",
    "completion": "Print a shell's completion script.",
}
"""Name -> summary. The command is the one of `headrace.cli.<name>` that has this name; the help needs none of them."""

INTERRUPTED = 130
NO_COMMAND: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""A group called alone, whose help is its answer; older releases of click have no error for it."""


class LazyGroup(click.Group):
    """A group that imports a command when it is needed, so that `--help` and completion are instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"headrace.cli.{cmd_name}")
        found = (value for value in vars(module).values() if isinstance(value, click.Command))
        return next(command for command in found if command.name == cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[:2] == ["serve", "embeddings"]:
            args = ["serve", "--embeddings_only", *args[2:]]
        if args[0] not in COMMANDS and (close := difflib.get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{close[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, "-V", "--version", prog_name="headrace")
def cli() -> None:
    """Headrace serves large language models."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 2 for bad input, 1 for everything else, 130 for Ctrl-C."""
    open_closed_streams()
    try:
        code = run(arguments)
    except KeyboardInterrupt:  # a second one, while the first was being answered
        code = INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more: the interpreter must not try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            code = code or 1
    if code == INTERRUPTED:
        os._exit(code)  # a second Ctrl-C may have cut a shutdown short: threads that still run would be torn down
    sys.exit(code)


def open_closed_streams() -> None:
    """Send what the caller has closed (`2>&-`) to nowhere: a socket or a model must not become descriptor 2.

    `sys.stdin` stays None, so that a command can say that there is nothing to read.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one command line. Errors are one line; at log level debug the traceback stands before it."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = cli.main(args=typed, prog_name="headrace", standalone_mode=False)
    except NO_COMMAND as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _say(f"headrace: {one_line(error)}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except BrokenPipeError:
        return 1
    except Exception as error:
        return _interrupted() if is_interrupt(error) else report(error, debug=wants_traceback(typed))
    return code if isinstance(code, int) else 0


def _interrupted() -> int:
    _say("interrupted")
    return INTERRUPTED


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error came of a Ctrl-C: it fell into a library that made its own of it. Some, not written in Python,
    keep the name alone (pydantic's SchemaError, while models are being defined)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt) or KeyboardInterrupt.__name__ in str(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def one_line(error: click.ClickException) -> str:
    """What is wrong with a command line, and where its help is."""
    text = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        text = f"{text.removesuffix('.')} (see '{error.ctx.command_path} --help')"
    return text


def report(error: Exception, *, debug: bool) -> int:
    """Print an error that reached the top; what the user can mend is a ValueError or an OSError."""
    if debug:
        import traceback

        traceback.print_exception(error)
    known = isinstance(error, ValueError | OSError | NotImplementedError | MemoryError | RuntimeError)
    known = known and not isinstance(error, RecursionError)
    prefix = "" if known else f"{type(error).__name__}: "
    text = _of_system(error) if isinstance(error, OSError) else str(error)
    for line in text.splitlines() or [type(error).__name__]:  # a configuration has a line for each problem
        _say(f"headrace: {prefix}{line}")
    return 2 if isinstance(error, ValueError | FileNotFoundError | NotImplementedError) else 1


def _of_system(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror or error}: check the path and its permissions"
    if error.errno == errno.ENOSPC:  # files are named: what has no name is the output
        return f"the output can't be written: {error.strerror}"
    return error.strerror or str(error)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the exit code still tells
        click.echo(line, err=True)


def wants_traceback(typed: Sequence[str]) -> bool:
    for index, word in enumerate(typed):
        name, _, value = word.partition("=")
        if name.replace("-", "_") in ("__log_level", "_l"):
            return (value or "".join(typed[index + 1 : index + 2])) in ("debug", "trace")
    return env.log_level() in ("debug", "trace")


if __name__ == "__main__":
    main()
