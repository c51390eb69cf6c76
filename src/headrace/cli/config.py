"""`headrace config`: check files, show the resolved configuration, write JSON Schemas for editors."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.models import model_argument
from headrace.cli.options import llm_options, resolved_from_click
from headrace.config.disagg import is_disagg, load_disagg
from headrace.config.errors import ConfigError
from headrace.config.resolution import resolve
from headrace.config.rules import Note
from headrace.config.schema import disagg_schema, llm_schema, schema_text
from headrace.config.show import as_json, as_yaml
from headrace.config.source import read_document

EXIT_BAD_CONFIG = 2


@click.group("config")
def config_group() -> None:
    """Check, show and describe configurations."""


@config_group.command("check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.pass_context
def check(ctx: click.Context, files: tuple[str, ...]) -> None:
    """Check YAML files for unknown keys, bad values, contradictions and features that are not there yet.

    Nothing is loaded. Exit code 2 if any file can't be used.
    """
    failed = False
    for name in files:
        try:
            notes = _check_file(name)
        except ConfigError as error:
            failed = True
            click.echo(str(error), err=True)
            continue
        click.echo(f"{name}: ok")
        _echo_notes(notes, f"{name}: ")
    if failed:
        ctx.exit(EXIT_BAD_CONFIG)


@config_group.command("show")
@model_argument
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True,
              help="Form of the output.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Also the settings that have their defaults.")
@llm_options
@click.pass_context
def show(ctx: click.Context, model: str | None, form: str, everything: bool) -> None:
    """Show the configuration that MODEL, a file and flags resolve to, and where each setting comes from."""
    resolved = resolved_from_click(ctx, model, needs_model=False)
    if form == "json":
        click.echo(as_json(resolved, everything=everything))
    else:
        click.echo(as_yaml(resolved, everything=everything), nl=False)
    _echo_notes(resolved.notes, "")


@config_group.command("schema")
@click.argument("kind", type=click.Choice(["llm", "disagg"]), default="llm")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write.  [default: stdout]")
def schema(kind: str, output: Path | None) -> None:
    """Write the JSON Schema of a `--config` file (llm) or of a disaggregated service's file (disagg)."""
    text = schema_text(llm_schema() if kind == "llm" else disagg_schema())
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{output}: can't be written: {error.strerror}") from None
    click.echo(f"{output}: written")


def _check_file(name: str) -> tuple[Note, ...]:
    document = read_document(name)
    if is_disagg(document):
        load_disagg(document)
        return ()
    return resolve(config=name, needs_model=False).notes


def _echo_notes(notes: tuple[Note, ...], prefix: str) -> None:
    for note in notes:
        if note.level != "debug":
            click.echo(f"{prefix}{note}", err=True)
