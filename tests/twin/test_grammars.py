"""Constrained sequences through the real runtime: what comes is what was asked for, however the steps are cut.

The checkpoint is random and sampled hot, so that every token which the masks let pass comes sooner or later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from headrace.runtime.core import Core
from headrace.text.tokenizer import Tokenizer
from headrace.types import Delta, Grammar, Request, Sampling
from tests.text.tiny_tokenizers import byte_level, byte_level_backend
from tests.twin.harness import open_runtime, request, run

TAIL = 23
"""Rows of the embedding that no token of the tokenizer is."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "bc", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    backend = byte_level_backend()
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size() + TAIL,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def opened(folder: Path) -> Iterator[Any]:
    cores: list[Core] = []

    def make(**changes: Any) -> Core:
        cores.append(open_runtime(folder, skip_tokenizer_init=False, **changes))
        return cores[-1]

    yield make
    for core in cores:
        core.engine.close()


def grammar(kind: Any, spec: Any = "", **changes: Any) -> Grammar:
    return Grammar(kind=kind, spec=spec if isinstance(spec, str) else json.dumps(spec), **changes)


def asked(request_id: int, given: Grammar | None, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "sampling": Sampling(temperature=1.0, seed=request_id),
        "max_tokens": 60,
        "stop_ids": (1,),
        "grammar": given,
        **changes,
    }
    return request(request_id, [5 + request_id % 7, 9, 11, 30, 31, 32, 33, 34, 35][: 3 + request_id % 7], **fields)


def text_of(tokenizer: Tokenizer, deltas: list[Delta]) -> tuple[str, str | None]:
    """The text and how it ended."""
    assert not deltas[-1].error, deltas[-1]
    tokens = [token for delta in deltas for token in delta.tokens]
    return tokenizer.decode(tokens), deltas[-1].finish


def mixed() -> list[Request]:
    """Eight grammars and two free ones side by side."""
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    given = [
        grammar("json_schema", SCHEMA),
        grammar("regex", "[0-9]{3}-[a-f]{2,5}"),
        grammar("choice", ["yes", "no", "não"]),
        grammar("ebnf", 'root ::= "(" root ")" | [0-9]+'),
        None,
        grammar("json_schema", {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}),
        grammar(
            "structural_tag",
            {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [tag],
                "at_least_one": True,
                "stop_after_first": True,
            },
        ),
        grammar("json_object"),
        None,
        grammar("json_schema", {"type": "integer", "minimum": 0, "maximum": 9}),
    ]
    return [asked(index, each) for index, each in enumerate(given)]


def check_mixed(tokenizer: Tokenizer, got: dict[int, list[Delta]]) -> int:
    """-> how many constrained sequences ended by themselves"""
    checks = {
        0: lambda text: jsonschema.validate(json.loads(text), SCHEMA),
        1: lambda text: _match("[0-9]{3}-[a-f]{2,5}", text),
        2: lambda text: _match("yes|no|não", text),
        3: lambda text: _match(r"(\()*[0-9]+(\))*", text),
        5: lambda text: _match(r"\[\s*(true|false)\s*(,\s*(true|false)\s*)?\]", text),
        6: lambda text: jsonschema.validate(json.loads(_between(text, "<f>", "</f>")), SCHEMA),
        7: lambda text: isinstance(json.loads(text), dict) or pytest.fail(text),
        9: lambda text: _match("[0-9]", text),
    }
    num_stopped = 0
    for key, check in checks.items():
        text, finish = text_of(tokenizer, got[key])
        if finish == "stop":
            check(text)
            num_stopped += 1
        assert finish in ("stop", "length")
    return num_stopped


def _match(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def _between(text: str, begin: str, end: str) -> str:
    assert text.startswith(begin) and text.endswith(end), text
    return text[len(begin) : -len(end)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    """Each request alone, one plan at a time."""
    core = open_runtime(
        folder, skip_tokenizer_init=False, disable_overlap_scheduler=True, kv_cache_config={"enable_block_reuse": False}
    )
    try:
        return {each.id: _tokens(run(core, [each])[each.id]) for each in mixed()}
    finally:
        core.engine.close()


def _tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"disable_overlap_scheduler": True},
        {"enable_chunked_prefill": True, "max_num_tokens": 13, "max_batch_size": 8},
        {"kv_cache_config": {"max_tokens": 160}, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
    ],
    ids=["overlap", "no_overlap", "chunked", "preempted"],
)
def test_the_same_however_it_runs(
    opened: Any, alone: dict[int, list[int]], tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    got = run(opened(**changes), mixed(), stagger=2)
    assert check_mixed(tokenizer, got) >= 4
    assert {key: _tokens(deltas) for key, deltas in got.items()} == alone


@pytest.mark.slow
def test_two_ranks_agree(opened: Any, alone: dict[int, list[int]]) -> None:
    got = run(opened(tensor_parallel_size=2), mixed())
    assert {key: _tokens(deltas) for key, deltas in got.items()} == alone


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_hot_output_validates(opened: Any, tokenizer: Tokenizer, backend: str) -> None:
    """Both libraries, many seeds: what ends by itself is valid, what is cut off is a beginning."""
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    core = opened(guided_decoding_backend=backend)
    got = run(core, [asked(index, grammar("json_schema", SCHEMA), max_tokens=80) for index in range(24)])
    endings = [text_of(tokenizer, deltas) for deltas in got.values()]
    valid = [json.loads(text) for text, finish in endings if finish == "stop"]
    for document in valid:
        jsonschema.validate(document, SCHEMA)
    assert len(valid) >= 3
    assert all(text.lstrip().startswith("{") for text, _ in endings if text)


def test_ends_minimum_and_stops(opened: Any, tokenizer: Tokenizer) -> None:
    core = opened()
    nine = grammar("regex", "[0-9]{9}")
    some = grammar("regex", "[a-z]*")
    x = tokenizer.encode("x", add_special_tokens=False)[0]
    got = run(
        core,
        [
            asked(0, nine, stop_ids=()),  # EOS is ignored: nothing but it is left to come
            asked(1, nine, min_tokens=40),  # the grammar ends first
            asked(2, some, min_tokens=20, max_tokens=200),
            asked(3, nine, max_tokens=4),
            asked(4, some, stop_ids=(1, x), max_tokens=200, sampling=Sampling(temperature=1.0, logit_bias={x: 20.0})),
            asked(5, nine, sampling=Sampling(logit_bias={1: 1000.0})),  # an end that is not allowed yet
            asked(6, nine, sampling=Sampling(logprobs=2, temperature=1.0, seed=4)),
        ],
    )
    text, finish = text_of(tokenizer, got[0])
    assert re.fullmatch("[0-9]{9}", text) and finish == "length" and _tokens(got[0])[-1] == 1
    assert re.fullmatch("[0-9]{9}", text_of(tokenizer, got[1])[0]) and got[1][-1].finish == "stop"
    assert len(_tokens(got[2])) > 20 and re.fullmatch("[a-z]*", text_of(tokenizer, got[2])[0])
    assert re.fullmatch("[0-9]{1,9}", text_of(tokenizer, got[3])[0]) and got[3][-1].finish == "length"
    assert got[4][-1].finish == "stop" and _tokens(got[4])[-1] == x
    for key in (5, 6):
        assert re.fullmatch("[0-9]{9}", text_of(tokenizer, got[key])[0])
    values = [value for delta in got[6] for entry in delta.logprobs for value in entry.values]
    assert values and all(value > -1e9 for value in values)  # the model's own, not the masked ones


def test_the_grammar_waits_for_the_end_of_the_reasoning(opened: Any, tokenizer: Tokenizer) -> None:
    """A bias makes the marker come; the text before it is free, but it can't end."""
    mark = tuple(tokenizer.encode("ab", add_special_tokens=False))
    given = grammar("regex", "[0-9]{4}", starts_after=tuple((token,) for token in mark))
    hot = Sampling(temperature=1.0, seed=3, logit_bias={**dict.fromkeys(mark, 9.0), 1: 9.0})
    got = run(opened(), [asked(0, given, sampling=hot, max_tokens=400), asked(1, given, max_tokens=6)])
    text, finish = text_of(tokenizer, got[0])
    before, found, after = text.partition("ab")
    assert found and finish == "stop" and re.fullmatch("[0-9]{4}", after) and not before.isdigit()
    assert _tokens(got[0]).count(1) == 1
    assert text_of(tokenizer, got[1])[1] == "length"


def test_faults_are_one_requests_own(opened: Any, tokenizer: Tokenizer) -> None:
    """What can't be compiled, and what rules out every token; the others go on."""
    core = opened()
    digits = tuple((token,) for token in range(600) if re.search("[0-9]", tokenizer.token(token) or ""))
    got = run(
        core,
        [
            asked(0, grammar("regex", "[0-9]{9}")),
            asked(1, grammar("regex", "(", param="guided_regex")),
            asked(2, grammar("ebnf", "start: <nobody>", param="response_format")),
            asked(3, grammar("regex", "[0-9]{9}"), sampling=Sampling(bad_words=digits)),
            asked(4, grammar("regex", "(", param="guided_decoding")),
        ],
    )
    assert re.fullmatch("[0-9]{9}", text_of(tokenizer, got[0])[0])
    for key, param in ((1, "guided_regex"), (2, "response_format"), (4, "guided_decoding")):
        (only,) = got[key]
        assert only.finish == "error" and only.param == param and only.error and not only.tokens
    assert (
        got[3][-1].finish == "error"
        and "no token is left" in got[3][-1].error
        and got[3][-1].param
        and not _tokens(got[3])
    )


def test_special_tokens_of_a_tag(opened: Any, tokenizer: Tokenizer) -> None:
    """Their spelling means the token, which no text matches."""
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("<|im_start|>", "<|im_end|>"))
    tag = {
        "type": "tag",
        "begin": "<|im_start|>call:",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "<|im_end|>",
    }
    got = run(opened(), [asked(index, grammar("structural_tag", tag), max_tokens=120) for index in range(4)])
    for deltas in got.values():
        tokens = _tokens(deltas)
        assert tokens[0] == start[0]
        if deltas[-1].finish == "stop":
            assert tokens[-2:] == [end[0], 1]
            jsonschema.validate(json.loads(tokenizer.decode(tokens).removeprefix("call:")), SCHEMA)
