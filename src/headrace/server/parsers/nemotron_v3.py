"""Nemotron 3: reasoning between `<think>` tags, which the prompt has opened already. Calls are qwen3_coder's."""

from __future__ import annotations

from headrace.server.parsers.port import Format, Signs, Thinking

__all__ = ["FORMAT"]

FORMAT = Format(
    thinking=Thinking(begin="<think>", end="</think>", tokens=("<think>", "</think>"), is_open=True),
    reasoning_signs=Signs(template=("<think>", "</think>"), model_types=("nemotron",)),
    source=(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 chat template and model card",
        "vLLM documentation, parser/nemotron_v3",
    ),
)
