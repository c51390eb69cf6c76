"""The model that lm-eval's evaluator talks to. Importing this needs lm-eval: `harness` does so when it is asked to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from headrace.eval.port import Generation, Model, Scored, Span

__all__ = ["HeadraceLM"]

DEFAULT_MAX_TOKENS = 256
"""Of an answer where the task says nothing, as lm-eval's Hugging Face backend has it."""


class HeadraceLM(TemplateLM):
    """Requests of lm-eval, answered by the engine in one batch each."""

    max_gen_toks = DEFAULT_MAX_TOKENS

    def __init__(self, model: Model, *, max_length: int | None = None) -> None:
        """`max_length` is of a window, in tokens; None is what the model takes.

        Raises:
            ValueError: longer than that.
        """
        super().__init__()
        limit = model.max_len - 1  # a window is one token longer than what the model is fed
        self.max_length = limit if max_length is None else max_length
        if self.max_length > limit:
            raise ValueError(
                f"--max_length is {max_length} and the model takes {limit}: lower it, or raise max_seq_len"
            )
        self._engine = model

    @property
    def tokenizer_name(self) -> str:
        return self._engine.name

    @property
    def eot_token_id(self) -> int:
        return _required(self._engine.eos_id if self._engine.eos_id is not None else self._engine.bos_id)

    @property
    def prefix_token_id(self) -> int:
        return _required(self._engine.bos_id if self._engine.bos_id is not None else self._engine.eos_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._engine.decode([self.prefix_token_id]))
        return self._engine.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        spans: list[Span] = []
        for _texts, context, continuation in requests:
            ids = [*context, *continuation][-(self.max_length + 1) :]
            spans.append(Span(ids, len(ids) - len(continuation)))
        return [_total(each) for each in self._engine.score(spans, label="loglikelihood")]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        spans: list[Span] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, pairs):
                spans.append(Span([*context, *continuation], len(context)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, tokens in zip(owners, self._engine.score(spans, label="loglikelihood_rolling")):
            totals[owner] += _total(tokens)[0]
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        wanted = [_generation(request.args[1], self.max_gen_toks) for request in requests]
        prompts = [
            self.tok_encode(request.args[0])[-(self._engine.max_len - each.max_tokens) :]
            for request, each in zip(requests, wanted)
        ]
        return self._engine.generate(prompts, wanted, label="generate_until")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._engine.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._engine.chat_template if chat_template else None


def _required(token_id: int | None) -> int:
    if token_id is None:
        raise ValueError("the tokenizer has neither a BOS nor an EOS token: name another one with --tokenizer")
    return token_id


def _total(tokens: Sequence[Scored]) -> tuple[float, bool]:
    return sum(token.logprob for token in tokens), all(token.is_top for token in tokens)


def _generation(given: Mapping[str, Any], max_tokens: int) -> Generation:
    """lm-eval's `generation_kwargs`; without `do_sample` or a temperature the answer is greedy."""
    until = given.get("until") or ()
    temperature = float(given.get("temperature") or 0.0)
    if given.get("do_sample") is False:
        temperature = 0.0
    elif given.get("do_sample") and "temperature" not in given:
        temperature = 1.0
    return Generation(
        max_tokens=int(given.get("max_gen_toks") or given.get("max_new_tokens") or max_tokens),
        stop=(until,) if isinstance(until, str) else tuple(until),
        temperature=temperature,
        top_p=given.get("top_p"),
        top_k=given.get("top_k"),
    )
