"""A budget of reasoning without a server, on a real engine of a tiny random model whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.llm import LLM, RequestError
from headrace.params import SamplingParams
from headrace.text.tokenizer import ByteTokenizer

END = [*b"</think>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.3, eos_token_id=None, bos_token_id=None)
    path = tmp_path_factory.mktemp("bytes")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def engine(folder: Path, parser: str | None) -> LLM:
    fields: dict[str, Any] = {"dtype": "float32", "max_batch_size": 4, "engine_threads": 1,
                              "tokenizer": ByteTokenizer(), "kv_cache_config": {"max_tokens": 512}}  # fmt: skip
    return LLM.from_args(LlmArgs.model_validate({"model": str(folder), "reasoning_parser": parser, **fields}))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder, "deepseek_r1") as found:
        yield found


def ids(llm: LLM, prompt: Any, **params: Any) -> list[list[int]]:
    fields: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, **params}
    output = llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)
    assert not isinstance(output, list)
    return [choice.token_ids for choice in output.outputs]


def test_exactly_so_many_tokens_then_the_marker(llm: LLM) -> None:
    free = ids(llm, "a<think>")[0]
    assert END not in [free[at : at + 8] for at in range(12)], "the marker must not come by itself here"
    for budget in (0, 3):
        (capped,) = ids(llm, "a<think>", thinking_token_budget=budget)
        assert capped[:budget] == free[:budget] and capped[budget : budget + 8] == END and len(capped) == 20
    assert ids(llm, [*b"a<think>"], thinking_token_budget=3)[0][3:11] == END
    for choice in ids(llm, "a<think>", thinking_token_budget=2, n=2, temperature=1.0, seed=1):
        assert choice[2:10] == END
    closed = "a<think></think>"
    assert ids(llm, closed, thinking_token_budget=3) == ids(llm, closed), "no reasoning is open"


def test_a_stream_and_another_tokenizer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, thinking_token_budget=3)
    streamed: list[int] = []
    for step in llm.generate_async("a<think>", params, streaming=True):
        streamed += step.outputs[0].token_ids_diff
    assert streamed == ids(llm, "a<think>", thinking_token_budget=3)[0]
    llm.tokenizer = ByteTokenizer()
    assert ids(llm, "a<think>", thinking_token_budget=3)[0] == streamed


def test_budgets_that_can_not_be_kept(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match="leave nothing of 11 tokens") as error:
        ids(llm, "a<think>", thinking_token_budget=3, max_tokens=11)
    assert error.value.param == "thinking_token_budget"
    with pytest.raises(RequestError, match="beam search"):
        ids(llm, "a<think>", thinking_token_budget=3, use_beam_search=True)
    with pytest.raises(RequestError, match="out of the vocabulary"):
        ids(llm, [5, 4000], thinking_token_budget=3)
    for parser in (None, "auto"):  # nothing in this folder tells how it reasons
        with engine(folder, parser) as plain, pytest.raises(RequestError, match="give the LLM a reasoning_parser"):
            ids(plain, "a<think>", thinking_token_budget=3)
    with pytest.raises(ValueError, match="reasoning_parser: 'no_such' is not known; known: auto, "):
        engine(folder, "no_such")
