"""A report as one HTML file that needs nothing else: style and figures are inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from headrace.bench.report import LATENCIES, Report, Spread
from headrace.bench.table import simulation_lines, slo_text, sweep_rows

__all__ = ["as_page", "document", "facts_html", "figures_html", "table_html"]

STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; --back: #ffffff; --text: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #9198a1; --back: #0d1117; --text: #f0f6fc; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem;
       background: var(--back); color: var(--text); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.note { color: var(--soft); }
div.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
table.facts td { text-align: left; white-space: normal; }
div.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: .8rem; }
img { width: 100%; max-width: 57rem; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
      box-sizing: border-box; }
details { margin-top: 1rem; } pre { overflow-x: auto; font-size: 12px; }
""".strip()


def as_page(report: Report, figures: Mapping[str, bytes]) -> str:
    """`figures` are PNG files by name (`plots.draw`); without them the page has tables only."""
    command = report.kind if report.simulation is not None else f"bench {report.kind}"
    title = f"headrace {command}: {report.model['name']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(report.date)}</p>',
        facts_html(_facts_of(report)),
        "<h2>Runs</h2>",
        table_html(sweep_rows(report)),
        '<p class="note">Times in milliseconds. tok/s/user: mean over requests of output tokens / E2E.</p>',
        *_latencies(report),
        *figures_html(figures),
        "<details><summary>Everything, as JSON</summary><pre>",
        escape(_json(report)),
        "</pre></details>",
    ]
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page of these pieces of HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _facts_of(report: Report) -> list[tuple[str, str]]:
    workload = report.workload
    facts = [
        ("model", f"{report.model['name']} ({report.model['type']}, {report.model['dtype']})"),
        ("device", str(report.machine["device"])),
        ("GPUs", str(report.num_gpus)),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.machine["versions"].items())),
        ("dataset", f"{workload.dataset}, seed {workload.seed}, {workload.warmup} requests before the clock starts"),
        ("prompt tokens", f"{workload.input_len.mean:,.1f} ({workload.input_len.min} to {workload.input_len.max})"),
        ("new tokens", f"{workload.output_len.mean:,.1f} ({workload.output_len.min} to {workload.output_len.max})"),
    ]
    facts += [] if report.slo is None else [("SLO", slo_text(report.slo))]
    return facts + simulation_lines(report)


def _latencies(report: Report) -> Iterable[str]:
    for point in report.points:
        rows: list[Sequence[str]] = [("", "mean", "min", "P50", "P90", "P99", "max")]
        for name, meaning in LATENCIES.items():
            spread = point.latency.get(name)
            if isinstance(spread, Spread):
                values = (spread.mean, spread.min, spread.p50, spread.p90, spread.p99, spread.max)
                rows.append((meaning, *(f"{value * 1000:,.2f}" for value in values)))
        yield f"<h2>Latencies, {escape(point.load.name)}</h2>"
        yield table_html(rows)


def figures_html(figures: Mapping[str, bytes]) -> Iterable[str]:
    if figures:
        yield '<h2>Figures</h2>\n<div class="figures">'
        for name, data in figures.items():
            yield f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        yield "</div>"


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts)
    return f'<table class="facts">{rows}</table>'


def table_html(rows: Sequence[Sequence[str]], *, texts: Sequence[int] = ()) -> str:
    """The first row is the head; the columns `texts` have words, which are set to the left and may be broken."""

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (
            f"<{tag}{' class=text' if column in texts else ''}>{escape(cell)}</{tag}>"
            for column, cell in enumerate(row)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows[1:])
    return f'<div class="scroll"><table>{line("th", rows[0])}{body}</table></div>'


def _json(report: Report) -> str:
    values: dict[str, Any] = msgspec.to_builtins(report)
    del values["steps"]
    for point in values["points"]:
        for spread in point["latency"].values():
            if spread is not None:
                del spread["curve"]
    return msgspec.json.format(msgspec.json.encode(values), indent=2).decode()
