"""An `LLM` as what evaluations ask of a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.eval.port import Generation, Scored, Span
from headrace.front.outputs import Logprob
from headrace.front.request_output import RequestOutput
from headrace.hub.source import resolve_model
from headrace.llm import LLM
from headrace.params import SamplingParams
from headrace.text.template import ChatTemplate, load_chat_template
from headrace.text.tokenizer import Tokenizer

__all__ = ["LlmModel"]


class LlmModel:
    """`eval.port.Model` over an open LLM, which stays the caller's to shut down."""

    def __init__(self, llm: LLM) -> None:
        """Raises ValueError: no tokenizer."""
        if llm.tokenizer is None:
            raise ValueError("skip_tokenizer_init: an evaluation works on texts: leave it off")
        self._llm = llm
        self._tokenizer: Tokenizer = llm.tokenizer
        self._template: ChatTemplate | None = None

    @property
    def name(self) -> str:
        return str(self._llm.args.model)

    @property
    def max_len(self) -> int:
        return self._llm.max_seq_len - 1  # even a request that only scores computes one token

    @property
    def bos_id(self) -> int | None:
        return self._tokenizer.bos_id

    @property
    def eos_id(self) -> int | None:
        return min(self._tokenizer.eos_ids, default=None)

    @property
    def chat_template(self) -> str:
        return self._loaded_template.source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return self._loaded_template.render(messages, add_generation_prompt=add_generation_prompt)

    def score(self, spans: Sequence[Span], *, label: str) -> list[list[Scored]]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        outputs = self._generate([list(span.ids) for span in spans], [params] * len(spans), label)
        return [
            [_scored(entry, token) for entry, token in zip(_entries(output)[span.start :], span.ids[span.start :])]
            for span, output in zip(spans, outputs)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], wanted: Sequence[Generation], *, label: str) -> list[str]:
        params = [
            SamplingParams(
                max_tokens=each.max_tokens,
                stop=list(each.stop) or None,
                temperature=each.temperature,
                top_p=each.top_p,
                top_k=each.top_k,
                seed=each.seed,
            )
            for each in wanted
        ]
        return [output.outputs[0].text for output in self._generate([list(ids) for ids in prompts], params, label)]

    @property
    def _loaded_template(self) -> ChatTemplate:
        if self._template is None:
            args = self._llm.args
            source = resolve_model(args.model, revision=args.revision)
            self._template = load_chat_template(source, special_tokens=self._tokenizer.special_tokens)
        return self._template

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams], label: str) -> list[RequestOutput]:
        from tqdm import tqdm

        if not prompts:
            return []
        with tqdm(total=len(prompts), desc=label, unit="req", disable=None, file=sys.stderr) as bar:
            outputs = [self._llm.generate_async(ids, each) for ids, each in zip(prompts, params)]
            try:
                for output in outputs:
                    output.result()
                    bar.update(1)
            except BaseException:
                for output in outputs:
                    output.abort()
                raise
        return outputs


def _entries(output: RequestOutput) -> list[Any]:
    return list(output.outputs[0].prompt_logprobs)


def _scored(entry: dict[int, Logprob], token: int) -> Scored:
    found = entry[token]
    return Scored(found.logprob, found.rank == 1)
