"""`headrace tune`: settings for a workload and its limits, found by measuring."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.bench_options import OUTPUT_FOLDER, Options, load_options, option, take_options, with_options
from headrace.cli.bench_options import workload_options as bench_workload_options
from headrace.cli.models import model_argument
from headrace.cli.options import _state, llm_options
from headrace.cli.simulate import tasks_for
from headrace.config.resolution import Resolved, Typed, resolve

if TYPE_CHECKING:
    from headrace.bench.report import Point, Report
    from headrace.bench.workload import Task
    from headrace.simulate.cost import Cost
    from headrace.tune.judge import Goal
    from headrace.tune.store import Store, Trial

SERVED_RUNS = 2
FILES_OF_BENCH = ("report_json", "html", "plots", "output_json", "request_json")


def tune_options(command: Any) -> Any:
    return with_options(
        command,
        [
            option("--output_dir", type=OUTPUT_FOLDER, required=True, metavar="FOLDER",
                   help="Folder for config.yaml, trials.json, the reports, pareto.png and tune.html. The same command "
                   "with the same folder goes on where it stopped."),
            option("--quantile", type=click.FloatRange(0, 1), default=0.9,
                   help="Share of the requests that must keep each limit of --slo."),
            option("--budget", type=click.FloatRange(1), default=600.0, metavar="SECONDS",
                   help="No trial begins that would end later than this."),
            option("--max_per_knob", type=click.IntRange(1), default=2,
                   help="Values of one setting that are measured, the best by prediction."),
            option("--no_server", is_flag=True,
                   help="Measure the result in this process again, not through 'headrace serve' over HTTP: for limits "
                   "of the engine alone."),
            option("--no_prediction", is_flag=True, help="Measure every candidate, whatever the simulator says."),
        ],
    )  # fmt: skip


@click.command()
@model_argument
@tune_options
@load_options(-1)
@bench_workload_options
@llm_options
@click.pass_context
def tune(ctx: click.Context, model: str | None, **options: Any) -> None:
    """Find settings of MODEL for a workload and its limits (--slo), by measuring.

    Turns one setting after another in the order in which they matter: max_batch_size, max_num_tokens, the cache's
    share of memory, the capacity policy, chunked prefill. Candidates are simulated first, with step times of what was
    measured so far; those that can't be better are not measured. Several loads (--concurrency 1,4,16) are measured
    with each candidate, and the best that keeps the limits counts. Settings that you give are not turned. In the end
    'headrace serve' is started with the settings as given and with the best ones, and measured over HTTP: those figures
    count.
    """
    from headrace import log

    names = ("output_dir", "quantile", "budget", "max_per_knob", "no_server", "no_prediction")
    given = {name: options.pop(name) for name in names}
    typed = [name for name in FILES_OF_BENCH if options[name] is not None]
    if typed:
        raise click.UsageError(f"--{typed[0]}: all files of tune are in --output_dir: leave it out")
    measured = take_options(ctx, options)
    log.setup("warning")
    _tune(ctx, Candidates(ctx, model), measured, given)


class Candidates:
    """The user's configuration with some settings turned."""

    def __init__(self, ctx: click.Context, model: str | None) -> None:
        self._state = _state(ctx)
        self._flags = {**self._state.llm, **({} if model is None else {"model": Typed("MODEL", model)})}

    def resolved(self, settings: dict[str, Any]) -> Resolved:
        """Raises ConfigError: they contradict each other, or the user's."""
        from json import dumps

        sets = [*self._state.sets, *(f"{path}={dumps(value)}" for path, value in settings.items())]
        return resolve(config=self._state.config, flags=self._flags, sets=sets)

    def has_set(self, path: str) -> bool:
        """The user has: a flag, the file or `--set`."""
        return path in self.resolved({}).origins

    def current(self, path: str) -> Any:
        from headrace.config.show import plain

        value: Any = self.resolved({}).args
        for name in path.split("."):
            value = value.__dict__[name]
        return plain(value)


@dataclass(frozen=True, slots=True)
class Rig:
    """Measures and predicts; see `tune.search.Bench`."""

    candidates: Candidates
    tasks: Sequence[Task]
    options: Options
    goal: Goal
    folder: Path

    def measure_served(self, settings: dict[str, Any]) -> Report:
        """Through `headrace serve`, as `headrace bench serve` measures it: of several runs the worst one of each load.

        Which requests come while others' prompts are computed is chance, and what is promised has to hold again.
        """
        import torch

        from headrace.bench.serve import ServerDriver
        from headrace.cli.bench_server import ServedModel, facts_of, report_of_server, stated_gpus
        from headrace.cli.bench_sweep import sweep
        from headrace.config.show import as_yaml
        from headrace.tune.judge import figures_of
        from headrace.tune.served import served

        resolved = self.candidates.resolved(settings)
        config = self.folder / "served.yaml"
        config.write_text(as_yaml(resolved), encoding="utf-8")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what this process has measured with is the server's now
        with served(config, self.folder / "server.log") as server:
            name, info = facts_of(server, None)
            driver = ServerDriver(
                server, model=name, tokenizer=ServedModel(resolved.args.model, is_named=True).tokenizer
            )
            num_gpus = stated_gpus(info)
            runs = [
                sweep(driver.run, self.tasks, self.options, kind=f"tune, served {number}", num_gpus=num_gpus)[0]
                for number in range(1, SERVED_RUNS + 1)
            ]
            points = [min(same, key=lambda point: figures_of(point, self.goal).rank) for same in zip(*runs)]
            return report_of_server(
                server, name, info, self.tasks, self.options, api="completions", points=points, num_gpus=num_gpus
            )

    def measure(self, settings: dict[str, Any]) -> Report:
        import msgspec

        from headrace.bench.drive import Driver, check_tasks
        from headrace.cli.bench import engine_args, report_of
        from headrace.cli.bench_sweep import sweep
        from headrace.hub.source import resolve_model
        from headrace.runtime.engines import make_engine
        from headrace.runtime.launch import LocalRuntime
        from headrace.simulate.recorder import Recorder

        args = engine_args(self.candidates.resolved(settings), logs_steps=False)
        source = resolve_model(args.model, revision=args.revision)
        recorders: list[Recorder] = []

        def recorded(*given: Any) -> Recorder:
            recorders.append(Recorder(make_engine(*given)))
            return recorders[0]

        num_gpus = args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size
        driver = Driver(lambda on_message: LocalRuntime(args, source, on_message, make_engine=recorded))
        try:
            with driver as info:
                check_tasks(self.tasks, info)
                gc.collect()
                points, _ = sweep(
                    driver.run, self.tasks, self.options, kind="tune", num_gpus=num_gpus,
                    before=recorders[0].steps.clear,
                )  # fmt: skip
                report = report_of(
                    "throughput", args, source, info, self.tasks, self.options, points=points, num_gpus=num_gpus
                )
        finally:
            gc.collect()  # the weights, before the next engine loads them
        return msgspec.structs.replace(report, steps=recorders[0].steps)

    def predict(self, settings: dict[str, Any], reports: Sequence[Report]) -> list[Point]:
        import msgspec

        from headrace.bench.report import make_point
        from headrace.cli.bench_sweep import pace_of
        from headrace.cli.simulate import check_fit
        from headrace.simulate.calibrate import calibrated
        from headrace.simulate.cost import Calibration
        from headrace.simulate.fleet import Fleet
        from headrace.simulate.model import Model, model_of

        args = self.candidates.resolved(settings).args
        config, spread = _config_of(args), _spread_of(args)
        steps = [step for report in reports for step in report.steps]
        all_steps = msgspec.structs.replace(reports[0], steps=steps)

        def modelled(calibration: Calibration) -> Model:
            return model_of(args, config, spread, calibration)

        cost: Cost = modelled(Calibration()).cost
        # Candidates are told apart by a percent: what varies by chance would be more.
        model = modelled(calibrated(all_steps, cost, source="the trials").without_spread())
        check_fit(model, self.tasks)
        points: list[Point] = []
        for load in self.options.loads:
            fleet = Fleet(model)
            fleet.warm_up([task for task in self.tasks if task.after is None][: self.options.warmup])
            outcome = fleet.run(self.tasks, pace=pace_of(load, self.tasks, seed=self.options.dataset.seed))
            fleet.close()
            points.append(make_point(outcome.record, load, num_gpus=model.num_gpus, slo=self.options.slo))
        return points

    def measure_as_prediction(self, settings: dict[str, Any], reports: Sequence[Report]) -> list[Point]:
        """In place of `predict`: every candidate promises the same, a little more than there is."""
        self.candidates.resolved(settings)
        import msgspec

        points = reports[0].points
        if not settings:
            return points
        result = points[0].result
        faster = msgspec.structs.replace(result, output_tokens_per_s=result.output_tokens_per_s * 2)
        return [msgspec.structs.replace(point, result=faster, latency={}) for point in points[:1]]


def _config_of(args: Any) -> dict[str, Any]:
    from headrace.hub.config_only import find_config

    return find_config(args.model, revision=args.revision, model_kwargs=args.model_kwargs)


def _spread_of(args: Any) -> Any:
    """This machine's devices. Of a GPU that has no data sheet here, H100's: the trials correct it."""
    import torch

    from headrace.cli.plan import THIS_MACHINE, spread_of
    from headrace.simulate.devices import PEAKS

    if not torch.cuda.is_available():
        return spread_of(args, THIS_MACHINE, None)
    words = torch.cuda.get_device_name().lower().replace("nvidia", "").split()
    name = next((word for word in words if word in PEAKS), "h100")
    return spread_of(args, name, None)


def _tune(ctx: click.Context, candidates: Candidates, options: Options, given: dict[str, Any]) -> None:
    from headrace.bench.machine import busy_note
    from headrace.bench.report import Slo
    from headrace.bench.workload import full_lengths
    from headrace.tune.judge import Goal
    from headrace.tune.knobs import KNOBS, Asked
    from headrace.tune.search import Bench, Search
    from headrace.tune.store import Store

    base = candidates.resolved({})
    base.take_effect()
    if note := busy_note():
        click.echo(f"headrace: {note}", err=True)
    tasks = tasks_for(base.args, options)
    goal = Goal(slo=options.slo or Slo(), quantile=given["quantile"])
    rig = Rig(candidates, tasks, options, goal, given["output_dir"])
    store = Store(given["output_dir"], {**_asked(base, options, goal), "served": not given["no_server"]})
    predict = rig.measure_as_prediction if given["no_prediction"] else rig.predict
    search = Search(
        Bench(
            measure=rig.measure, confirm=rig.measure if given["no_server"] else rig.measure_served,
            confirms="engine" if given["no_server"] else "server", predict=predict, current=candidates.current,
        ), store, goal,
        budget_s=given["budget"], max_per_knob=given["max_per_knob"], say=lambda line: click.echo(line, err=True),
    )  # fmt: skip
    asked = Asked(
        most_requests=min(max((load.concurrency or len(tasks)) for load in options.loads), len(tasks)),
        longest_prompt=max(full_lengths(tasks)),
        tokens_per_block=base.args.kv_cache_config.tokens_per_block,
    )
    knobs = [knob for knob in KNOBS if not candidates.has_set(knob.path)]
    best = search.run(knobs, asked)
    written = _write(candidates, store, goal, best)
    for line in _said(store, best):
        click.echo(line)
    click.echo(f"written     {', '.join(str(path) for path in written)}")
    click.echo(f"serve it    headrace serve --config {written[0]}")
    assert best.measured is not None
    if not best.measured.keeps:
        click.echo("headrace: no settings kept every limit; these come nearest", err=True)
        ctx.exit(1)


def _said(store: Store, best: Trial) -> list[str]:
    """What was measured and how: the settings as given and the chosen ones, these with the engine alone as well."""
    from headrace.tune.page import HOW
    from headrace.tune.search import text_of

    trials = [trial for trial in store.journal.trials if trial.measured is not None]
    given = [trial for trial in trials if not trial.settings][-1]
    assert best.measured is not None and given.measured is not None
    lines = [f"as given    {text_of(given.measured)}{HOW[given.through]}", f"chosen      {best.name}"]
    lines.append(f"measured    {text_of(best.measured)}{HOW[best.through]}")
    alone = [trial for trial in trials if trial.settings == best.settings and trial.through == "engine"]
    if best.through == "server" and alone[0].measured is not None:
        lines.append(f"in process  {text_of(alone[0].measured)}, the engine without a server")
    elif best.through == "engine":
        lines.append("            of the engine in this process: over HTTP it is slower, see docs/tune.md")
    return lines


def _asked(base: Resolved, options: Options, goal: Goal) -> dict[str, Any]:
    import dataclasses

    import msgspec

    from headrace.config.show import as_dict

    return {
        "model": base.args.model,
        "settings": as_dict(base.args),
        "dataset": dataclasses.asdict(options.dataset),
        "warmup": options.warmup,
        "loads": [load.name for load in options.loads],
        "goal": msgspec.to_builtins(goal),
    }


def _write(candidates: Candidates, store: Store, goal: Goal, best: Trial) -> list[Path]:
    """-> the files, the configuration first"""
    from headrace.bench.plots import png, require_matplotlib
    from headrace.config.show import as_yaml
    from headrace.tune.page import as_page, measured_of, paint

    folder = store.folder
    yaml = folder / "config.yaml"
    assert best.measured is not None
    head = "".join(f"# {line}\n" for line in ["headrace tune", *_said(store, best)])
    text = head + as_yaml(candidates.resolved(best.settings)).rstrip() + "\n"
    yaml.write_text(text, encoding="utf-8")
    pictures: dict[str, bytes] = {}
    written = [yaml, folder / "trials.json", folder / "tune.html"]
    try:
        require_matplotlib()
    except ValueError as error:
        click.echo(f"headrace: there is no picture: {error}", err=True)
    else:
        tried = [(trial, store.report(trial).points) for trial in store.journal.trials if trial.measured is not None]
        pictures["pareto"] = png(paint, measured_of(store.journal, tried, goal))
        written.append(folder / "pareto.png")
        written[-1].write_bytes(pictures["pareto"])
    written[2].write_text(as_page(store.journal, goal, best, yaml=text, pictures=pictures), encoding="utf-8")
    return written
