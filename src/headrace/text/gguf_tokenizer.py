"""The tokenizer that a GGUF file describes: byte-level BPE (`gpt2`) or sentencepiece with scores (`llama`).

Metadata: the GGUF specification's `tokenizer.ggml.*`. The file names its split of text into words (`pre`) instead of
giving it; the patterns are those that the models' own tokenizers publish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.hub.errors import ModelError
from headrace.text.fast_tokenizer import FastTokenizer, add_tokens

__all__ = ["build_gguf_tokenizer"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Token types of the format; 1 is an ordinary token, 5 an unused one."""
_SPACE_MARK = "\u2581"
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_GEMMA = ("gemma", "gemma2", "gemma3")


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is split into words before the merges. With neither pattern nor digits it is GPT-2's split."""

    pattern: str = ""
    single_digits: bool = False
    """Each digit is a word of its own, split off before GPT-2's pattern."""
    keeps_whole_words: bool = False
    """A word that is a token as it stands is not put together by merges."""
    normalizes: bool = False
    """Text is brought to Unicode's composed form first."""
    adds_bos: bool = False
    """What a file without `add_bos_token` means."""


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _Split(
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST, keeps_whole_words=True, adds_bos=True
)
_QWEN2 = _Split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST, normalizes=True)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}",
    keeps_whole_words=True,
    adds_bos=True,
)
_GPT4O = _Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_GPT2 = _Split()
_SINGLE_DIGITS = _Split(single_digits=True)

_SPLITS: dict[str, _Split] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


def build_gguf_tokenizer(metadata: Mapping[str, Any], *, architecture: str) -> FastTokenizer:
    """The tokenizer of a file with this metadata.

    Raises:
        ModelError: without a path: no tokenizer in the file, or one of a kind that is not read.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ModelError("the file has no vocabulary: give a tokenizer with --tokenizer")
    try:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(metadata, tokens)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(metadata, tokens, types, architecture in _GEMMA), True
        else:
            raise ModelError(f"tokenizer {kind!r} is not supported: give one with --tokenizer")
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception for vocabularies that contradict themselves
        raise ModelError(f"the tokenizer is damaged ({error}): convert the model again") from None
    _add_marked(backend, tokens, types)
    return FastTokenizer(
        backend,
        special_tokens=_special_tokens(metadata, tokens),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        vocab_size=len(tokens),
    )


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, role in _ROLES.items():
        token_id: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if token_id >= len(tokens):
            raise ModelError(f"its {role} is id {token_id}, and it has {len(tokens)} tokens: convert the model again")
        found[role] = tokens[token_id]
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    split = _SPLITS.get(name)
    if split is None:
        raise ModelError(f"its split into words {name!r} is not known: give the model's tokenizer with --tokenizer")
    written: list[str] = metadata.get("tokenizer.ggml.merges") or []
    merges = [_pair(merge) for merge in written]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.keeps_whole_words))
    if split.normalizes:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], is_gemma: bool
) -> tokenizers.Tokenizer:
    if is_gemma:
        # Runs of spaces stand in the file as spaces, where text has the mark.
        tokens = [_SPACE_MARK * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if is_gemma:
        # In a gemma file the scores of some tokens are placeholders; its ids are in merge order.
        best_first = range(len(tokens))
    else:
        scores: list[float] = metadata.get("tokenizer.ggml.scores") or []
        if len(scores) != len(tokens):
            raise ModelError("the file has no scores for its tokens: convert the model again")
        best_first = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, types, best_first, vocabulary),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE_MARK)
    steps: list[Any] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not is_gemma and metadata.get("tokenizer.ggml.add_space_prefix", True):
        # Before each stretch of text between marked tokens, as the file format's own program does.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(
    tokens: Sequence[str], types: Sequence[int], best_first: Iterable[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Pairs in the order that sentencepiece joins them: by the token they make, best first.

    A token that several pairs make is made by any of them; the longest left part first.
    """
    merges: list[tuple[str, str]] = []
    for token_id in best_first:
        if types[token_id] in (_UNKNOWN, _CONTROL, _BYTE):
            continue  # these come from the text as a whole or from bytes, never from letters
        token = tokens[token_id]
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                merges.append((token[:cut], token[cut:]))
    return merges


def _add_marked(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that the file marks are matched whole in text: control tokens as special, the user's as ordinary."""
    special: list[str | AddedToken] = []
    ordinary: list[str | AddedToken] = []
    for token, kind in zip(tokens, types):
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and backend.token_to_id(token) is not None:
            ordinary.append(AddedToken(token, special=False, normalized=False))
    add_tokens(backend, special)
    add_tokens(backend, ordinary)
