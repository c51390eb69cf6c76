"""DeepSeek V3.2: calls as elements of its markup language DSML."""

from __future__ import annotations

from headrace.server.parsers._dsml import dsml_calls
from headrace.server.parsers.port import Format, Signs

__all__ = ["FORMAT"]

FORMAT = Format(
    calls=dsml_calls("function_calls"),
    tool_signs=Signs(model_types=("deepseek_v32",)),
    source=(
        "deepseek-ai/DeepSeek-V3.2 encoding/encoding_dsv32.py",
        "vLLM documentation, parser/deepseek_v32",
    ),
)
