"""lm-eval over our engine: the adapter with a fake, and SmolLM2 against lm-eval's own Hugging Face backend."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.eval.harness import require_lm_eval, run_tasks
from tests.eval.fake import FakeModel, logprob_of

FACTS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "a river"], "label": 0,
     "text": "Once upon a time there was a king who lived in a castle near the sea."},
    {"question": "Water at one hundred degrees", "choices": ["sings", "boils"], "label": 1,
     "text": "The mill wheel turns when the water comes down the channel, and the stones grind the corn."},
]  # fmt: skip
TASKS = {
    "toy_choice": {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{label}}",
                   "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]},
    "toy_rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                    "metric_list": [{"metric": "word_perplexity"}]},
    "toy_until": {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "x",
                  "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
                  "metric_list": [{"metric": "exact_match"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of local tasks."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "facts.jsonl"
    data.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    for name, fields in TASKS.items():
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test", **fields}  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # YAML takes JSON
    return folder


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """What the model gave for each request of each item, in order."""
    return [sample["resps"] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]


def test_requests_become_spans_and_prompts(tasks: Path) -> None:
    model = FakeModel(lambda prompt: f"<{prompt}>")
    found = run_tasks(model, ["toy_choice", "toy_until"], include_path=tasks)
    (first, *_), _ = responses(found, "toy_choice")
    context, choice = model.encode("The capital of France is"), list(b" Paris")
    expected = sum(logprob_of([*context, *choice[:at]], token) for at, token in enumerate(choice))
    assert float(first[0][0]) == pytest.approx(expected)
    assert model.prompts == [f"<bos>{fact['question']}" for fact in FACTS]
    assert model.wanted[0].stop == (".",) and model.wanted[0].max_tokens == 8


def test_what_lm_eval_does_not_know_is_named(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--tasks: lm-eval has no task toy_nothing"):
        run_tasks(FakeModel(), ["toy_choice", "toy_nothing"], include_path=tasks)
    with pytest.raises(ValueError, match="--max_length is 64 and the model takes 63"):
        run_tasks(FakeModel(), ["toy_choice"], include_path=tasks, max_length=64)


def test_lm_eval_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'headrace\[eval\]'"):
        require_lm_eval()


@pytest.mark.slow
def test_smollm2_is_what_the_hugging_face_backend_says(tasks: Path) -> None:
    import torch
    import transformers
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from headrace.cli.eval_model import LlmModel
    from headrace.hub.source import resolve_model
    from headrace.llm import LLM

    torch.set_num_threads(1)
    length = 12  # shorter than the texts: several windows
    with LLM("smollm2", dtype="float32", max_seq_len=256, max_batch_size=8, engine_threads=1) as llm:
        ours = run_tasks(LlmModel(llm), list(TASKS), include_path=tasks, max_length=length)

    source = resolve_model("smollm2")
    folder, name = os.fspath(source.path.parent), source.path.name
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    manager = TaskManager(include_path=str(tasks))
    theirs: dict[str, Any] = {}
    for task in TASKS:
        limit = 256 if task == "toy_until" else length
        theirs |= {
            task: simple_evaluate(
                model=HFLM(pretrained=network, tokenizer=tokenizer, max_length=limit, batch_size=1),
                tasks=[task],
                task_manager=manager,
                bootstrap_iters=0,
            )
        }
    for task in ("toy_choice", "toy_rolling"):
        found, wanted = responses(ours, task), responses(theirs[task], task)
        assert len(found) == len(wanted) == len(FACTS)
        pairs = [(_value(a), _value(b)) for mine, other in zip(found, wanted) for a, b in zip(mine, other)]
        for mine, other in pairs:
            assert mine == pytest.approx(other, abs=2e-3), (task, pairs)
    flags = [[each[0][1] for each in sample] for sample in responses(ours, "toy_choice")]
    assert flags == [[each[0][1] for each in sample] for sample in responses(theirs["toy_choice"], "toy_choice")]
    assert responses(ours, "toy_until") == responses(theirs["toy_until"], "toy_until")


def _value(response: Any) -> float:
    """The log-probability in a response, which is a pair or a number in a list."""
    while isinstance(response, list | tuple):
        response = response[0]
    return float(response)
