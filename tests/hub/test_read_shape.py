"""Every model type of the list: parameters counted by the formulas equal those of transformers' own model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.hub.architectures import DEFAULTS
from headrace.hub.errors import ModelError
from headrace.hub.keys import Keys
from headrace.hub.kinds import layer_kinds
from headrace.hub.mixers import Traits
from headrace.hub.read_shape import TRAITS, mlp_width, read_shape
from headrace.hub.shape import AttentionShape, LatentShape, RecurrentShape
from tests.kits.causal import register

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 100, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
}  # fmt: skip
GLM = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 20,
    "first_k_dense_replace": 2, "num_nextn_predict_layers": 0,
}  # fmt: skip
KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 20, "linear_num_heads": 3,
    "linear_head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MAMBA = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 6, "n_groups": 2,
    "mamba_head_dim": 8, "ssm_state_size": 12, "n_routed_experts": 4, "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28, "head_dim": 24, "num_hidden_layers": None,
}  # fmt: skip
GRANITE = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mamba_n_heads": 8, "mamba_n_groups": 2,
    "mamba_d_state": 12, "mamba_d_head": 16, "mamba_proj_bias": True, "num_local_experts": 4,
    "shared_intermediate_size": 28, "head_dim": None,
}  # fmt: skip
COMPRESSED = {
    "num_key_value_heads": 1, "head_dim": 24, "q_lora_rank": 16, "moe_intermediate_size": 20, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 10, "hc_mult": 3, "mlp_layer_types": ["moe"] * 4,
    "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][:4],
    "sliding_window": 16, "index_n_heads": 2, "index_head_dim": 8,
}  # fmt: skip
GLM5_NEXT = {
    **LATENT, **INDEXER, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 4, "hc_mult": 3, "linear_head_dim": 8,
    "linear_num_heads": 3, "layer_types": ["linear_attention", *["indexed_attention"] * 3],
    "indexer_types": ["full", "full", "shared", "full"], "mlp_layer_types": ["dense", *["sparse"] * 3],
    "first_k_dense_replace": None,
}  # fmt: skip
FALCON_H1 = {
    "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 10,
    "mamba_d_conv": 3,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "phi3": ("phi3", {"head_dim": None}),
    "ministral": ("ministral", {"sliding_window": 16}),
    "ministral3": ("ministral3", {}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True, "head_dim": None}),
    "seed_oss": ("seed_oss", {}),
    "seed_oss with output biases": ("seed_oss", {"attention_out_bias": True}),
    "smollm3": ("smollm3", {"attention_bias": True, "head_dim": None}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "olmo3": ("olmo3", {"head_dim": None, "sliding_window": 16}),
    "exaone4": ("exaone4", {"head_dim": None, "sliding_window": 16}),
    "cohere2": ("cohere2", {"head_dim": None, "attention_bias": True}),
    "glm4": ("glm4", {}),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1], "shared_expert_intermediate_size": None}),
    "gemma2": ("gemma2", {"sliding_window": 16}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 16}),
    "gemma4_text": ("gemma4_text", {"sliding_window": 16, "hidden_size_per_layer_input": 0, "global_head_dim": 32}),
    "gemma4_text, keys as values": ("gemma4_text", {
        "sliding_window": 16, "hidden_size_per_layer_input": 0, "global_head_dim": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "gemma4_text, small": ("gemma4_text", {
        "sliding_window": 16, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 90,
        "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "gemma4_text, experts": ("gemma4_text", {
        "sliding_window": 16, "hidden_size_per_layer_input": 0, "global_head_dim": 32, "enable_moe_block": True,
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 20,
    }),
    "deepseek_v2": ("deepseek_v2", LATENT),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3, plain query": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3 with biases": ("deepseek_v3", {**LATENT, "attention_bias": True}),
    "deepseek_v32": ("deepseek_v32", {**LATENT, **INDEXER}),
    "glm_moe_dsa": ("glm_moe_dsa", {**LATENT, **INDEXER}),
    "glm_moe_dsa, shared choice": ("glm_moe_dsa", {**LATENT, **INDEXER, "index_topk_freq": 2}),
    "kimi_linear": ("kimi_linear", KIMI),
    "qwen3_next": ("qwen3_next", {**DELTA, **EXPERTS}),
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**DELTA, **EXPERTS}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8}),
    "minimax_m3": ("minimax_m3_vl_text", {
        "num_local_experts": 8, "shared_intermediate_size": 28, "dense_intermediate_size": 40, "index_head_dim": 16,
        "index_n_heads": 2, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8, "sliding_window": 16}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "head_dim": None, "decoder_sparse_step": 2}),
    "glm4_moe": ("glm4_moe", {**GLM, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe without norms": ("glm4_moe", GLM),
    "llama4_text": ("llama4_text", {
        "num_local_experts": 4, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "attention_bias": True,
    }),
    "nemotron_h": ("nemotron_h", MAMBA),
    "nemotron_h, latent experts": ("nemotron_h", {**MAMBA, "moe_latent_size": 16}),
    "deepseek_v4": ("deepseek_v4", COMPRESSED),
    "glm5_next_text": ("glm5_next_text", GLM5_NEXT),
    "mamba2": ("mamba2", {
        "num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "use_bias": True, "use_conv_bias": False,
    }),
    "granitemoehybrid": ("granitemoehybrid", GRANITE),
    "granitemoehybrid, dense": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0, "mamba_d_head": "auto"}),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1, norm and biases": ("falcon_h1", {
        **FALCON_H1, "mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True,
        "mlp_bias": True, "mamba_d_head": "auto", "tie_word_embeddings": True,
    }),
}  # fmt: skip


def tiny_config(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    model_type, changes = CASES[name]
    wanted: dict[str, Any] = {
        key: value for key, value in {**COMMON, **changes}.items() if value is not None or key == "pad_token_id"
    }
    for key in ("q_lora_rank", "sliding_window"):
        if key in changes and changes[key] is None:
            wanted[key] = None
    return CONFIG_MAPPING[model_type](**wanted)


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_those_of_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(name)
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    corrections = sum(
        buffer.numel()
        for key, buffer in model.named_buffers()
        if key.endswith(("e_score_correction_bias", "layer_scalar"))
    )
    shape = read_shape(config.to_dict())
    assert shape.num_parameters == model.num_parameters() + corrections
    assert shape.is_known and shape.max_position == (
        config.max_position_embeddings
        if hasattr(config, "max_position_embeddings")
        else DEFAULTS["mamba2"]["max_position_embeddings"]
    )


def test_every_type_with_rules_of_its_own_is_tried() -> None:
    tried = {model_type for model_type, _ in CASES.values()}
    assert TRAITS.keys() - tried == {
        "gemma3",
        "gemma4",
        "llama4",
        "mistral3",
        "glm5_next",
        "kimi_k2",
        "kimi_k3",
    }  # nested text configs, and DeepSeek's structure by name


def mixers(**config: Any) -> list[Any]:
    return [layer.mixer for layer in read_shape({**COMMON, "max_position_embeddings": 1000, **config}).layers]


def test_windows_by_layer() -> None:
    def windows(**config: Any) -> list[int | None]:
        return [mixer.window for mixer in mixers(**config)]

    assert windows(model_type="llama") == [None] * 4
    assert windows(model_type="mistral", sliding_window=8) == [8] * 4
    assert windows(model_type="mistral", sliding_window=None) == [None] * 4
    assert windows(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=3) == [
        None, None, None, 8,
    ]  # fmt: skip
    assert windows(model_type="qwen2", use_sliding_window=False, sliding_window=8) == [None] * 4
    assert windows(model_type="gemma3_text", num_hidden_layers=7, sliding_window=8) == [8] * 5 + [None, 8]
    assert windows(model_type="exaone4", sliding_window=8, sliding_window_pattern="LG") == [8, None] * 2
    assert windows(model_type="smollm3", use_sliding_window=True, sliding_window=8) == [None] * 3 + [8]
    assert windows(model_type="smollm3", no_rope_layers=[0, 1, 1, 0], sliding_window=8) == [None] * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(model_type="gpt_oss", sliding_window=8, layer_types=kinds) == [8, None, 8, None]


def test_kinds_as_checkpoints_write_them() -> None:
    kimi = mixers(model_type="kimi_linear", kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                  linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 2, "head_dim": 8,
                                      "short_conv_kernel_size": 4})  # fmt: skip
    assert [type(mixer) for mixer in kimi] == [RecurrentShape] * 3 + [LatentShape]
    assert (kimi[0].state_count, kimi[0].conv_count) == (2 * 8 * 8, 3 * 16 * 3)
    mamba = {key: value for key, value in MAMBA.items() if key not in ("layers_block_type", "num_hidden_layers")}
    nemotron = mixers(model_type="nemotron_h", hybrid_override_pattern="M-*E", **mamba)
    assert [type(mixer) for mixer in nemotron] == [RecurrentShape, type(None), AttentionShape, type(None)]
    minimax = mixers(model_type="minimax_m3_vl_text", sparse_attention_config={"sparse_attention_freq": [0, 0, 1, 1]},
                     index_head_dim=128)  # fmt: skip
    assert [mixer.index_dim for mixer in minimax] == [0, 0, 128, 128]
    gdn = mixers(model_type="qwen3_next", **DELTA)
    assert [type(mixer) for mixer in gdn] == [RecurrentShape] * 3 + [AttentionShape]
    assert (gdn[0].state_count, gdn[0].conv_count, gdn[0].group_conv_count) == (4 * 8 * 6, 4 * 6 * 3, 2 * 2 * 8 * 3)


@pytest.mark.parametrize(("key_value_heads", "kind"), [(4, "MHA"), (2, "GQA"), (1, "MQA")])
def test_kinds_of_attention(key_value_heads: int, kind: str) -> None:
    assert mixers(model_type="llama", num_key_value_heads=key_value_heads)[0].kind == kind


def test_an_unknown_type_is_read_by_its_keys() -> None:
    config = {**COMMON, **LATENT, **INDEXER, "model_type": "new", "max_position_embeddings": 10}
    shape = read_shape(config)
    known = read_shape({**config, "model_type": "deepseek_v32"})
    assert not shape.is_known and shape.layers == known.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, not '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, not 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"model_type": "qwen3", "layer_types": "full"}, "must be a list of words"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"quantization_config": {"quant_method": "x"}}, "the method 'x' is not known here"),
        ({"quantization_config": [1]}, "quantization_config must be an object"),
        *(
            (
                {"rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 10}},
                "factor",
            )
            for factor in (float("nan"), float("inf"), 1e30)
        ),
    ],
)
def test_bad_configs_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_shape({**COMMON, "model_type": "llama", "max_position_embeddings": 10, **changes})


def test_kinds_without_a_list() -> None:
    assert layer_kinds(Keys({"num_hidden_layers": 3}, "x"), Traits()) == ["full"] * 3


def test_a_step_holds_what_absorbed_latents_take() -> None:
    """DeepSeek-V3's 128 heads: queries of 192, latents of 512 asked for and found, results of 128."""
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18_432, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_attention_heads": 128,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    assert 2 * mlp_width(config) == 128 * (192 + 512 + 512 + 128)
    experts = {**config, "num_attention_heads": 16}
    assert mlp_width(experts) == 8 * (2048 + 7168 // 2) + 2048
