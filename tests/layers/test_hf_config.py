from __future__ import annotations

import pytest

from headrace.layers.hf_config import HfConfig
from headrace.layers.window import layer_kinds, layer_windows

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def config() -> HfConfig:
    return HfConfig(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "head_dim": None,
            "rms_norm_eps": 1e-6,
            "mlp_bias": True,
            "hidden_act": "silu",
            "vocab_size": "many",
            "text_config": {"hidden_size": 8},
        }
    )


def test_null_is_absent(config: HfConfig) -> None:
    assert "head_dim" not in config and "hidden_size" in config
    assert config.get("head_dim", 5) == 5
    assert config.head_dim() == 16
    assert config.num_kv_heads() == 4
    assert "head_dim" not in dict(config)


def test_defaults_fill_what_is_not_stated(config: HfConfig) -> None:
    filled = config.with_defaults({"sliding_window": 4096, "head_dim": 128, "hidden_size": 1})
    assert filled.integer("sliding_window") == 4096
    assert filled.integer("hidden_size") == 64
    assert filled.get("head_dim") is None, "a stated null stays"


def test_errors_name_the_key(config: HfConfig) -> None:
    with pytest.raises(ValueError, match="config.json lacks the key 'rope_theta'"):
        config["rope_theta"]
    with pytest.raises(ValueError, match="vocab_size must be an integer, not 'many'"):
        config.integer("vocab_size")
    with pytest.raises(ValueError, match="mlp_bias must be an integer, not True"):
        config.integer("mlp_bias")
    with pytest.raises(ValueError, match="hidden_act must be a number"):
        config.number("hidden_act")
    with pytest.raises(ValueError, match="hidden_size must be true or false"):
        config.flag("hidden_size", False)
    with pytest.raises(ValueError, match="hidden_size must be a string"):
        config.text("hidden_size", "silu")
    with pytest.raises(ValueError, match="hidden_size must be an object"):
        config.section("hidden_size")
    with pytest.raises(ValueError, match=r"config\.json: text_config lacks the key 'vocab_size'"):
        config.section("text_config").integer("vocab_size")


def test_kv_heads_must_divide(config: HfConfig) -> None:
    with pytest.raises(ValueError, match="num_key_value_heads 3 does not divide num_attention_heads 4"):
        HfConfig({**config, "num_key_value_heads": 3}).num_kv_heads()


def test_layer_kinds(config: HfConfig) -> None:
    assert layer_kinds(config) == [FULL] * 4
    assert layer_kinds(config, sliding_pattern=2) == [SLIDING, FULL, SLIDING, FULL]
    stated = HfConfig({**config, "layer_types": [FULL, SLIDING, FULL, FULL]})
    assert layer_kinds(stated, sliding_pattern=2) == [FULL, SLIDING, FULL, FULL]
    with pytest.raises(ValueError, match="layer_types has the unknown 'chunked_attention'"):
        layer_kinds(HfConfig({**config, "layer_types": ["chunked_attention"] * 4}))
    with pytest.raises(ValueError, match="layer_types has 1 entries for 4 layers"):
        layer_kinds(HfConfig({**config, "layer_types": [FULL]}))


def test_windows_in_qwens_form(config: HfConfig) -> None:
    qwen = {**config, "sliding_window": 9, "max_window_layers": 3}
    assert layer_windows(HfConfig(qwen)) == [None] * 4
    assert layer_windows(HfConfig({**qwen, "use_sliding_window": True})) == [None, None, None, 9]
    assert layer_windows(HfConfig({**qwen, "use_sliding_window": True, "layer_types": [SLIDING] + [FULL] * 3})) == [
        9,
        None,
        None,
        None,
    ]
