"""Options of the commands that measure: the workload, the load, and what is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from headrace.cli.options import _Option, _state
from headrace.config.resolution import Typed

if TYPE_CHECKING:
    from headrace.bench.dataset import Dataset
    from headrace.bench.report import Load, Slo

OUTPUT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
OUTPUT_FOLDER = click.Path(file_okay=False, path_type=Path)
DATASET_OPTIONS = ("num_requests", "input_len", "output_len", "min_input_len", "max_input_len", "seed")
MAX_COUNT = 10_000_000
"""Of requests, and of the tokens of one: more would not fit a machine's memory before anything is measured."""
LOAD_OPTIONS = ("concurrency", "request_rate", "trace_speed")
SLO_NAMES = ("ttft", "tpot", "e2e")

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files to write; None is none."""

    report_json: Path | None
    output_json: Path | None
    request_json: Path | None
    iteration_log: Path | None = None
    html: Path | None
    plots: Path | None

    def check(self) -> None:
        """A report that can't be written is no news for the end of an hour.

        Raises:
            ValueError: no such folder, or no matplotlib for the plots.
            OSError: a file or folder that can't be written.
        """
        for path in (self.report_json, self.output_json, self.request_json, self.iteration_log, self.html):
            if path is not None:
                _check_file(path)
        if self.plots is not None:
            from headrace.bench.plots import require_matplotlib

            require_matplotlib()
            try:
                self.plots.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OSError(f"--plots: can't make {self.plots}: {error.strerror}: choose another folder") from None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed about a measurement."""

    dataset: Dataset
    warmup: int
    loads: list[Load]
    slo: Slo | None
    eos_id: int
    outputs: Outputs
    records_steps: bool = False

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.eos_id < 0 else (self.eos_id,)


def option(*names: str, **settings: Any) -> Decorator:
    """An option whose default is in the help, spelt with underscores or hyphens."""
    return click.option(*names, cls=_Option, **{"show_default": settings.get("default") is not None, **settings})


def with_options(command: Command, options: list[Decorator]) -> Command:
    for each in reversed(options):
        command = each(command)
    return command


def workload_options(command: Command) -> Command:
    """Where requests come from, and what is written."""
    return with_options(
        command,
        [
            option("--dataset", default="random", metavar="random|sharegpt|FILE",
                   help="Where requests come from: random ids, ShareGPT's first turns (fetched once, 27 MB), a file of "
                   "JSON lines with output_tokens and input_ids, prompt or turns (- is standard input), or a JSON "
                   "array of conversations. 'headrace bench prepare-dataset' writes files."),
            option("--num_requests", type=click.IntRange(0, MAX_COUNT), default=0,
                   help="Number of requests; 0 is all of the file, or 32 if they are made or drawn."),
            option("--warmup", type=click.IntRange(0, MAX_COUNT), default=2, help="Requests before the clock starts."),
            option("--input_len", "--target_input_len", "input_len", type=click.IntRange(1, MAX_COUNT), default=128,
                   help="Prompt tokens of random requests."),
            option("--output_len", "--target_output_len", "output_len", type=click.IntRange(1, MAX_COUNT), default=128,
                   help="New tokens of random and ShareGPT requests; a file has its own."),
            option("--min_input_len", type=click.IntRange(1, MAX_COUNT), default=16,
                   help="Shortest ShareGPT prompt in tokens."),
            option("--max_input_len", type=click.IntRange(1, MAX_COUNT), default=512,
                   help="Longest ShareGPT prompt in tokens."),
            option("--seed", type=click.IntRange(0), default=0, help="Draws ids, ShareGPT turns and arrivals."),
            option("--eos_id", type=click.IntRange(-1), default=-1,
                   help="Token that ends a request early; -1 lets every request run to its length."),
            option("--report_json", type=OUTPUT_FILE, help="File for the report; 'headrace bench compare' reads it."),
            option("--html", type=OUTPUT_FILE, help="File for the report as a page of its own; figures need the extra "
                   "bench (matplotlib)."),
            option("--plots", type=OUTPUT_FOLDER, help="Folder for the figures as PNG files; needs the extra bench."),
            option("--output_json", type=OUTPUT_FILE, help="File for the generated ids."),
            option("--request_json", type=OUTPUT_FILE, help="File for the figures of each request."),
        ],
    )  # fmt: skip


def load_options(default: int) -> Decorator:
    """How requests are handed over; lists are a sweep."""

    def decorate(command: Command) -> Command:
        return with_options(
            command,
            [
                option("--concurrency", default=str(default), metavar="N[,N...]",
                       callback=_numbers(int, _check_concurrency),
                       help="Most requests at once; -1 hands all of them over together. A list is a sweep."),
                option("--request_rate", metavar="R[,R...]", callback=_numbers(float, _check_positive),
                       help="Requests per second that arrive whatever the engine does, instead of --concurrency."),
                option("--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson",
                       help="Gaps between arrivals of --request_rate."),
                option("--trace_speed", metavar="X[,X...]", callback=_numbers(float, _check_positive),
                       help="Replay the timestamps of the dataset, X times as fast, instead of --concurrency."),
                option("--slo", multiple=True, metavar="NAME=MS", callback=_slo,
                       help="Limit of a request for the goodput: ttft, tpot or e2e in milliseconds; repeatable, or "
                       "with commas."),
            ],
        )  # fmt: skip

    return decorate


def engine_options(command: Command) -> Command:
    """trtllm-bench's spellings of settings of the engine."""

    def setting(name: str, path: str, **settings: Any) -> Decorator:
        def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
            if value is not None:
                _state(ctx).llm[path] = Typed(name, value)

        return option(name, expose_value=False, callback=keep, **settings)

    policies = click.Choice(["guaranteed_no_evict", "max_utilization", "static_batch"], case_sensitive=False)
    return with_options(
        command,
        [
            option("--streaming", is_flag=True, expose_value=False,
                   help="No effect: every token is timed as it arrives, always."),
            option("--iteration_log", type=OUTPUT_FILE,
                   help="JSON-lines file for statistics of each step; collects them."),
            option("--record_steps", is_flag=True,
                   help="Put what each step computed, and its time, into the report: 'headrace simulate --calibrate' "
                   "reads them."),
            setting("--scheduler_policy", "scheduler_config.capacity_scheduler_policy", type=policies,
                    help="When a waiting request may start.  [default: guaranteed_no_evict]"),
            setting("--enable_chunked_context", "enable_chunked_prefill", is_flag=True, default=None,
                    help="The same as --enable_chunked_prefill."),
            setting("--tp", "tensor_parallel_size", type=int, help="The same as --tp_size."),
            setting("--pp", "pipeline_parallel_size", type=int, help="The same as --pp_size."),
            setting("--ep", "moe_expert_parallel_size", type=int, help="The same as --ep_size."),
        ],
    )  # fmt: skip


def take_options(ctx: click.Context, given: dict[str, Any]) -> Options:
    """Raises UsageError: two loads at a time, or no standard input to read."""
    from headrace.bench.dataset import Dataset

    if given["dataset"] == "-" and sys.stdin is None:
        raise click.UsageError("there is no standard input: give a --dataset")
    names = ("report_json", "output_json", "request_json", "iteration_log", "html", "plots")
    return Options(
        dataset=Dataset(name=given["dataset"], **{name: given[name] for name in DATASET_OPTIONS}),
        warmup=given["warmup"],
        loads=_loads(ctx, given),
        slo=given["slo"],
        eos_id=given["eos_id"],
        outputs=Outputs(**{name: given.get(name) for name in names}),
        records_steps=bool(given.get("record_steps")),
    )


def _loads(ctx: click.Context, given: dict[str, Any]) -> list[Load]:
    from headrace.bench.report import Load

    typed = [name for name in LOAD_OPTIONS if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if len(typed) > 1:
        raise click.UsageError(f"--{typed[0]} and --{typed[1]} are two kinds of load: keep one")
    if given["request_rate"] is not None:
        return [Load(pattern=given["arrivals"], request_rate=rate) for rate in given["request_rate"]]
    if given["trace_speed"] is not None:
        return [Load(pattern="trace", trace_speed=speed) for speed in given["trace_speed"]]
    return [Load(pattern="closed", concurrency=None if each == -1 else each) for each in given["concurrency"]]


def _numbers(kind: Callable[[str], Any], check: Callable[[Any], str]) -> Callable[..., list[Any] | None]:
    """A list by commas; `check` gives what a value must be, or ""."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> list[Any] | None:
        if text is None:
            return None
        found: list[Any] = []
        for part in str(text).split(","):
            try:
                found.append(kind(part))
            except ValueError:
                raise click.BadParameter(f"must be numbers with commas between them, got {text!r}") from None
            if problem := check(found[-1]):
                raise click.BadParameter(f"{problem}, got {part}")
        if len(set(found)) < len(found):
            raise click.BadParameter(f"has a value twice, got {text!r}")
        return found

    return read


def _check_concurrency(value: int) -> str:
    return "must be at least 1, or -1 for no limit" if value == 0 or value < -1 else ""


def _check_positive(value: float) -> str:
    return "" if 0 < value < float("inf") else "must be above 0"


def _slo(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> Slo | None:
    if not texts:
        return None
    limits: dict[str, float] = {}
    for text in [part for each in texts for part in each.split(",")]:
        name, _, number = text.partition("=")
        name = name.strip().removesuffix("_ms")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name.lower() not in SLO_NAMES or limit <= 0:
            raise click.BadParameter(f"must be ttft=MS, tpot=MS or e2e=MS, got {text!r}")
        limits[f"{name.lower()}_s"] = limit / 1000
    from headrace.bench.report import Slo

    return Slo(**limits)


def _check_file(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ValueError(f"can't write {path}: there is no folder {path.absolute().parent}")
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise OSError(f"can't write {path}: {error.strerror}: choose another file") from None
    if not was_there:
        path.unlink()
