"""The MODEL argument of every command that loads one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Short names that begin so; files and folders where none does."""
    from headrace.hub.aliases import ALIASES

    found = [CompletionItem(name, help=alias.summary) for name, alias in ALIASES.items() if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def model_argument(command: _Command) -> _Command:
    """Not required by the parser: a file given with `--config` may name it."""
    return click.argument("model", required=False, shell_complete=complete_model)(command)
