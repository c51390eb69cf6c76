"""Small tokenizers of each kind, trained on the corpus here and now."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from headrace.text.fast_tokenizer import FastTokenizer
from headrace.text.gguf_tokenizer import build_gguf_tokenizer
from tests.text.corpus import CORPUS

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def byte_level_backend(*, odd: bool = False) -> tokenizers.Tokenizer:
    """`odd` adds tokens outside the byte alphabet, with a space, and with a character that stands for another byte."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text for text in CORPUS if "<|" not in text], trainer)
    if odd:
        backend.add_tokens([AddedToken(token, normalized=False) for token in ("<｜tool▁call｜>", "<a b>", "é")])
    return backend


def byte_level(*, odd: bool = False) -> FastTokenizer:
    return FastTokenizer(byte_level_backend(odd=odd), special_tokens=ROLES)


@cache
def sentencepiece_model() -> Any:
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in CORPUS for _ in range(3)]),
        model_writer=written,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=100_000,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """What a converter would write of the model."""
    model = sentencepiece_model()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(model.get_piece_size())
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(model.get_piece_size())],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(model.get_piece_size())],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        **changes,
    }


def sentencepiece_tokenizer(**changes: Any) -> FastTokenizer:
    return build_gguf_tokenizer(sentencepiece_metadata(**changes), architecture="llama")


def metaspace() -> FastTokenizer:
    """The decoder of older tokenizer.json files."""
    backend = sentencepiece_tokenizer().backend
    backend.decoder = decoders.Metaspace()
    return FastTokenizer(backend, special_tokens=ROLES)


def words(decoder: Any = None) -> FastTokenizer:
    """Whole words, whose decoder (joined by spaces, or WordPiece's) is a black box to us."""
    vocabulary = {
        word: i for i, word in enumerate(["[UNK]", "<s>", "</s>", "one", "two", "##s", "é", "日本", "\ufffd"])
    }
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    return FastTokenizer(backend, special_tokens=ROLES)
