"""`headrace simulate`: a workload on a modelled device, by the real scheduler, cache and loop."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.bench_options import Options, load_options, option, take_options, with_options, workload_options
from headrace.cli.models import model_argument
from headrace.cli.options import llm_options
from headrace.cli.plan import THIS_MACHINE, resolved_for_planning, spread_of

if TYPE_CHECKING:
    from headrace.bench.record import Record
    from headrace.bench.report import Load, Point, Report
    from headrace.bench.workload import Task
    from headrace.config.llm_args import LlmArgs
    from headrace.simulate.fleet import Outcome
    from headrace.simulate.model import Model
    from headrace.simulate.sizing import Trial
    from headrace.text.tokenizer import Tokenizer

AUTO = "auto"
ROUTER_NAMES = ("round_robin", "load_balancing", "kv_cache_aware")
INPUT_FILE = click.Path(dir_okay=False, path_type=Path)


def _instances(ctx: click.Context, param: click.Parameter, text: str) -> int | None:
    if text == AUTO:
        return None
    if not text.isdigit() or not int(text):
        raise click.BadParameter(f"must be a whole number from 1, or auto, got {text!r}")
    return int(text)


def simulation_options(command: Any) -> Any:
    return with_options(
        command,
        [
            option("--gpu", default=THIS_MACHINE, show_default="this machine's CPU",
                   help="Device that is modelled: h200, h100, b200, a100, l40s and others."),
            option("--calibrate", type=INPUT_FILE, metavar="REPORT.json",
                   help="A report of 'headrace bench' of this model on this device; best with --record_steps. Without "
                   "it the device's data sheet is all there is."),
            option("--instances", default="1", metavar="N|auto", callback=_instances,
                   help="Copies of the model, each on devices of its own. auto finds the fewest that keep --slo."),
            option("--router", type=click.Choice(ROUTER_NAMES), default="load_balancing",
                   help="How requests are spread over instances."),
            option("--slo_share", type=click.FloatRange(0, 1, min_open=True), default=0.99,
                   help="Share of the requests that must keep --slo for --instances auto."),
            option("--max_instances", type=click.IntRange(1), default=1024, help="Where --instances auto gives up."),
            option("--step_by_step", is_flag=True,
                   help="Make every step by itself instead of working out runs of equal ones. Slower, same result."),
        ],
    )  # fmt: skip


@click.command()
@model_argument
@simulation_options
@load_options(-1)
@workload_options
@llm_options
@click.pass_context
def simulate(ctx: click.Context, model: str | None, **options: Any) -> None:
    """Predict throughput, latencies and hit rates of a workload on a device that need not be here.

    The scheduler, the KV cache and the loop are the real ones; only the time of a step is modelled, from what it
    computes and reads. The workload and its load are given as for `headrace bench`, and so are the engine's settings;
    MODEL needs no weights. The report can be compared with a measured one by `headrace bench compare`.
    """
    from headrace import log

    given = {name: options.pop(name) for name in (
        "gpu", "calibrate", "instances", "router", "slo_share", "max_instances", "step_by_step")}  # fmt: skip
    measured = take_options(ctx, options)
    if measured.outputs.output_json is not None:
        raise click.UsageError("--output_json: simulated tokens mean nothing: leave it out")
    if given["instances"] is None and measured.slo is None:
        raise click.UsageError("--instances auto needs an --slo")
    log.setup("warning")
    measured.outputs.check()
    args = resolved_for_planning(ctx, model).args
    _simulate(ctx, args, measured, given)


def _simulate(ctx: click.Context, args: LlmArgs, options: Options, given: dict[str, Any]) -> None:
    from headrace.cli.bench_sweep import finish

    modelled = modelled_by(args, given["gpu"], given["calibrate"])
    tasks = tasks_for(args, options)
    check_fit(modelled, tasks)
    points: list[Point] = []
    records: list[Record] = []
    runs: list[Run] = []
    for load in options.loads:
        run = Run(modelled, tasks, load, options, given)
        runs.append(run)
        points.append(run.point)
        records.append(run.outcome.record)
    finish(ctx, _report(args, modelled, tasks, options, given, points, runs), records, options.outputs)


class Run:
    """The workload under one load, on as many instances as were asked for or as the SLO needs."""

    def __init__(
        self, modelled: Model, tasks: Sequence[Task], load: Load, options: Options, given: dict[str, Any]
    ) -> None:
        from headrace.bench.report import make_point
        from headrace.cli.bench_sweep import pace_of
        from headrace.simulate.sizing import fewest_instances

        self._modelled, self._tasks, self._load, self._given = modelled, tasks, load, given
        self._pace = pace_of(load, tasks, seed=options.dataset.seed)
        roots = [task for task in tasks if task.after is None]
        self._warm = [roots[number % len(roots)] for number in range(options.warmup)]
        self.trials: list[Trial] = []
        self.num_instances: int = given["instances"] or 0
        self._cpu_s = 0.0
        """Of the last run; the time that it takes to make the instances isn't in it."""
        if not self.num_instances:
            assert options.slo is not None
            self.num_instances, self.trials = fewest_instances(
                self.simulated, options.slo, share=given["slo_share"], most=given["max_instances"]
            )
        self.outcome = self.simulated(self.num_instances)
        num_gpus = self.num_instances * modelled.num_gpus
        self.point = make_point(self.outcome.record, load, num_gpus=num_gpus, slo=options.slo)
        self.speed_up = self.outcome.record.duration_s / self._cpu_s

    def simulated(self, num_instances: int) -> Outcome:
        from tqdm import tqdm

        from headrace.simulate.fleet import Fleet
        from headrace.simulate.routing import ROUTERS

        label = f"{self._load.name}, {num_instances} instance{'' if num_instances == 1 else 's'}"
        with tqdm(total=len(self._tasks), desc=label, unit="request", disable=None, file=sys.stderr) as bar:
            fleet = Fleet(self._modelled, num_instances=num_instances, fast=not self._given["step_by_step"])
            fleet.warm_up(self._warm)
            router = ROUTERS[self._given["router"]]
            began_s = time.process_time()
            outcome = fleet.run(self._tasks, pace=self._pace, router=router, progress=bar.update)
            self._cpu_s = time.process_time() - began_s
            fleet.close()
            return outcome


def modelled_by(args: LlmArgs, gpu: str, report_file: Path | None) -> Model:
    """The model on its device, with what a report says of the device's speed."""
    from headrace.bench.report import read_report
    from headrace.hub.config_only import find_config
    from headrace.hub.read_shape import read_shape
    from headrace.simulate.calibrate import calibrated, check_device, check_model
    from headrace.simulate.cost import Calibration
    from headrace.simulate.model import model_of

    config = find_config(args.model, revision=args.revision, model_kwargs=args.model_kwargs)
    spread = spread_of(args, gpu, None)
    estimate = model_of(args, config, spread, Calibration())
    if report_file is None:
        return estimate
    report = read_report(report_file)
    check_model(report, read_shape(config), source=str(report_file))
    check_device(report, None if gpu == THIS_MACHINE else spread.device.name, source=str(report_file))
    if report.model.get("name") != args.model:
        measured = report.model.get("name")
        click.echo(f"headrace: {report_file} is of {measured}: another size or form has other factors", err=True)
    return model_of(args, config, spread, calibrated(report, estimate.cost, source=str(report_file)))


def tasks_for(args: LlmArgs, options: Options) -> list[Task]:
    """The workload; text needs the model's tokenizer, ids don't."""
    from headrace.bench.dataset import load_tasks
    from headrace.hub.config import text_config
    from headrace.hub.config_only import find_config
    from headrace.hub.source import resolve_model
    from headrace.text.load import load_tokenizer

    @functools.cache
    def tokenizer() -> Tokenizer:
        source = args.tokenizer or resolve_model(args.model, revision=args.revision)
        return load_tokenizer(source, mode=args.tokenizer_mode)

    def vocab_size() -> int:
        config = find_config(args.model, revision=args.revision, model_kwargs=args.model_kwargs)
        return text_config(config).get("vocab_size") or tokenizer().vocab_size

    return load_tasks(options.dataset, vocab_size=vocab_size, tokenizer=tokenizer)


def check_fit(modelled: Model, tasks: Sequence[Task]) -> None:
    """Raises ValueError: a request could only be refused."""
    from headrace.bench.drive import check_tasks
    from headrace.runtime.core import request_limits
    from headrace.runtime.settle import settle

    args, facts = modelled.args, modelled.facts
    check_tasks(tasks, request_limits(args.model, args, facts, settle(args, facts)))


def _report(
    args: LlmArgs,
    modelled: Model,
    tasks: Sequence[Task],
    options: Options,
    given: dict[str, Any],
    points: list[Point],
    runs: Sequence[Run],
) -> Report:
    from datetime import datetime, timezone

    import msgspec

    from headrace import __version__
    from headrace.bench.report import Report, Simulation, Workload
    from headrace.config.show import as_dict
    from headrace.runtime.settle import settle

    settings = settle(args, modelled.facts).scheduler
    return Report(
        kind="simulate",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model={"name": args.model, "type": modelled.facts.model_type, "dtype": modelled.dtype},
        machine={"device": f"{modelled.facts.device}, modelled", "versions": {"headrace": __version__}},
        num_gpus=max(run.num_instances for run in runs) * modelled.num_gpus,
        settings={
            "changed": as_dict(args),
            "max_batch_size": settings.max_batch_size,
            "max_num_tokens": settings.max_num_tokens,
            "max_seq_len": settings.max_seq_len,
            "tokens_per_block": settings.tokens_per_block,
            "tensor_parallel_size": args.tensor_parallel_size,
        },
        workload=Workload.of(
            tasks, dataset=options.dataset.name, seed=options.dataset.seed, warmup=options.warmup, eos_id=options.eos_id
        ),
        slo=options.slo,
        points=points,
        simulation=Simulation(
            num_instances=[run.num_instances for run in runs],
            router=given["router"],
            calibration=msgspec.to_builtins(modelled.cost.calibration),
            num_preempted=[run.outcome.num_preempted for run in runs],
            busy_shares=[run.outcome.busy_shares for run in runs],
            speed_ups=[run.speed_up for run in runs],
            sizing=[msgspec.to_builtins(trial) for run in runs for trial in run.trials],
        ),
    )
