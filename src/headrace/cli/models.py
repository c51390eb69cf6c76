"""The MODEL argument of every command that loads one, and `headrace models`: which architectures there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


HEADER = (
    "model type", "layers", "experts", "quantised weights", "prefix reuse", "chunked prefill", "CUDA graphs",
    "snapshots", "several ranks", "fallback",
)  # fmt: skip
YES, NO = "yes", "-"
ANY_OTHER = "any other that takes an attention function"


def architectures() -> list[tuple[str, ...]]:
    """A row of HEADER for every model type, from what its file declares; last, what runs without a file."""
    from headrace import plugins
    from headrace.hub.gguf_config import MODEL_TYPES as GGUF_TYPES
    from headrace.models._transformers import ALSO_RUNS

    rows: list[tuple[str, ...]] = []
    for name in plugins.names("models"):
        architecture = plugins.load("models", name)
        kinds = architecture.layer_kinds
        has_state = "state" in kinds
        for model_type in architecture.model_types:
            is_gguf = model_type in GGUF_TYPES
            rows.append((
                f"`{model_type}`",
                ", ".join(sorted(kinds)),
                YES if architecture.has_experts else NO,
                "FP8, GGUF" if is_gguf else "FP8, MXFP4" if architecture.reads_mxfp4 else "FP8",
                "at snapshots" if has_state else YES,
                YES,
                YES if architecture.is_capturable else NO,
                YES if has_state else NO,
                YES,
                "transformers" if model_type in ALSO_RUNS else NO,
            ))  # fmt: skip
    hosted = (ANY_OTHER, "full, window", NO, NO, YES, YES, NO, NO, NO, "it is one")
    return [*sorted(rows, key=lambda row: row[0].strip("`")), hosted]


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown, its columns aligned."""
    widths = [max(len(row[column]) for row in (HEADER, *rows)) for column in range(len(HEADER))]
    lines = [HEADER, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in lines
    )


PAGE = """# Models

What works for each architecture (`headrace models` prints this page; it is generated from what the model files declare,
and `tests/models/test_contract.py` holds every row to a tiny model of that type; one is held to something else, below).

- **layers**: `full` attention, attention over a `window`, other kinds of attention by name, recurrent `state`s.
- **quantised weights**: how linears and experts may be stored (MXFP4: experts only); a checkpoint of another form is
  refused by name.
- **prefix reuse**: of any full blocks, or where a recurrent state was kept (**snapshots**).
- **fallback**: `--model_impl transformers` runs it too. Architectures that aren't listed run this way on their own, on
  one rank, if `transformers` has a causal model of them whose attention takes an attention function; what can't be run
  is refused by name. Settings that need the layers one by one, such as pipeline stages, don't apply to it.

{table}

Held to something else:

- **Kimi-K3** (`kimi_k3`, the language model of the multimodal checkpoint): `transformers` has no model of it, so ours
  is held to a reference written from the published description (`tests/models/kimi_k3_reference.py`), not to the
  authors' code, and, with everything switched off that Kimi Linear doesn't have, to `transformers`' `kimi_linear`.
  Keys, names and shapes of the released checkpoint are those that public ports of it state; no real checkpoint was
  loaded here. Not known, and refused by name: `mla_use_nope` false (how rope would turn), a `moe_layer_freq` other
  than 1, routers other than `sigmoid` with `noaux_tc`, layers of multi-token prediction, MXFP4 with quantised
  activations, and any other key that begins like this model's own (`mla_`, `moe_`, `attn_res_`, ...) or stands in
  `linear_attn_config`. A config of the language model alone, which says `kimi_linear`, is served as `kimi_k3` by
  `model_kwargs: {{model_type: kimi_k3}}`.
"""


def page() -> str:
    """docs/models.md."""
    return PAGE.format(table=as_table(architectures())).rstrip("\n")


@click.command()
def models() -> None:
    """List the architectures that run, and what works for each, as a Markdown page."""
    click.echo(page())
