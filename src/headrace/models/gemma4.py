"""Gemma 4, text (Gemma team 2026): full layers with heads of a size of their own, whose keys may be their values too.

Served is the structure of the dense 31B. Per-layer embeddings and shared keys and values (E2B, E4B) and the experts of
26B-A4B are refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.layers.blocks import SandwichLayer
from headrace.layers.causal import TIED
from headrace.layers.decoder import QK_NORM_RULES, ROTARY_NAMES, SANDWICH_RULES, Decoder
from headrace.layers.factory import LayerFactory
from headrace.layers.heads import HeadStep, KeysAsValues
from headrace.layers.hf_config import HeadSizes, HfConfig
from headrace.layers.norm import Factor, Norm
from headrace.layers.port import Act
from headrace.layers.rope import RopeSettings, rope_settings
from headrace.layers.weights import WeightMap
from headrace.layers.window import FULL, SLIDING, layer_kinds

__all__ = ["Gemma4Model"]

DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
"""What transformers takes for keys that a config leaves out."""

ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

RULES = {**SANDWICH_RULES, **QK_NORM_RULES, "model.layers.*.layer_scalar": "layers.*.factor.weight"}

BESIDE = tuple(
    f"model.{part}.**"
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector")
)
"""What multimodal checkpoints hold beside the language model."""

RENAMED = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}


class Gemma4Layer(SandwichLayer):
    factor: Factor

    def after(self, mixed: Act, residual: Tensor) -> tuple[None, Tensor]:
        _, residual = super().after(mixed, residual)
        return None, self.factor(residual)


class Gemma4Model(Decoder):
    """The text model, also of multimodal checkpoints; images and sound are not read."""

    model_types = ("gemma4_text", "gemma4")
    layer_kinds = frozenset({"full", "window"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        text = _text_config(config)
        hidden_size, vocab_size = text.integer("hidden_size"), text.integer("vocab_size")
        kinds = layer_kinds(text, sliding_pattern=6)
        kinds[-1] = FULL
        is_tied = text.flag("tie_word_embeddings", True)
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        super().__init__(
            embedding=embedding,
            layers=[_layer(text, factory, index, kind=kind) for index, kind in enumerate(kinds)],
            norm=factory.norm("norm", hidden_size, eps=text.number("rms_norm_eps", 1e-6)),
            head=factory.head(
                "head",
                vocab_size,
                hidden_size,
                tied_to=embedding if is_tied else None,
                soft_cap=text.optional_number("final_logit_softcapping"),
            ),
            ropes={
                kind: factory.rotary(_rope_settings(text, kind), _heads(text, kind, kinds.index(kind))["head_dim"])
                for kind in sorted(set(kinds))
            },
            max_position=text.integer("max_position_embeddings"),
        )
        self.embedding_scale = torch.tensor(hidden_size**0.5, dtype=factory.dtype, device=factory.device)
        self._weights = factory.weight_map(
            RULES, ignored=(*ROTARY_NAMES, *BESIDE), tied=TIED if is_tied else {}, renamed=RENAMED
        )

    def weight_map(self) -> WeightMap:
        return self._weights

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.embedding_scale


def _text_config(config: HfConfig) -> HfConfig:
    text = config.section("text_config") if "text_config" in config else config
    tie = config.get("tie_word_embeddings")
    text = text.with_defaults({**DEFAULTS, **({} if tie is None else {"tie_word_embeddings": tie})})
    if text.get("use_bidirectional_attention") == "all":
        raise ValueError(f"{text.place}: use_bidirectional_attention is for embedding models, which are not served")
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block"):
        if text.get(key):
            raise ValueError(
                f"{text.place}: Gemma 4 with {key} {text.get(key)} is not served yet: its dense models without it are"
            )
    return text


def _rope_settings(config: HfConfig, kind: str) -> RopeSettings:
    return rope_settings(config.with_defaults({"rope_parameters": ROPE}), layer_type=kind)


def _heads(config: HfConfig, kind: str, layer: int) -> HeadSizes:
    """Full layers have sizes of their own; newer configs write what differs by layer."""
    heads = config.heads()
    if "per_layer_config" in config:
        own = config.section("per_layer_config").get(str(layer), {})
        return HfConfig({**config, **own}, place=config.place).heads()
    if kind == SLIDING:
        return heads
    heads["head_dim"] = config.integer("global_head_dim")
    if config.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in config:
        heads["num_kv_heads"] = config.integer("num_global_key_value_heads")
    return heads


def _layer(config: HfConfig, factory: LayerFactory, index: int, *, kind: str) -> Gemma4Layer:
    name = f"layers.{index}"
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    heads, has_bias = _heads(config, kind, index), config.flag("attention_bias", False)
    shares_keys = kind == FULL and config.flag("attention_k_eq_v", False)
    steps: list[HeadStep] = [KeysAsValues(heads["head_dim"])] if shares_keys else []

    def norm(part: str) -> Norm:
        return factory.norm(f"{name}.{part}", hidden_size, eps=eps)

    layer = Gemma4Layer(
        input_norm=norm("input_norm"),
        attention=factory.attention(
            f"{name}.attention",
            **heads,
            rope=kind,
            scale=1.0,
            window=config.integer("sliding_window") if kind == SLIDING else None,
            qkv_bias=has_bias,
            out_bias=has_bias,
            has_values=not shares_keys,
            q_norm=factory.head_norm(f"{name}.attention.q_norm", heads["head_dim"], eps=eps),
            k_norm=factory.head_norm(f"{name}.attention.k_norm", heads["head_dim"], eps=eps),
            steps=[*steps, factory.value_norm(heads["head_dim"], eps=eps)],
        ),
        attention_post_norm=norm("attention_post_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=factory.mlp(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            act=config.text("hidden_activation", "gelu_pytorch_tanh"),
        ),
        mlp_post_norm=norm("mlp_post_norm"),
    )
    layer.factor = factory.factor(f"{name}.factor")
    return layer
