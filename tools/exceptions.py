"""What may break a rule of tools/check.py, and why. The key is (rule, "file") or (rule, "file:symbol")."""

from __future__ import annotations

EXCEPTIONS = {
    ("size-class", "src/headrace/params.py:SamplingParams"): "the caller's request: one field for each sampling option",
    (
        "size-class",
        "src/headrace/scheduler/settings.py:SchedulerSettings",
    ): "value type: one field for each limit",
    ("size-class", "src/headrace/types.py:Sampling"): "value type: one field for each sampling parameter of a request",
    ("torch", "src/headrace/hub/pretrained.py:transformers"): (
        "the only from_pretrained: imported in the function, for tokenizers that have no tokenizer.json"
    ),
}
