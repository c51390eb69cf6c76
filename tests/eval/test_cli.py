"""`headrace eval` over a tiny random checkpoint with a byte tokenizer, against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import cli

SMALL = ["--set", "kv_cache_config.max_tokens=2048", "--max_batch_size", "8", "--engine_threads", "1",
         "--dtype", "float32"]  # fmt: skip
TEXT = "The wheel turns while the water runs; the headrace never starves it."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["eval", *map(str, arguments)])


def done(path: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    result = run(*arguments, *SMALL, "--output", path)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(path.read_text()), result.stdout


def oracle(folder: Path, text: str, *, length: int, stride: int) -> float:
    """By the definition, each token alone."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    values: list[float] = []
    for at in range(1, len(ids)):
        begin = next((begin for begin in range(0, len(ids), stride) if begin < at < begin + length), None)
        if begin is not None:
            with torch.no_grad():
                logits = network(torch.tensor([ids[begin:at]])).logits[0, -1]
            values.append(float(logits.log_softmax(-1)[ids[at]]))
    return math.exp(-sum(values) / len(values))


def test_perplexity_is_that_of_transformers(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    for method, stride in (("sliding", 7), ("blocked", 16)):
        more = ("--stride", stride) if method == "sliding" else ()
        found, shown = done(tmp_path / "o.json", "perplexity", model, text, "--length", 16, "--method", method, *more)
        metrics = {each["name"]: each["value"] for each in found["sides"][0]["metrics"]}
        assert metrics["perplexity"] == pytest.approx(oracle(model, TEXT, length=16, stride=stride), rel=1e-5)
        assert found["schema_version"] == 1 and f"{metrics['perplexity']:.4f}" in shown


def test_two_configurations(model: Path, tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "b.yml"
    text.write_text(TEXT)
    other.write_text("enable_chunked_prefill: true\nmax_num_tokens: 8\n")
    found, shown = done(tmp_path / "o.json", "perplexity", model, text, "--length", 24, "--against", other)
    (comparison,) = found["comparisons"]
    assert comparison["verdict"] == "no difference shown" and abs(comparison["difference"]) < 1e-5
    assert (
        found["sides"][1]["settings"]["max_num_tokens"] == 8 and "max_num_tokens" not in found["sides"][0]["settings"]
    )
    assert "paired bootstrap over windows" in shown


def test_exact_match(model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    asked = [{"question": question, "answer": "none"} for question in ("ab", "cd", "ef")]
    questions.write_text("".join(json.dumps(each) + "\n" for each in asked))
    common = ("exact-match", model, questions, "--max_tokens", 4, "--stop", "~~", "--prompt", "{question}")
    found, _ = done(tmp_path / "o.json", *common)
    (side,) = found["sides"]
    assert side["metrics"][0]["value"] == 0.0 and len(side["items"]) == 3
    right = [{"question": item["question"], "answer": [item["extracted"], "x"]} for item in side["items"]]
    questions.write_text("".join(json.dumps(each) + "\n" for each in right))
    found, shown = done(tmp_path / "o.json", *common, "--limit", 2)
    assert found["sides"][0]["metrics"][0]["value"] == 1.0 and "(2 items)" in shown


def test_bad_input_is_named(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert "give MODEL and then the file TEXT" in run("perplexity", model).stderr
    assert "--stride is for sliding" in run("perplexity", model, text, "--method", "blocked", "--stride", 3).stderr
    too_long = run("perplexity", model, text, "--length", 999, *SMALL)
    assert isinstance(too_long.exception, ValueError) and "--length is 999 and the model takes 127" in str(
        too_long.exception
    )
    bad = tmp_path / "b.yml"
    bad.write_text("max_batchsize: 3\n")
    assert "max_batch_size" in str(run("perplexity", model, text, "--against", bad, *SMALL).exception)
