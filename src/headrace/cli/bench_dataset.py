"""`headrace bench prepare-dataset`: files for `--dataset`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.bench_options import MAX_COUNT, option, with_options
from headrace.cli.models import complete_model

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

OUTPUT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
INPUT_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
COUNT = click.IntRange(1, MAX_COUNT)
LENGTH = click.FloatRange(0, MAX_COUNT, min_open=True)


class _Group(click.Group):
    """Its commands work with underscores too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name.replace("_", "-"))


@click.group("prepare-dataset", cls=_Group)
@click.option("--output", "-o", type=OUTPUT_FILE, default="preprocessed_dataset.json", show_default=True,
              help="File to write.")  # fmt: skip
@click.option("--random_seed", "--random-seed", "--seed", "seed", type=click.IntRange(0), default=420,
              show_default=True, help="Draws lengths, ids and conversations.")  # fmt: skip
@click.option("-m", "--model", metavar="MODEL", shell_complete=complete_model,
              help="Whose vocabulary or tokenizer to use; may also stand before prepare-dataset.")  # fmt: skip
@click.option("--vocab_size", "--vocab-size", type=COUNT, help="Of random ids, instead of a MODEL's.")
@click.pass_context
def prepare_dataset(ctx: click.Context, output: Path, seed: int, model: str | None, vocab_size: int | None) -> None:
    """Write a dataset: JSON lines with output_tokens and one of input_ids, prompt and turns."""
    ctx.obj = _Making(model or ctx.obj, vocab_size=vocab_size, seed=seed, output=output)


class _Making:
    """What the group was told, for the command that makes the rows."""

    def __init__(self, model: str | None, *, vocab_size: int | None, seed: int, output: Path) -> None:
        self.seed = seed
        self._model = model
        self._vocab_size = vocab_size
        self._output = output

    @property
    def vocab_size(self) -> int:
        if self._vocab_size is not None:
            return self._vocab_size
        from headrace.cli.bench import stated_vocab_size
        from headrace.hub.source import resolve_model

        return stated_vocab_size(resolve_model(self._named())) or self.tokenizer().vocab_size

    def tokenizer(self) -> Tokenizer:
        from headrace.text.load import load_tokenizer

        return load_tokenizer(self._named())

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        from headrace.bench.prepare import write_rows

        if not self._output.absolute().parent.is_dir():
            raise ValueError(f"--output: there is no folder {self._output.absolute().parent}: make it first")
        count = write_rows(rows, self._output)
        click.echo(f"{self._output}: {count} lines")

    def _named(self) -> str:
        if self._model is None:
            raise click.UsageError("whose ids? give --model MODEL or, for random ids, --vocab_size")
        return self._model


def _options(*options: Any) -> Any:
    return lambda command: with_options(command, list(options))


def _required(name: str, kind: Any, text: str) -> Any:
    return option(name, type=kind, required=True, help=text)


@prepare_dataset.command("fixed")
@option("--num_requests", type=COUNT, default=32, help="Lines to write.")
@option("--input_len", type=COUNT, default=128, help="Prompt tokens of each.")
@option("--output_len", type=COUNT, default=128, help="New tokens of each.")
@option("--shared_len", type=click.IntRange(0, MAX_COUNT), default=0, help="Tokens that all prompts begin with.")
@click.pass_obj
def fixed(making: _Making, **sizes: Any) -> None:
    """Random ids, all of one length."""
    from headrace.bench.prepare import fixed_rows

    making.write(fixed_rows(**sizes, vocab_size=making.vocab_size, seed=making.seed))


@prepare_dataset.command("token-norm-dist")
@_options(
    _required("--num_requests", COUNT, "Lines to write."),
    _required("--input_mean", LENGTH, "Mean of the prompts' tokens."),
    _required("--input_stdev", click.FloatRange(0), "Their standard deviation."),
    _required("--output_mean", LENGTH, "Mean of the new tokens."),
    _required("--output_stdev", click.FloatRange(0), "Their standard deviation."),
)
@click.pass_obj
def normal(making: _Making, **sizes: Any) -> None:
    """Random ids, lengths of a normal distribution (at least 1)."""
    from headrace.bench.prepare import normal_rows

    making.write(normal_rows(**sizes, vocab_size=making.vocab_size, seed=making.seed))


@prepare_dataset.command("token-unif-dist")
@_options(
    _required("--num_requests", COUNT, "Lines to write."),
    _required("--input_min", COUNT, "Fewest prompt tokens."),
    _required("--input_max", COUNT, "Most prompt tokens."),
    _required("--output_min", COUNT, "Fewest new tokens."),
    _required("--output_max", COUNT, "Most new tokens."),
)
@click.pass_obj
def uniform(making: _Making, **sizes: Any) -> None:
    """Random ids, lengths of a uniform distribution, both ends included."""
    from headrace.bench.prepare import uniform_rows

    making.write(uniform_rows(**sizes, vocab_size=making.vocab_size, seed=making.seed))


@prepare_dataset.command("multi-turn")
@option("--num_conversations", type=COUNT, default=8, help="Lines to write.")
@option("--num_turns", type=COUNT, default=4, help="Turns of each; a turn begins when the one before is answered.")
@option("--system_len", type=click.IntRange(0), default=128, help="Tokens that all conversations begin with.")
@option("--turn_len", type=COUNT, default=32, help="Tokens that each turn adds.")
@option("--output_len", type=COUNT, default=64, help="New tokens of each answer.")
@click.pass_obj
def multi_turn(making: _Making, **sizes: Any) -> None:
    """Conversations of random ids."""
    from headrace.bench.prepare import multi_turn_rows

    making.write(multi_turn_rows(**sizes, vocab_size=making.vocab_size, seed=making.seed))


@prepare_dataset.command("sharegpt")
@option(
    "--file", "path", type=INPUT_FILE, help="JSON array of conversations.  [default: ShareGPT, fetched once, 27 MB]"
)
@option("--num_requests", type=COUNT, default=32, help="Lines to write.")
@option("--max_turns", type=COUNT, default=1, help="Human turns of a conversation; 1 writes single prompts.")
@option("--min_input_len", type=COUNT, default=16, help="Fewest tokens of a line's turns together.")
@option("--max_input_len", type=COUNT, default=512, help="Most tokens of a line's turns together.")
@option("--output_len", type=COUNT, help="New tokens of each.  [default: as many as the answer in the file has]")
@click.pass_obj
def sharegpt(making: _Making, path: Path | None, **sizes: Any) -> None:
    """Conversations of ShareGPT, or of a file of that form, as texts."""
    from headrace.bench.prepare import conversation_rows
    from headrace.bench.sharegpt import fetch_sharegpt

    making.write(conversation_rows(path or fetch_sharegpt(), making.tokenizer(), **sizes, seed=making.seed))


@prepare_dataset.command("mooncake")
@click.argument("trace", type=INPUT_FILE)
@option("--num_requests", type=click.IntRange(0, MAX_COUNT), default=0, help="Lines to take; 0 is all.")
@click.pass_obj
def mooncake(making: _Making, trace: Path, num_requests: int) -> None:
    """TRACE, JSON lines of timestamp, input_length, output_length and hash_ids, with ids that share its prefixes.

    Its timestamps are kept: 'headrace bench throughput --dataset FILE --trace_speed 1' replays them.
    """
    from headrace.bench.prepare import mooncake_rows

    with trace.open(encoding="utf-8") as file:
        making.write(
            mooncake_rows(
                file, name=str(trace), num_requests=num_requests, vocab_size=making.vocab_size, seed=making.seed
            )
        )
