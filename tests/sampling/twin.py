"""The sampler again, slow and obvious: one row at a time, plain lists, float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headrace.seam import SlotInit, ints
from headrace.types import GREEDY_TEMPERATURE, Sampling

FLOOR = -9999.0
ROUNDING = 1e-5
"""How far a number may be from the edge between two tokens before float32 must agree with float64."""


@dataclass
class Sequence:
    """One request: what it asks for and its tokens so far."""

    sampling: Sampling
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    min_tokens: int = 0
    max_len: int = 10**9
    stop_ids: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def min_len(self) -> int:
        return len(self.prompt) + self.min_tokens

    def init(self, slot: int) -> SlotInit:
        history = ints(self.tokens) if self.sampling.needs_history else None
        return SlotInit(
            slot=slot,
            request_id=1000 + slot,
            sampling=self.sampling,
            prompt_len=len(self.prompt),
            min_len=self.min_len,
            max_len=self.max_len,
            stop_ids=self.stop_ids,
            history=history,
        )


def uniform(seed: int, position: int, purpose: int) -> float:
    """The noise with numpy's unsigned integers, which wrap by definition."""
    golden = 0x9E3779B97F4A7C15

    def mix(value: np.uint64) -> np.uint64:
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))

    with np.errstate(over="ignore"):
        stream = mix(np.uint64((seed + golden * (purpose + 1)) % 2**64))
        bits = mix(stream + np.uint64(golden * (position + 1) % 2**64))
    return (int(bits) // 2**12 + 0.5) / 2**52


def raw_logits(logits: list[float], num_valid_ids: int) -> list[float]:
    return [x if token < num_valid_ids else -math.inf for token, x in enumerate(logits)]


def shaped_logits(raw: list[float], seq: Sequence) -> list[float]:
    """Everything before temperature."""
    x = list(raw)
    sampling = seq.sampling
    for token, bias in sampling.logit_bias.items():
        x[token] += bias
    for word in sampling.bad_words:
        rest = list(word[:-1])
        if not rest or seq.output[-len(rest) :] == rest:
            x[word[-1]] = -math.inf
    n = sampling.no_repeat_ngram_size
    if n > 0:
        for token in range(len(x)):
            after = [*seq.tokens, token]
            if len(after) > n and any(after[i : i + n] == after[-n:] for i in range(len(after) - n)):
                x[token] = -math.inf
    seen = set(seq.prompt[sampling.prompt_ignore_length :]) | set(seq.output)
    for token in range(len(x)):
        if token in seen:
            penalty = sampling.repetition_penalty
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        if token in seq.output:
            x[token] -= sampling.frequency_penalty * seq.output.count(token) + sampling.presence_penalty
    if len(seq.output) < seq.min_tokens:
        for token in seq.stop_ids:
            if 0 <= token < len(x):
                x[token] = -math.inf
    return x


def is_greedy(sampling: Sampling) -> bool:
    return (
        sampling.temperature < GREEDY_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1
    )


def ranking(x: list[float]) -> list[int]:
    return sorted(range(len(x)), key=lambda token: (-x[token], token))


def distribution(x: list[float], sampling: Sampling) -> list[float]:
    """Scaled logits after temperature, min_p, top_k, top_p; the largest is 0, dropped tokens have -inf."""
    order = ranking(x)
    best = x[order[0]]
    if best == -math.inf:
        return list(x)
    scaled = [(value - best) / sampling.temperature for value in x]
    weight = [math.exp(value) for value in scaled]
    kept = [token for token in order if weight[token] >= sampling.min_p]
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1:
        total = sum(weight[token] for token in kept)
        nucleus: list[int] = []
        mass = 0.0
        for token in kept:
            if nucleus and mass >= sampling.top_p * total:
                break
            nucleus.append(token)
            mass += weight[token]
        kept = nucleus
    return [scaled[token] if token in kept else -math.inf for token in range(len(x))]


def weights(x: list[float], sampling: Sampling) -> list[float]:
    """Unnormalised probabilities of what may be drawn."""
    return [math.exp(value) for value in distribution(x, sampling)]


def draw(weight: list[float], u: float) -> set[int]:
    """The token of inverse CDF in id order; two of them when `u` is at their edge."""
    total = sum(weight)
    found = set()
    through = 0.0
    for token, value in enumerate(weight):
        low, high = through / total, (through + value) / total
        if value > 0 and low - ROUNDING <= u <= high + ROUNDING:
            found.add(token)
        through += value
    return found


def choose(logits: list[float], seq: Sequence, *, num_valid_ids: int, purpose: int = 0) -> set[int]:
    """What the next token may be: one, but for rounding at an edge."""
    x = shaped_logits(raw_logits(logits, num_valid_ids), seq)
    if is_greedy(seq.sampling):
        return {ranking(x)[0]}
    weight = weights(x, seq.sampling)
    if not any(weight):
        return {0}
    return draw(weight, uniform(seq.sampling.seed, len(seq.tokens), purpose))


def is_done(seq: Sequence, token: int) -> bool:
    """After `token` has been appended to `seq`."""
    stopped = token in seq.stop_ids and len(seq.output) > seq.min_tokens
    return stopped or len(seq.tokens) >= seq.max_len


def log_softmax(x: list[float]) -> list[float]:
    best = max(x)
    if best == -math.inf:
        return [FLOOR] * len(x)
    total = math.log(sum(math.exp(value - best) for value in x))
    return [max(FLOOR, value - best - total) for value in x]


def logprobs(logits: list[float], seq: Sequence, token: int, *, num_valid_ids: int) -> tuple[list, list, int]:
    """(ids, values, rank) of the chosen token and the top K, before `token` is appended."""
    x = raw_logits(logits, num_valid_ids)
    sampling = seq.sampling
    if sampling.processed_logprobs:
        x = shaped_logits(x, seq)
        if not is_greedy(sampling):
            x = distribution(x, sampling)
    values, order = log_softmax(x), ranking(x)
    ids = [token, *order[: min(sampling.logprobs, num_valid_ids)]]
    return ids, [values[i] for i in ids], order.index(token) + 1
