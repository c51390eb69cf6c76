"""`headrace eval`: perplexity, exact match and lm-eval's tasks, of one configuration or of two against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace import __version__
from headrace.cli.bench_options import Command, option, with_options
from headrace.cli.models import model_argument
from headrace.cli.options import _state, llm_options, resolved_from_click

if TYPE_CHECKING:
    from headrace.config.resolution import Resolved
    from headrace.eval.compare import Comparison
    from headrace.eval.exact import Answered
    from headrace.eval.perplexity import Perplexity
    from headrace.eval.port import Model
    from headrace.eval.result import EvalResult, Metric

INPUT_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
OUTPUT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
DEFAULT_NUM_TOKENS = 64


@click.group("eval")
def evaluate() -> None:
    """Judge MODEL's answers, or compare two configurations of it on the same items.

    With --against FILE the evaluation runs twice: A as typed, then B with the settings of FILE in the place of --config
    (and the model that FILE names, if it names one); flags hold for both. B gets a verdict with a 95% interval.
    """


def _common(command: Command) -> Command:
    return with_options(
        command,
        [
            option("--against", type=INPUT_FILE, help="YAML file of the second configuration (B)."),
            option("--output", "-o", type=OUTPUT_FILE, help="JSON file for the result, with every item."),
        ],
    )


@evaluate.command("perplexity", short_help="Measure the perplexity of a text file.")
@model_argument
@click.argument("text", type=INPUT_FILE, required=False)
@option("--length", type=click.IntRange(2), help="Tokens of a window.  [default: the model's longest, at most 2048]")
@option("--method", type=click.Choice(["sliding", "blocked"]), default="sliding", help="How windows follow another.")
@option("--stride", type=click.IntRange(1), help="Tokens between windows of sliding.  [default: half of --length]")
@option("--max_windows", type=click.IntRange(0), default=0, help="Windows from the beginning; 0 is all.")
@_common
@llm_options
@click.pass_context
def perplexity(ctx: click.Context, model: str | None, text: Path | None, **given: Any) -> None:
    """Measure the perplexity of MODEL on the file TEXT, as a whole.

    TEXT is encoded once, with the special tokens that the tokenizer adds. Windows of at most --length tokens begin at
    0, S, 2S ...; a token is scored in the first window that has it together with a token before it, given all tokens
    before it in that window. The perplexity is exp(-sum of log-probabilities / number of scored tokens).

    sliding: S is --stride; every token but the first of the text is scored. blocked: S is --length; windows don't
    overlap, and the first token of each isn't scored.

    With --against: paired bootstrap over windows, of the ratio of the two perplexities.
    """
    from headrace.eval.compare import compare_perplexities
    from headrace.eval.perplexity import measure_perplexity
    from headrace.eval.result import Metric

    if text is None:
        raise click.UsageError("which text? give MODEL and then the file TEXT")
    if given["method"] == "blocked" and given["stride"] is not None:
        raise click.UsageError("--stride is for sliding windows: leave it out, or take --method sliding")
    content = _read_text(text)
    sizes = {"length": given["length"], "stride": given["stride"], "max_windows": given["max_windows"]}

    def measure(opened: Model) -> Perplexity:
        length = given["length"] or min(opened.max_len, 2048)
        stride = length if given["method"] == "blocked" else given["stride"]
        return measure_perplexity(opened, content, length=length, stride=stride, max_windows=given["max_windows"])

    def metrics(found: Perplexity) -> list[Metric]:
        return [
            Metric(name="perplexity", value=found.value, num_items=found.num_scored),
            Metric(name="bits_per_byte", value=found.bits_per_byte, num_items=found.num_bytes),
        ]

    def compare(a: Perplexity, b: Perplexity) -> list[Comparison]:
        if a.counts != b.counts:
            raise ValueError("--against: the windows differ: give --length, and compare models of one tokenizer")
        return [compare_perplexities(a.logprob_sums, b.logprob_sums, a.counts)]

    def items(found: Perplexity) -> list[dict[str, Any]]:
        return [{"logprob": total, "num_tokens": count} for total, count in zip(found.logprob_sums, found.counts)]

    task = {"text": str(text), "method": given["method"], **sizes}
    _run(ctx, model, "perplexity", task, given, measure=measure, metrics=metrics, compare=compare, items=items)


@evaluate.command("exact-match", short_help="Compare answers to a file of questions as strings.")
@model_argument
@click.argument("questions", type=INPUT_FILE, required=False)
@option("--num_shots", "--num_fewshot", "num_shots", type=click.IntRange(0), default=0,
        help="Solved examples in front of each question.")  # fmt: skip
@option("--shots_file", type=INPUT_FILE, help="Where examples come from.  [default: the other questions]")
@option("--prompt", default="Question: {question}\\nAnswer:", help="Text of a question; \\n is a new line.")
@option("--chat", "is_chat", is_flag=True, help="Ask through the chat template.")
@option("--extract", default="", help="Regular expression; the last match of an answer counts, its first group if it "
        "has one.  [default: all of it]")  # fmt: skip
@option("--ignore_case", is_flag=True, help="Compare without case.")
@option("--max_tokens", type=click.IntRange(1), default=DEFAULT_NUM_TOKENS, help="Most new tokens of an answer.")
@option("--stop", multiple=True, help="Text that ends an answer; \\n is a new line; repeatable.  [default: \\n, and "
        "none with --chat]")  # fmt: skip
@option("--limit", type=click.IntRange(0), default=0, help="Questions from the beginning; 0 is all.")
@_common
@llm_options
@click.pass_context
def exact_match(ctx: click.Context, model: str | None, questions: Path | None, **given: Any) -> None:
    """Ask MODEL the questions of a JSON-lines file, greedily, and compare its answers as strings.

    A line is {"question": TEXT, "answer": TEXT or a list of TEXTs that are right}. White space is compared as one
    space. With --against: McNemar's exact test, and a paired bootstrap interval of the difference.
    """
    from headrace.eval.compare import compare_means, mean_interval
    from headrace.eval.exact import Asking, measure_exact_match, read_items
    from headrace.eval.result import Metric

    if questions is None:
        raise click.UsageError("which questions? give MODEL and then the file QUESTIONS")
    stop = tuple(_unescaped(each) for each in given["stop"]) or (() if given["is_chat"] else ("\n",))
    asking = Asking(
        prompt=_unescaped(given["prompt"])
        if not given["is_chat"] or given["prompt"] != Asking.prompt
        else "{question}",
        num_shots=given["num_shots"],
        is_chat=given["is_chat"],
        max_tokens=given["max_tokens"],
        stop=stop,
        extract=given["extract"],
        ignores_case=given["ignore_case"],
    )
    asked = read_items(questions)
    shots = read_items(given["shots_file"]) if given["shots_file"] else asked
    asked = asked[: given["limit"] or None]

    def measure(opened: Model) -> list[Answered]:
        return measure_exact_match(opened, asked, asking, shots=shots)

    def metrics(found: list[Answered]) -> list[Metric]:
        values = [float(each.is_right) for each in found]
        low, high = mean_interval(values)
        mean = sum(values) / len(values)
        return [Metric(name="exact_match", value=mean, low=low, high=high, num_items=len(values))]

    def compare(a: list[Answered], b: list[Answered]) -> list[Comparison]:
        return [compare_means("exact_match", [float(x.is_right) for x in a], [float(x.is_right) for x in b])]

    def items(found: list[Answered]) -> list[dict[str, Any]]:
        from dataclasses import asdict

        return [asdict(each) for each in found]

    from dataclasses import asdict

    task = {"questions": str(questions), **asdict(asking)}
    _run(ctx, model, "exact-match", task, given, measure=measure, metrics=metrics, compare=compare, items=items)


@evaluate.command("lm-eval", short_help="Run lm-eval's tasks (the extra eval).")
@model_argument
@option("--tasks", required=True, metavar="NAME[,NAME...]", help="lm-eval's names of tasks.")
@option("--include_path", type=click.Path(file_okay=False, exists=True, path_type=Path),
        help="Folder of task files of your own.")  # fmt: skip
@option("--num_fewshot", type=click.IntRange(0), help="Solved examples.  [default: the task's]")
@option("--limit", type=click.FloatRange(0, min_open=True), help="Items of each task; below 1 it is a share.")
@option("--apply_chat_template", is_flag=True, help="Ask through the chat template.")
@option("--max_length", type=click.IntRange(1), help="Most tokens of a window.  [default: what the model takes]")
@option("--seed", type=click.IntRange(0), default=0, help="Of lm-eval's few-shot examples.")
@_common
@llm_options
@click.pass_context
def lm_eval(ctx: click.Context, model: str | None, **given: Any) -> None:
    """Run lm-eval's tasks (the extra eval) with MODEL in this process.

    With --against: by task and metric, McNemar's exact test where all values are 0 or 1, else a paired bootstrap over
    items.
    """
    from headrace.eval.harness import require_lm_eval, run_tasks
    from headrace.eval.tasks import compare_tasks, task_items, task_metrics

    require_lm_eval()
    names = [each.strip() for each in given["tasks"].split(",") if each.strip()]
    sizes = {name: given[name] for name in ("num_fewshot", "limit", "apply_chat_template", "max_length", "seed")}

    def measure(opened: Model) -> dict[str, Any]:
        return run_tasks(opened, names, include_path=given["include_path"], **sizes)

    _run(ctx, model, "lm-eval", {"tasks": names, **sizes}, given, measure=measure, metrics=task_metrics,
         compare=compare_tasks, items=task_items)  # fmt: skip


def _run(
    ctx: click.Context,
    model: str | None,
    kind: Any,
    task: dict[str, Any],
    given: dict[str, Any],
    *,
    measure: Callable[[Model], Any],
    metrics: Callable[[Any], list[Metric]],
    compare: Callable[[Any, Any], list[Comparison]],
    items: Callable[[Any], list[dict[str, Any]]],
) -> None:
    from headrace.cli.bench_options import _check_file
    from headrace.config.show import as_dict
    from headrace.eval.result import EvalResult, Side, as_text, write_result

    if given["output"] is not None:
        _check_file(given["output"])
    found: list[Any] = []
    sides: list[Side] = []
    for resolved in _configurations(ctx, model, given["against"]):
        found.append(_measured(resolved, measure))
        settings = as_dict(resolved.args)
        sides.append(Side(model=str(resolved.args.model), settings=settings, metrics=metrics(found[-1]),
                          items=items(found[-1])))  # fmt: skip
    result = EvalResult(
        kind=kind,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"headrace": __version__},
        task=task,
        sides=sides,
        comparisons=compare(*found) if len(found) == 2 else [],
    )
    click.echo(as_text(result))
    _save(result, given["output"], write_result)


def _save(result: EvalResult, path: Path | None, write: Callable[[EvalResult, Path], None]) -> None:
    if path is not None:
        write(result, path)


def _configurations(ctx: click.Context, model: str | None, against: Path | None) -> Sequence[Resolved]:
    """A, and B where there is one; both are checked before either is opened."""
    first = resolved_from_click(ctx, model)
    if against is None:
        return [first]
    state = _state(ctx)
    state.config = str(against)
    return [first, resolved_from_click(ctx, None if _names_model(against) else model)]


def _names_model(path: Path) -> bool:
    import yaml

    try:
        settings: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # the resolver says what is wrong with it
    return isinstance(settings, dict) and "model" in settings


def _measured(resolved: Resolved, measure: Callable[[Model], Any]) -> Any:
    from headrace import log

    level = resolved.server.log_level
    was_chosen = resolved.origin("log_level") == "--log_level" or level != "info"
    log.setup(level if was_chosen else "warning")
    resolved.take_effect()
    from headrace.cli.eval_model import LlmModel
    from headrace.llm import LLM

    with LLM.from_args(resolved.args) as llm:
        return measure(LlmModel(llm))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start}): convert it") from None


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")
