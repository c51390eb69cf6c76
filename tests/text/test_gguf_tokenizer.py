from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from headrace.hub.config import eos_token_ids, read_config
from headrace.hub.errors import ModelError
from headrace.hub.gguf import GgufFile
from headrace.hub.source import resolve_model
from headrace.text.gguf_tokenizer import build_gguf_tokenizer
from headrace.text.load import load_tokenizer
from headrace.text.template import load_chat_template
from headrace.text.tokenizer import check_vocabulary
from tests.hub.tiny_gguf import write_tiny_model
from tests.text.corpus import CORPUS, OTHER_NUMERALS
from tests.text.tiny_tokenizers import (
    byte_level_backend,
    sentencepiece_metadata,
    sentencepiece_model,
    sentencepiece_tokenizer,
)


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """What a converter would write of the tiny byte-level tokenizer."""
    import json

    backend = byte_level_backend()
    state = json.loads(backend.to_str())
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": backend.token_to_id("<s>"),
        "tokenizer.ggml.eos_token_id": backend.token_to_id("</s>"),
        **changes,
    }


def test_byte_level_equals_the_tokenizer_it_was_written_from() -> None:
    backend = byte_level_backend()
    ours = build_gguf_tokenizer(byte_level_metadata(), architecture="llama")
    assert ours.vocab_size == backend.get_vocab_size() and ours.is_fast
    assert ours.special_ids == {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    for text in CORPUS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_bos_and_eos_follow_the_file() -> None:
    bos, eos = byte_level_backend().token_to_id("<s>"), byte_level_backend().token_to_id("</s>")
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ours = build_gguf_tokenizer(byte_level_metadata(**flags), architecture="llama")
    plain = build_gguf_tokenizer(byte_level_metadata(), architecture="llama").encode("hi")
    assert ours.encode("hi") == [bos, *plain, eos]
    assert ours.encode("hi", add_special_tokens=False) == plain
    assert (ours.bos_id, ours.eos_ids) == (bos, {eos})
    llama3 = build_gguf_tokenizer(byte_level_metadata(**{"tokenizer.ggml.pre": "llama-bpe"}), architecture="llama")
    assert llama3.encode("hi")[0] == bos


# The published patterns, as the models' own tokenizer files spell them.
PUBLISHED = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_words_are_split_as_the_file_names(name: str) -> None:
    ours = build_gguf_tokenizer(byte_level_metadata(**{"tokenizer.ggml.pre": name}), architecture="llama")
    published = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PUBLISHED[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert ours.backend.pre_tokenizer is not None
    for text in CORPUS:
        assert ours.backend.pre_tokenizer.pre_tokenize_str(text) == published.pre_tokenize_str(text)


def test_smollm_splits_each_digit() -> None:
    ours = build_gguf_tokenizer(byte_level_metadata(**{"tokenizer.ggml.pre": "smollm"}), architecture="llama")
    assert ours.backend.pre_tokenizer is not None
    split = [word for word, _ in ours.backend.pre_tokenizer.pre_tokenize_str("on 2024")]
    assert split == ["on", "Ġ", "2", "0", "2", "4"]


def test_sentencepiece_equals_sentencepiece() -> None:
    model = sentencepiece_model()
    ours = sentencepiece_tokenizer()
    assert ours.vocab_size == model.get_piece_size()
    for text in CORPUS:
        if any(mark in text for mark in ("<|im_", "<s>", "</s>", "<unk>")):
            continue  # sentencepiece takes control tokens in text for letters
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == model.encode(text), text
        assert ours.decode(ids) == model.decode(ids)
        assert ours.encode(text) == [model.bos_id(), *ids]


def test_control_tokens_in_text_are_whole() -> None:
    ours = sentencepiece_tokenizer()
    ids = ours.encode("<|im_start|>user", add_special_tokens=False)
    assert ours.token(ids[0]) == "<|im_start|>"
    assert ours.decode(ids, skip_special_tokens=False).startswith("<|im_start|>")
    assert "<|im_start|>" not in ours.decode(ids)
    assert ours.encode("<0x0A>", add_special_tokens=False) != ours.encode("\n", add_special_tokens=False)


def test_without_a_space_prefix() -> None:
    ours = sentencepiece_tokenizer(**{"tokenizer.ggml.add_space_prefix": False})
    for text in ("the", " the", "x  y"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
    first = ours.token(ours.encode("the", add_special_tokens=False)[0])
    assert first is not None and not first.startswith("▁")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "martian"}, "'martian' is not known"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "no vocabulary"),
        ({"tokenizer.ggml.scores": [0.0]}, "no scores"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token is id 1000000"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["no such"]}, "damaged"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        build_gguf_tokenizer(sentencepiece_metadata(**changes), architecture="llama")
    assert "\n" not in str(error.value)


def test_the_path_of_the_file_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m.gguf", "llama")
    with pytest.raises(ModelError, match=f"{tmp_path}/m.gguf: the file has no vocabulary"):
        load_tokenizer(str(tmp_path / "m.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m"])
def test_real_tokenizers_equal_transformers(alias: str) -> None:
    from transformers import TokenizersBackend

    source = resolve_model(alias)
    ours = load_tokenizer(source)
    theirs = TokenizersBackend.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, {theirs.eos_token_id})
    assert ours.vocab_size == len(theirs)
    for text in CORPUS:
        if alias == "smollm2" and text == OTHER_NUMERALS:
            # transformers forgets that this model splits digits of every script; with its real split it agrees.
            theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.slow
def test_smollm2_by_alias_gives_everything_a_server_needs() -> None:
    source = resolve_model("smollm2")
    config = read_config(source)
    tokenizer = load_tokenizer(source)
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 30
    assert check_vocabulary(tokenizer, config) == config["vocab_size"] == 49152
    assert eos_token_ids(source, tokenizer, vocab_size=config["vocab_size"]) == {2}
    template = load_chat_template(source, special_tokens=tokenizer.special_tokens)
    prompt = template.render([{"role": "user", "content": "What is a headrace?"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_id and tokenizer.decode(ids, skip_special_tokens=False) == prompt
    weights = {tensor.name: tensor.shape for tensor in GgufFile(source.path).tensors()}
    assert len(weights) == 2 + 30 * 9
    assert weights["model.embed_tokens.weight"] == (49152, 576)
    assert weights["model.layers.29.mlp.down_proj.weight"] == (576, 1536)
    num_parameters = sum(tensor.load().size for tensor in GgufFile(source.path).tensors())
    assert num_parameters == 134_515_008
