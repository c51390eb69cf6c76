"""`headrace pull`: fetch a model before it is needed."""

from __future__ import annotations

import click

from headrace.cli.models import complete_model


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_model)
@click.option("--list", "list_aliases", is_flag=True, help="Show the short names that there are.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def pull(names: tuple[str, ...], list_aliases: bool, quiet: bool) -> None:
    """Fetch models by their short names and print where they are.

    A hub id (org/name) is fetched into the Hugging Face cache. The cache of short names is HEADRACE_CACHE, else
    `headrace` in the user's cache folder.
    """
    from headrace.hub.aliases import ALIASES
    from headrace.hub.pull import cached_path
    from headrace.hub.pull import pull as fetch
    from headrace.hub.source import resolve_model

    if list_aliases:
        for name, alias in ALIASES.items():
            state = "cached" if cached_path(name) else f"{alias.size_bytes / 1e6:.0f} MB"
            click.echo(f"{name:14} {alias.summary} ({alias.license}, {state})")
        return
    if not names:
        raise click.UsageError("name a model, or see --list")
    for name in names:
        path = fetch(name, progress=not quiet) if name in ALIASES else resolve_model(name).path
        click.echo(str(path))
