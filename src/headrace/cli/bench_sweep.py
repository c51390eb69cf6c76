"""Running a workload under each load, and writing what came of it; the same for an engine and for a server."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.pace import Pace
    from headrace.bench.record import Record
    from headrace.bench.report import Load, Point, Report
    from headrace.bench.workload import Task
    from headrace.cli.bench_options import Options, Outputs


class Runner(Protocol):
    """`Driver.run` and `ServerDriver.run`."""

    def __call__(
        self,
        tasks: Sequence[Task],
        *,
        pace: Pace,
        stop_ids: tuple[int, ...],
        cache_salt: str,
        progress: Callable[[int], object] | None,
    ) -> Record: ...


def sweep(
    run: Runner,
    tasks: Sequence[Task],
    options: Options,
    *,
    kind: str,
    num_gpus: int,
    shares_cache: bool = False,
    before: Callable[[], object] = lambda: None,
) -> tuple[list[Point], list[Record]]:
    """A warm-up, then a run for each load.

    Args:
        shares_cache: a run may find prefixes that earlier ones left; otherwise each has a salt of its own.
        before: called when the warm-up is over.
    """
    from headrace.bench.pace import Closed
    from headrace.bench.report import make_point

    paces = [pace_of(load, tasks, seed=options.dataset.seed) for load in options.loads]
    run_name = secrets.token_hex(4)
    if options.warmup:
        roots = [task for task in tasks if task.after is None]
        warm = [roots[number % len(roots)] for number in range(options.warmup)]
        first = paces[0]
        run(
            warm,
            pace=Closed() if first.is_open else first,
            stop_ids=options.stop_ids,
            cache_salt=f"warm-up-{run_name}",
            progress=None,
        )
    before()
    points: list[Point] = []
    records: list[Record] = []
    for load, pace in zip(options.loads, paces):
        label = kind if len(paces) == 1 else f"{kind}, {load.name}"
        salt = "" if shares_cache else f"{run_name}-{len(points)}"
        with progress_bar(label, sum(task.num_output for task in tasks)) as progress:
            records.append(run(tasks, pace=pace, stop_ids=options.stop_ids, cache_salt=salt, progress=progress))
        points.append(make_point(records[-1], load, num_gpus=num_gpus, slo=options.slo))
    return points, records


def pace_of(load: Load, tasks: Sequence[Task], *, seed: int) -> Pace:
    """Raises ValueError: a trace without times."""
    from headrace.bench.pace import Closed, Open, constant_arrivals, poisson_arrivals, trace_arrivals

    if load.pattern == "closed":
        return Closed(load.concurrency)
    if load.pattern == "trace":
        return Open(trace_arrivals(tasks, speed=load.trace_speed or 1.0))
    assert load.request_rate is not None
    count = sum(task.after is None for task in tasks)
    times = iter(
        poisson_arrivals(count, rate=load.request_rate, seed=seed)
        if load.pattern == "poisson"
        else constant_arrivals(count, rate=load.request_rate)
    )
    return Open([next(times) if task.after is None else 0.0 for task in tasks])


@contextmanager
def progress_bar(label: str, num_tokens: int) -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    with tqdm(total=num_tokens, desc=label, unit="token", disable=None, file=sys.stderr) as bar:
        yield bar.update


def finish(
    ctx: click.Context, report: Report, records: Sequence[Record], outputs: Outputs, *, iterations: Sequence[Any] = ()
) -> None:
    """Show the report, write what was asked for, and exit with 1 where requests failed."""
    from headrace.bench.table import as_table

    click.echo(as_table(report))
    _write(report, records, outputs, iterations)
    for point in report.points:
        for line in point.result.first_errors:
            click.echo(f"headrace: {line}", err=True)
    if any(point.result.num_failed for point in report.points):
        ctx.exit(1)


def _write(report: Report, records: Sequence[Record], outputs: Outputs, iterations: Sequence[Any]) -> None:
    from headrace.bench.report import output_rows, request_rows, write_report

    if outputs.report_json is not None:
        write_report(report, outputs.report_json)
    for path, rows in ((outputs.output_json, output_rows), (outputs.request_json, request_rows)):
        if path is not None:
            values = [rows(record) for record in records]
            path.write_text(json.dumps(values[0] if len(values) == 1 else values, indent=2) + "\n", encoding="utf-8")
    if outputs.iteration_log is not None:
        outputs.iteration_log.write_text("".join(json.dumps(each) + "\n" for each in iterations), encoding="utf-8")
    if outputs.plots is not None:
        from headrace.bench.plots import save_plots

        save_plots(report, outputs.plots)
    if outputs.html is not None:
        from headrace.bench.page import as_page

        outputs.html.write_text(as_page(report, _figures(report)), encoding="utf-8")


def _figures(report: Report) -> dict[str, bytes]:
    """None without matplotlib: the page has its tables still."""
    from headrace.bench.plots import draw, require_matplotlib

    try:
        require_matplotlib()
    except ValueError as error:
        click.echo(f"headrace: the page has no figures: {error}", err=True)
        return {}
    return draw(report)
