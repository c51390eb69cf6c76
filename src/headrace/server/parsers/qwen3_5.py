"""Qwen3.5: reasoning between `<think>` tags, which the prompt has opened already. Calls are qwen3_coder's."""

from __future__ import annotations

from headrace.server.parsers.port import Format, Signs, Thinking

__all__ = ["FORMAT"]

FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>"), is_open=True),
    reasoning_signs=Signs(template=("<think>", "</think>"), model_types=("qwen3_5", "qwen3_next")),
    source=("Qwen/Qwen3.5-35B-A3B chat template and model card",),
)
