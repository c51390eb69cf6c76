from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from headrace.hub.errors import ModelError
from headrace.hub.source import resolve_model
from headrace.text.byte_level import BYTE_OF_CHARACTER, CHARACTER_OF_BYTE, bytes_of_token
from headrace.text.detokenizer import Detokenizer
from headrace.text.load import load_tokenizer
from headrace.text.slow_tokenizer import from_transformers
from headrace.text.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, encode_prompt
from tests.text.corpus import CORPUS
from tests.text.tiny_tokenizers import byte_level, byte_level_backend, sentencepiece_tokenizer, words


def save(folder: Path, config: dict[str, Any] | None = None, special: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


@pytest.mark.parametrize("make", [ByteTokenizer, byte_level, sentencepiece_tokenizer])
def test_decoding_what_was_encoded_gives_the_text(make: Any) -> None:
    tokenizer: Tokenizer = make()
    for text in CORPUS:
        if make is sentencepiece_tokenizer and any(mark in text for mark in "▁<"):
            continue  # the mark is a space to it, and it adds a space after each control token
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("make", [ByteTokenizer, byte_level, sentencepiece_tokenizer])
def test_token_bytes_join_to_the_text(make: Any) -> None:
    tokenizer: Tokenizer = make()
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in ids)
        prefix = b" " if make is sentencepiece_tokenizer and text else b""
        if not any(mark in text for mark in "▁<"):
            assert joined == prefix + text.encode()
    for beyond in (tokenizer.vocab_size, tokenizer.vocab_size + 5, -1):
        assert tokenizer.token_bytes(beyond) is None and tokenizer.token(beyond) is None


def test_the_byte_alphabet_is_a_bijection() -> None:
    assert len(set(CHARACTER_OF_BYTE)) == 256 == len(BYTE_OF_CHARACTER)
    assert (CHARACTER_OF_BYTE[32], CHARACTER_OF_BYTE[10], CHARACTER_OF_BYTE[65]) == ("Ġ", "Ċ", "A")
    assert set(CHARACTER_OF_BYTE) == set(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    assert bytes_of_token("Ġthe") == b" the" and bytes_of_token("a b") == b"a b"


@pytest.mark.parametrize("make", [ByteTokenizer, byte_level, sentencepiece_tokenizer])
def test_lone_surrogates_are_a_value_error(make: Any) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        make().encode("ab\ud800")


def test_a_folder_without_transformers_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = byte_level_backend()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|im_start|>"]
    )
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, {theirs.eos_token_id})
    assert ours.is_fast and ours.vocab_size == len(theirs)
    for text in CORPUS:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_loading_a_folder_does_not_import_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    save(tmp_path, {"bos_token": "<s>"})
    code = (
        "import sys; from headrace.text.load import load_tokenizer; from headrace.text import stream, template;"
        f"load_tokenizer({str(tmp_path)!r}).encode('hi'); print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_bos_and_eos_are_added_as_the_config_says(tmp_path: Path) -> None:
    flags = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    plain = byte_level().encode("hi")
    bos, eos = byte_level_backend().token_to_id("<s>"), byte_level_backend().token_to_id("</s>")
    assert load_tokenizer(save(tmp_path, flags)).encode("hi") == plain
    both = load_tokenizer(save(tmp_path, {**flags, "add_bos_token": True, "add_eos_token": True}))
    assert both.encode("hi") == [bos, *plain, eos]
    assert both.encode("hi", add_special_tokens=False) == plain
    assert (both.bos_id, both.eos_ids) == (bos, frozenset({eos}))
    assert dict(both.special_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_roles_come_from_both_files_and_the_config_wins(tmp_path: Path) -> None:
    special = {"bos_token": "</s>", "eos_token": {"content": "</s>"}, "pad_token": "<no such token>"}
    tokenizer = load_tokenizer(save(tmp_path, {"bos_token": "<s>"}, special))
    assert dict(tokenizer.special_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    backend = byte_level_backend()
    next_id = backend.get_vocab_size()
    one, two = next_id - 1, next_id - 2
    added = {
        str(next_id): {"content": "<new>", "special": True, "normalized": False},
        str(one): {"content": backend.id_to_token(one), "special": False},
    }
    config = {"added_tokens_decoder": added, "additional_special_tokens": [backend.id_to_token(two), "<none>"]}
    tokenizer = load_tokenizer(save(tmp_path, config))
    assert tokenizer.encode("a<new>b")[1] == next_id
    assert tokenizer.vocab_size == next_id + 1
    assert {next_id, two} <= tokenizer.special_ids and one not in tokenizer.special_ids


def test_files_that_disagree_about_an_id_are_fatal(tmp_path: Path) -> None:
    added = {"9000": {"content": "<s>", "special": True}}
    with pytest.raises(ModelError, match=r"gives '<s>' the id 9000, tokenizer\.json"):
        load_tokenizer(save(tmp_path, {"added_tokens_decoder": added}))


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    path.write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).encode("a longer text here") == byte_level().encode("a longer text here")


def test_damaged_and_missing_files_are_one_line(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    empty = tmp_path / "model"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(resolve_model(str(empty)))


def test_python_tokenizers_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.ByT5Tokenizer()
    theirs.save_pretrained(tmp_path)
    for mode in ("auto", "slow"):
        ours = load_tokenizer(tmp_path, mode=mode)
        assert not ours.is_fast and ours.decode_rule is None
        assert ours.eos_ids == {theirs.eos_token_id} and ours.bos_id is None
        assert ours.vocab_size == len(theirs)
        for text in ("Hello", "日本 é", ""):
            ids = theirs.encode(text)
            assert ours.encode(text) == ids
            assert ours.decode([*ids, 10**6]) == text
        assert ours.token_bytes(theirs.encode("a")[0]) == b"a"


def test_a_tokenizer_object_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<s>", eos_token="</s>", truncation_side="left"
    )
    theirs.backend_tokenizer.enable_truncation(3)
    fast, slow = from_transformers(theirs), from_transformers(theirs, use_fast=False)
    assert (fast.is_fast, slow.is_fast) == (True, False)
    assert theirs.backend_tokenizer.truncation is not None, "the caller's object stays as it was"
    theirs.backend_tokenizer.no_truncation()
    for tokenizer in (fast, slow):
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (theirs.bos_token_id, {theirs.eos_token_id})
        for text in CORPUS:
            ids = theirs.encode(text)
            assert tokenizer.encode(text) == ids
            detokenizer = Detokenizer(tokenizer)
            streamed = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
            assert streamed == theirs.decode(ids, skip_special_tokens=True)


def test_a_raw_prompt_never_gets_two_bos() -> None:
    """behaviours.md row 100"""
    tokenizer = sentencepiece_tokenizer()
    bos = tokenizer.bos_id
    assert bos is not None
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert encode_prompt(tokenizer, "Hello", add_special_tokens=True) == [bos, *plain]
    with_text_bos = encode_prompt(tokenizer, "<s>Hello", add_special_tokens=True)
    assert with_text_bos[0] == bos and with_text_bos.count(bos) == 1
    assert encode_prompt(tokenizer, "<s>Hello", add_special_tokens=False) == with_text_bos
    assert encode_prompt(tokenizer, "<s><s>x", add_special_tokens=True)[:3].count(bos) == 2, "the user's own stay"
    assert encode_prompt(tokenizer, "", add_special_tokens=True) == [bos]


def test_sizes_are_checked_against_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """behaviours.md rows 31 and 127"""
    tokenizer = byte_level()
    size = tokenizer.vocab_size
    assert check_vocabulary(tokenizer, {"vocab_size": size}) == size
    assert check_vocabulary(tokenizer, {"vocab_size": size + 64}) == size, "padded rows"
    assert check_vocabulary(tokenizer, {"text_config": {"vocab_size": size}}) == size
    with pytest.raises(ModelError, match=f"ids up to {size - 1} and the model's vocabulary has {size - 1} ids"):
        check_vocabulary(tokenizer, {"vocab_size": size - 1})
    with pytest.raises(ModelError, match="no vocab_size"):
        check_vocabulary(tokenizer, {})

    other = words()
    rows = other.vocab_size
    other.backend.add_special_tokens([AddedToken("<image>", special=True)])
    wider = type(other)(other.backend, special_tokens={})
    assert wider.vocab_size == rows + 1
    assert check_vocabulary(wider, {"vocab_size": rows}) == rows
    assert "<image>" in caplog.text


def test_ids_with_holes_count_to_the_highest() -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    holes = type(byte_level())(backend, special_tokens={})
    assert holes.vocab_size == 8
    assert holes.token(3) is None and holes.token_bytes(3) is None
