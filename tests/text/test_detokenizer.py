from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from headrace.text.detokenizer import Detokenizer
from headrace.text.load import load_tokenizer
from headrace.text.tokenizer import ByteTokenizer, Tokenizer
from tests.text import tiny_tokenizers
from tests.text.corpus import CORPUS

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": ByteTokenizer,
    "byte-level": cache(tiny_tokenizers.byte_level),
    "byte-level with odd tokens": cache(lambda: tiny_tokenizers.byte_level(odd=True)),
    "sentencepiece": cache(tiny_tokenizers.sentencepiece_tokenizer),
    "sentencepiece without prefix": cache(
        lambda: tiny_tokenizers.sentencepiece_tokenizer(**{"tokenizer.ggml.add_space_prefix": False})
    ),
    "metaspace": cache(tiny_tokenizers.metaspace),
    "words": cache(tiny_tokenizers.words),
    "word pieces": cache(lambda: tiny_tokenizers.words(decoders.WordPiece(cleanup=False))),
}
EXACT_KINDS = [kind for kind in KINDS if not kind.startswith("word")]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=250)
@given(data=st.data(), skip=st.booleans())
def test_deltas_join_to_the_whole_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    check_law(tokenizer, ids, data.draw(cuts(len(ids))), skip)


@pytest.mark.parametrize("kind", EXACT_KINDS)
@settings(max_examples=250)
@given(data=st.data(), skip=st.booleans())
def test_broken_and_multibyte_sequences(kind: str, data: st.DataObject, skip: bool) -> None:
    """Ids that are single bytes, mostly of multi-byte characters, with a few others between."""
    tokenizer = KINDS[kind]()
    by_byte = byte_ids(tokenizer)
    some_bytes = st.sampled_from([*"é日😀".encode(), 0xC0, 0xED, 0xA0, 0xF4, 0x90, 0xFF, 0x41])
    encoded = st.sampled_from(["é", "日本", "😀", "\ufffd"]).map(lambda text: [by_byte[byte] for byte in text.encode()])
    one = st.one_of(
        some_bytes.map(lambda byte: [by_byte[byte]]), encoded, st.integers(0, tokenizer.vocab_size).map(lambda i: [i])
    )
    ids = [i for part in data.draw(st.lists(one, max_size=20)) for i in part]
    check_law(tokenizer, ids, data.draw(cuts(len(ids))), skip)


@pytest.mark.parametrize("kind", EXACT_KINDS)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_real_texts(kind: str, step: int) -> None:
    tokenizer = KINDS[kind]()
    for text in CORPUS:
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            for skip in (True, False):
                check_law(tokenizer, ids, list(range(step, len(ids), step)), skip)


def check_law(tokenizer: Tokenizer, ids: Sequence[int], splits: Sequence[int], skip: bool) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    bounds = [0, *splits, len(ids)]
    deltas = [detokenizer.push(ids[start:stop]) for start, stop in pairwise(bounds)]
    deltas.append(detokenizer.flush())
    assert "".join(deltas) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in delta for delta in deltas)


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, length), max_size=length).map(sorted)


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Id of each single byte's token. Metaspace's decoder has no byte tokens, but the ids are the same."""
    found: dict[int, int] = {}
    for token_id in range(tokenizer.vocab_size):
        token, raw = tokenizer.token(token_id), tokenizer.token_bytes(token_id)
        if token is not None and token.startswith("<0x") and len(token) == 6:
            found.setdefault(int(token[3:5], 16), token_id)
        elif raw is not None and len(raw) == 1 and tokenizer.decode_rule and tokenizer.decode_rule.kind == "bytes":
            found.setdefault(raw[0], token_id)
    assert len(found) == 256
    return found


def test_text_comes_out_as_soon_as_it_is_certain() -> None:
    for kind in ("bytes", "byte-level"):
        tokenizer = KINDS[kind]()
        by_byte = byte_ids(tokenizer)
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.push([by_byte[byte]]) for byte in "é日a".encode()] == ["", "é", "", "", "日", "a"]
        assert detokenizer.push([by_byte[0xE6]]) == ""
        assert detokenizer.push([by_byte[0x41]]) == "\ufffdA", "an impossible character is known at once"
        assert detokenizer.push([by_byte[0xE6]]) == ""
        assert detokenizer.flush() == "\ufffd"

    tokenizer = KINDS["sentencepiece"]()
    by_byte = byte_ids(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    the = next(i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == "▁the")
    assert detokenizer.push([the]) == "the"
    assert detokenizer.push([the]) == " the"
    assert [detokenizer.push([by_byte[byte]]) for byte in "é".encode()] == ["", ""]
    assert detokenizer.push([the]) == "é the"


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_token_does_not_grow_with_the_output(kind: str) -> None:
    """Eight times the tokens may take up to twenty times as long; recomputing the text would take sixty-four."""
    tokenizer = KINDS[kind]()
    assert seconds_for(tokenizer, 16_000) < 20 * max(seconds_for(tokenizer, 2_000), 0.005)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
def test_a_long_run_of_undecided_bytes_costs_no_more(kind: str) -> None:
    tokenizer = KINDS[kind]()
    start = time.perf_counter()
    detokenizer = Detokenizer(tokenizer)
    lone = byte_ids(tokenizer)[0xE6]
    for _ in range(20_000):
        detokenizer.push([lone])
    detokenizer.flush()
    assert time.perf_counter() - start < 5


def seconds_for(tokenizer: Tokenizer, num_tokens: int) -> float:
    best = float("inf")
    for _ in range(2):
        detokenizer = Detokenizer(tokenizer)
        start = time.process_time()
        for i in range(num_tokens):
            detokenizer.push([i % tokenizer.vocab_size])
        detokenizer.flush()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m"])
def test_real_tokenizers(alias: str) -> None:
    tokenizer = load_tokenizer(alias)
    special = sorted(tokenizer.special_ids)[:40]

    @settings(max_examples=500)
    @given(data=st.data(), skip=st.booleans())
    def law(data: st.DataObject, skip: bool) -> None:
        one = st.one_of(st.integers(0, tokenizer.vocab_size), st.integers(0, 600), st.sampled_from(special))
        ids = data.draw(st.lists(one, max_size=60))
        check_law(tokenizer, ids, data.draw(cuts(len(ids))), skip)

    law()
    for text in CORPUS:
        ids = tokenizer.encode(text)
        check_law(tokenizer, ids, range(1, len(ids)), True)
        check_law(tokenizer, ids, range(1, len(ids)), False)
