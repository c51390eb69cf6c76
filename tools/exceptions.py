"""What may break a rule of tools/check.py, and why. The key is (rule, "file") or (rule, "file:symbol")."""

from __future__ import annotations

EXCEPTIONS = {
    (
        "size-function",
        "src/headrace/kernels/_triton_decode.py:_decode_kernel",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/moe/_triton_grouped.py:_grouped_kernel",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/_triton_prefill.py:_attend_tile",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/_triton_prefill.py:_prefill_kernel",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/_triton_rope.py:_rope_write_kernel",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/_triton_latent.py:_latent_kernel",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/_gluon_latent.py:_latent_rows_kernel",
    ): "a Gluon kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/_triton_latent_write.py:_latent_write_kernel",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    (
        "size-function",
        "src/headrace/kernels/_triton_unfolded.py:_unfolded_kernel",
    ): "a Triton kernel: its arguments stand one a line, and registers can't be handed around",
    ("size-class", "src/headrace/seam.py:EngineFacts"): "value type: one field for each fact of the open engine",
    ("size-class", "src/headrace/params.py:SamplingParams"): "the caller's request: one field for each sampling option",
    (
        "size-class",
        "src/headrace/scheduler/settings.py:SchedulerSettings",
    ): "value type: one field for each limit",
    ("size-class", "src/headrace/kvcache/settings.py:CacheSettings"): "value type: one field for each setting",
    ("size-class", "src/headrace/kvcache/stats.py:Counters"): "value type: one field for each counter",
    ("size-class", "src/headrace/kvcache/stats.py:CacheStats"): "value type: one field for each figure",
    ("size-class", "src/headrace/seam.py:Section"): "value type: one field for each array of a plan",
    ("size-class", "src/headrace/types.py:Request"): "value type: one field for each property of a request",
    ("size-class", "src/headrace/types.py:Sampling"): "value type: one field for each sampling parameter of a request",
    ("torch", "src/headrace/hub/pretrained.py:transformers"): (
        "the only from_pretrained: imported in the function, for tokenizers that have no tokenizer.json"
    ),
}
