"""cos and sin of every rope type against transformers, and the refusal of what is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from headrace.layers.rope import Rotary, max_position, rope_settings

ORIGINAL = 64
HEAD_DIM = 16
HALF = HEAD_DIM // 2
SHORT = [1.0 + 0.1 * i for i in range(HALF)]
LONG = [2.0 + 0.5 * i for i in range(HALF)]

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL}

# (name, rope keys, max_position_embeddings)
TYPES: list[tuple[str, dict[str, Any], int]] = [
    ("default", {}, ORIGINAL),
    ("linear", {"factor": 4.0}, ORIGINAL),
    ("dynamic", {"factor": 4.0}, ORIGINAL),
    ("yarn", YARN, ORIGINAL),
    ("yarn", {**YARN, "beta_fast": 20, "beta_slow": 2, "truncate": False}, ORIGINAL),
    ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, 4 * ORIGINAL),
    ("yarn", {**YARN, "attention_factor": 1.2}, 4 * ORIGINAL),
    ("llama3", LLAMA3, 8 * ORIGINAL),
    ("longrope", {**LONGROPE, "factor": 4.0}, 4 * ORIGINAL),
    ("longrope", LONGROPE, 4 * ORIGINAL),
    ("longrope", {**LONGROPE, "attention_factor": 1.1}, 4 * ORIGINAL),
    ("proportional", {"partial_rotary_factor": 0.5}, ORIGINAL),
    ("proportional", {"partial_rotary_factor": 0.25, "factor": 8.0}, ORIGINAL),
    ("proportional", {"partial_rotary_factor": 0.2}, ORIGINAL),  # an odd share of the features: 3 of 16
    ("proportional", {"partial_rotary_factor": 0.1}, ORIGINAL),  # none
    ("linear", {"factor": 4.0, "partial_rotary_factor": 0.5}, ORIGINAL),
    ("llama3", {**LLAMA3, "partial_rotary_factor": 0.5}, 8 * ORIGINAL),
]


def config_dict(kind: str, keys: dict[str, Any], max_positions: int, *, form: str) -> dict[str, Any]:
    """The same rope in a form that configs have had."""
    base = {
        "hidden_size": 2 * HEAD_DIM,
        "num_attention_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_positions,
    }
    if form == "rope_parameters":
        return {**base, "rope_parameters": {"rope_type": kind, "rope_theta": 500_000.0, **keys}}
    type_key = "type" if form == "old" else "rope_type"
    return {**base, "rope_theta": 500_000.0, "rope_scaling": {type_key: kind, **keys} if kind != "default" else None}


def oracle(kind: str, keys: dict[str, Any], max_positions: int) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**config_dict(kind, keys, max_positions, form="rope_parameters")))


def expected(embedding: Any, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = embedding(torch.zeros(1), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("form", ["old", "new", "rope_parameters"])
@pytest.mark.parametrize(("kind", "keys", "max_positions"), TYPES, ids=lambda value: str(value)[:60])
def test_cos_and_sin_are_those_of_transformers(kind: str, keys: dict[str, Any], max_positions: int, form: str) -> None:
    config = config_dict(kind, keys, max_positions, form=form)
    for position in (0, ORIGINAL - 1, ORIGINAL, 4 * ORIGINAL):
        rotary = Rotary(rope_settings(config), HEAD_DIM, device=torch.device("cpu"), max_len=position + 1)
        cos, sin = rotary(torch.tensor([position]))
        # A fresh embedding a position: transformers' own state carries lengths from call to call.
        want_cos, want_sin = expected(oracle(kind, keys, max_positions), [position])
        torch.testing.assert_close(cos, want_cos, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin, want_sin, rtol=0, atol=1e-6)
        assert cos.dtype == sin.dtype == torch.float32


def test_yarn_takes_its_factor_from_the_lengths_when_it_states_none() -> None:
    config = config_dict("yarn", {"original_max_position_embeddings": ORIGINAL}, 4 * ORIGINAL, form="new")
    stated = config_dict("yarn", YARN, 4 * ORIGINAL, form="new")
    positions = torch.tensor([0, 3, 255])
    left, right = (Rotary(rope_settings(c), HEAD_DIM, device=torch.device("cpu"))(positions) for c in (config, stated))
    torch.testing.assert_close(left.cos, right.cos)


def test_partial_rotary_factor_beside_the_rope_keys() -> None:
    config = PhiConfig(hidden_size=64, num_attention_heads=2, partial_rotary_factor=0.5, max_position_embeddings=64)
    settings = rope_settings({**config.to_dict(), "rope_parameters": None, "partial_rotary_factor": 0.5})
    cos, sin = Rotary(settings, 32, device=torch.device("cpu"))(torch.tensor([0, 5, 63]))
    want_cos, want_sin = expected(PhiRotaryEmbedding(config), [0, 5, 63])
    assert cos.shape == (3, 8)
    torch.testing.assert_close(cos, want_cos)
    torch.testing.assert_close(sin, want_sin)


def test_types_have_an_oracle() -> None:
    from headrace.layers.rope import NEEDED_KEYS

    of_hunyuan = {"ntk_alpha"}  # in transformers a branch of that model's class: the models' contract has it
    assert set(NEEDED_KEYS) - {"default"} - of_hunyuan <= set(ROPE_INIT_FUNCTIONS)


def test_by_layer_type() -> None:
    config = config_dict("default", {}, ORIGINAL, form="old")
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    del config["rope_scaling"]
    assert rope_settings(config, layer_type="full_attention").factor == 8.0
    assert rope_settings(config, layer_type="sliding_attention").theta == 1e4
    with pytest.raises(ValueError, match="no rope parameters for chunked_attention layers"):
        rope_settings(config, layer_type="chunked_attention")


def test_a_tokens_rotation_depends_on_its_position_only() -> None:
    """Else output would depend on chunks and neighbours. transformers agrees for tokens that it generates."""
    config = config_dict("dynamic", {"factor": 2.0}, ORIGINAL, form="new")
    rotary = Rotary(rope_settings(config), HEAD_DIM, device=torch.device("cpu"))
    together = rotary(torch.arange(3 * ORIGINAL)).cos
    one_by_one = torch.cat([rotary(torch.tensor([p])).cos for p in range(3 * ORIGINAL)])
    assert torch.equal(together, one_by_one)
    embedding = oracle("dynamic", {"factor": 2.0}, ORIGINAL)
    generated = torch.cat([expected(embedding, [p])[0] for p in range(3 * ORIGINAL)])
    torch.testing.assert_close(together, generated, rtol=0, atol=2e-5)


def test_longrope_factors_follow_the_longest_sequence() -> None:
    settings = rope_settings(config_dict("longrope", LONGROPE, 4 * ORIGINAL, form="new"))
    positions = torch.arange(4 * ORIGINAL)
    short = Rotary(settings, HEAD_DIM, device=torch.device("cpu"), max_len=ORIGINAL)(positions[:ORIGINAL])
    long = Rotary(settings, HEAD_DIM, device=torch.device("cpu"))(positions)
    embedding = oracle("longrope", LONGROPE, 4 * ORIGINAL)
    torch.testing.assert_close(short.cos, expected(embedding, positions[:ORIGINAL].tolist())[0])
    torch.testing.assert_close(long.cos, expected(embedding, positions.tolist())[0])


def test_su_is_an_old_name_of_longrope() -> None:
    keys = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    config = {
        "max_position_embeddings": 4 * ORIGINAL,
        "original_max_position_embeddings": ORIGINAL,
        "rope_scaling": keys,
    }
    settings = rope_settings(config)
    assert (settings.kind, settings.original_positions) == ("longrope", ORIGINAL)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "unknown rope type 'spiral'"),
        ({"type": "spiral", "factor": 2.0}, "unknown rope type 'spiral'"),
        ({"rope_type": "linear", "factor": 2.0, "facter": 3.0}, "unknown key 'facter'"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "unknown key 'beta_fast'"),
        ({"rope_type": "linear"}, "lacks the key 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "lacks the key 'high_freq_factor'"),
        ({"rope_type": "longrope", "short_factor": SHORT}, "lacks the key 'long_factor'"),
    ],
)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_unknown_and_missing_keys_are_fatal(keys: dict[str, Any], message: str, place: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        rope_settings({"max_position_embeddings": ORIGINAL, place: keys})
    assert place in str(raised.value) and "\n" not in str(raised.value)


def test_longrope_with_a_wrong_number_of_factors() -> None:
    settings = rope_settings(config_dict("longrope", {**LONGROPE, "long_factor": [1.0]}, 4 * ORIGINAL, form="new"))
    with pytest.raises(ValueError, match="long_factor of rope type 'longrope' has 1 numbers, the head needs 8"):
        Rotary(settings, HEAD_DIM, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "keys", "max_positions", "expected_max"),
    [
        ("default", {}, 64, 64),
        ("linear", {"factor": 4.0}, 64, 256),
        ("dynamic", {"factor": 2.0}, 64, 128),
        ("yarn", YARN, 64, 256),
        ("yarn", YARN, 256, 256),
        ("yarn", {"factor": 4.0}, 64, 256),
        # Llama 3.1: 8 x 8,192 is not the 131,072 that the config states.
        ("llama3", LLAMA3, 1024, 1024),
        ("longrope", LONGROPE, 256, 256),
    ],
)
def test_max_position(kind: str, keys: dict[str, Any], max_positions: int, expected_max: int) -> None:
    assert max_position(config_dict(kind, keys, max_positions, form="new")) == expected_max


@pytest.mark.parametrize(("kind", "share"), [("default", 0.2), ("default", 1.5), ("proportional", 1.5)])
def test_shares_that_are_no_pairs_of_a_head(kind: str, share: float) -> None:
    settings = rope_settings(config_dict(kind, {"partial_rotary_factor": share}, ORIGINAL, form="rope_parameters"))
    with pytest.raises(ValueError, match="partial_rotary_factor of at most 1"):
        Rotary(settings, HEAD_DIM, device=torch.device("cpu"))
