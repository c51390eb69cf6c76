from __future__ import annotations

from typing import Any

import pytest

from headrace.hub.storage import stored_as

KIMI_IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]


@pytest.mark.parametrize(
    ("stated", "bits"),
    [
        (None, {}),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"linear": 8.002, "expert": 8.002}),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, {"expert": 4.25}),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, {"linear": 4.156, "expert": 4.156}),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, {"linear": 8, "expert": 8}),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"linear": 4.5, "expert": 4.5}),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
         {"linear": 4.5, "expert": 4.5}),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"linear": 8, "expert": 8}),
        ({"quant_method": "compressed-tensors", "ignore": KIMI_IGNORED, "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}}}, {"expert": 4.5}),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": 16, "type": "float"}}}},
         {"linear": 4.5, "expert": 4.5}),
    ],
)  # fmt: skip
def test_bits_by_what_a_config_states(stated: Any, bits: dict[str, float]) -> None:
    assert stored_as(stated, "config.json").bits == pytest.approx(bits, abs=0.001)
