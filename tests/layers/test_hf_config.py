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


def test_numbers_have_bounds() -> None:
    config = HfConfig({"n_routed_experts": 10**9, "head_dim": 10**6, "index_topk": 10**9, "vocab_size": 10**5,
                       "rms_norm_eps": -1e-6, "scale": 10**400, "hidden_size": 10**9, "num_attention_heads": 4,
                       "bound": 1.0})  # fmt: skip
    assert config.integer("vocab_size") == 10**5
    for key, most in (("n_routed_experts", 10_000), ("head_dim", 65_536), ("index_topk", 65_536)):
        with pytest.raises(ValueError, match=f"{key} must be at most {most}, not"):
            config.integer(key)
    with pytest.raises(ValueError, match="rms_norm_eps must be from 0 to 1, not -1e-06"):
        config.number("rms_norm_eps")
    with pytest.raises(ValueError, match="scale must be a number"):
        config.number("scale")
    with pytest.raises(ValueError, match="hidden_size 1000000000 by num_attention_heads 4 makes no head_dim"):
        HfConfig({**config, "head_dim": None}).head_dim()
    with pytest.raises(ValueError, match="bound must be less than 0, not 1.0"):
        config.optional_negative("bound")
    assert config.optional_negative("other") is None


def test_lists() -> None:
    config = HfConfig({"factors": [1, 2.5], "kinds": ["a"], "mixed": ["a", 1], "turned": [0, True]})
    assert config.numbers("factors", 2) == (1.0, 2.5) and config.words("kinds") == ["a"]
    assert config.numbers("none", 2) is config.words("none") is config.marks("none") is None
    assert config.marks("turned") == [False, True]
    for key in ("mixed", "factors", "kinds"):
        with pytest.raises(ValueError, match=f"{key} must be a list of zeros and ones"):
            config.marks(key)
    with pytest.raises(ValueError, match="factors must be a list of 3 numbers"):
        config.numbers("factors", 3)
    for key in ("mixed", "factors"):
        with pytest.raises(ValueError, match=f"{key} must be a list of strings"):
            config.words(key)


def test_a_null_is_no_yes() -> None:
    config = HfConfig({"scaled": None, "tie_word_embeddings": None})
    assert config.flag("tie_word_embeddings", True), "the tensors tell"
    assert config.flag("scaled", False) is False and config.flag("other", True) is True
    with pytest.raises(ValueError, match="scaled must be true or false, not null"):
        config.flag("scaled", True)


def test_messages_say_what_the_file_says() -> None:
    config = HfConfig({"num_experts": -1, "left": None}).renamed({"num_experts": "experts", "left": "right"})
    for each in (config, config.with_defaults({"x": 1}), config.with_values({"x": 1})):
        with pytest.raises(ValueError, match=r"config\.json: num_experts must be at least 1"):
            each.integer("experts")
    assert "right" not in config
