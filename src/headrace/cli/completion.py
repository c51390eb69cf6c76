"""`headrace completion`: scripts that make a shell complete commands, options and model names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

INSTALL = {
    "bash": 'eval "$(headrace completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(headrace completion zsh)"   in ~/.zshrc',
    "fish": "headrace completion fish > ~/.config/fish/completions/headrace.fish",
}


@click.command(epilog="Install: " + "; ".join(INSTALL.values()))
@click.argument("shell", type=click.Choice(list(INSTALL)))
def completion(shell: str) -> None:
    """Print the completion script of SHELL."""
    from headrace.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "headrace", "_HEADRACE_COMPLETE").source())
