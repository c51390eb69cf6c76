"""DeepSeek-R1 and its distillations: the output begins inside the reasoning, `</think>` ends it."""

from __future__ import annotations

from headrace.server.parsers.port import Format, Signs, Thinking

__all__ = ["FORMAT"]

FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>"), is_open=True),
    # Its templates cut the reasoning off past turns at the end tag, and the older ones write no begin.
    reasoning_signs=Signs(template=("</think>", "<｜Assistant｜>"), model_types=("deepseek_v3",)),
    source=("deepseek-ai/DeepSeek-R1 model card and chat template", "SGLang documentation, 'Reasoning Parser'"),
)
