"""Gemma 4, text (Gemma team 2026): full layers with heads of a size of their own, whose keys may be their values too.

The small ones (E2B, E4B) add an embedding for each layer, and their last layers attend to what earlier ones keep;
26B-A4B has experts beside each MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.layers.attention import Attention
from headrace.layers.blocks import SandwichLayer
from headrace.layers.causal import TEXT_PREFIXES, TIED
from headrace.layers.decoder import QK_NORM_RULES, ROTARY_NAMES, SANDWICH_RULES, Decoder
from headrace.layers.experts import Experts, Routing, expert_act, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.heads import HandedOn, HeadStep, KeysAsValues, TakenOver
from headrace.layers.hf_config import HeadSizes, HfConfig
from headrace.layers.norm import Factor, Norm
from headrace.layers.per_layer import PER_LAYER_RULES, LayerInput, LayerInputs, layer_input, layer_inputs
from headrace.layers.port import ForwardStep, Mixer
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
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
}
"""What transformers takes for keys that a config leaves out."""

ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

LAYER = "model.layers.*"
RULES = {
    **SANDWICH_RULES,
    **QK_NORM_RULES,
    **PER_LAYER_RULES,
    **expert_rules(LAYER, "layers.*.experts", router="router.proj"),
    f"{LAYER}.router.scale": "layers.*.experts.seen_norm.weight",
    f"{LAYER}.pre_feedforward_layernorm_2.weight": "layers.*.experts.norm.weight",
    f"{LAYER}.post_feedforward_layernorm_1.weight": "layers.*.experts.mlp_post_norm.weight",
    f"{LAYER}.post_feedforward_layernorm_2.weight": "layers.*.experts.post_norm.weight",
    f"{LAYER}.layer_scalar": "layers.*.factor.weight",
}

BESIDE = tuple(
    f"model.{part}.**"
    for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector")
)
"""What multimodal checkpoints hold beside the language model."""


class Carried(NamedTuple):
    """From `before` to `after`."""

    heads: Any
    """What `mix` takes, then what it answers."""
    own: Tensor | None  # [tokens, features], this layer's embedding of the tokens


class BesideMlp:
    """Experts beside the MLP. Both see what attention left, and their router sees it normed by itself."""

    def __init__(
        self, experts: Experts, *, seen_norm: Norm, norm: Norm, mlp_post_norm: Norm, post_norm: Norm, scale: float
    ) -> None:
        """
        Args:
            scale: what the router's input is multiplied with.
        """
        self.experts = experts
        self.seen_norm = seen_norm
        self.norm = norm
        self.mlp_post_norm = mlp_post_norm
        self.post_norm = post_norm
        self.scale = scale

    def __call__(self, mlp: Tensor, residual: Tensor) -> Tensor:
        """mlp: [tokens, hidden], partial -> [tokens, hidden], of the MLP and the experts, summed over ranks"""
        seen = self.seen_norm(None, residual)[0].data * self.scale
        routed = self.experts.run(self.norm(None, residual)[0].data, seen)
        return self.post_norm.settle(routed, self.mlp_post_norm.reduced(mlp))


class Gemma4Layer(SandwichLayer):
    attention: Attention
    factor: Factor
    experts: BesideMlp | None
    own: LayerInput | None

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Carried, Tensor]:
        own = None if self.own is None else self.own.find(step, residual)
        heads, residual = super().before(partial, residual, step)
        return Carried(heads, own), residual

    def mix(self, mixer_input: Carried, mixer: Mixer) -> Carried:
        return mixer_input._replace(heads=super().mix(mixer_input.heads, mixer))

    def after(self, mixed: Carried, residual: Tensor) -> tuple[None, Tensor]:
        residual = self.attention_post_norm.settle(self.attention.output(mixed.heads), residual)
        act, residual = self.mlp_norm(None, residual)
        partial = self.mlp(act)
        if self.experts is None:
            residual = self.mlp_post_norm.settle(partial, residual)
        else:
            residual = residual + self.mlp_post_norm.scale(self.experts(partial, residual))
        if self.own is not None:
            assert mixed.own is not None
            residual = self.own(residual, mixed.own)
        return None, self.factor(residual)


class Gemma4Model(Decoder):
    """The text model, also of multimodal checkpoints; images and sound are not read."""

    model_types = ("gemma4_text", "gemma4")
    layer_kinds = frozenset({"full", "window"})
    has_experts = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        text = _text_config(config)
        hidden_size, vocab_size = text.integer("hidden_size"), text.integer("vocab_size")
        kinds = layer_kinds(text, sliding_pattern=6)
        kinds[-1] = FULL
        is_tied = text.flag("tie_word_embeddings", True)
        sources = _sources(text, kinds)
        # Checkpoints have keys and values of layers that attend to another's, too.
        shared = [f"model.layers.{index}.self_attn" for index, source in enumerate(sources) if source is not None]
        unused = [f"{layer}.{part}.*" for layer in shared for part in ("k_proj", "v_proj", "k_norm")]
        ignored = (*ROTARY_NAMES, *BESIDE, *unused)
        factory.read(WeightMap((), RULES, ignored, TIED if is_tied else {}, TEXT_PREFIXES))
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        inputs = _layer_inputs(text, factory)
        layers: list[Gemma4Layer] = []
        for index, source in enumerate(sources):
            kept = None if source is None else (source, layers[source].attention)
            layers.append(_layer(text, factory, index, kind=kinds[index], inputs=inputs, source=kept))
        super().__init__(
            embedding=embedding,
            layers=layers,
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
        self._weights = factory.weight_map()

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
    return text


def _sources(config: HfConfig, kinds: list[str]) -> list[int | None]:
    """The layer that each of the last `num_kv_shared_layers` attends to: the last before them of its kind."""
    first = len(kinds) - config.integer("num_kv_shared_layers", 0, least=0)
    own = kinds[: max(first, 0)]
    missing = set(kinds) - set(own)
    if missing:
        raise ValueError(
            f"{config.place}: num_kv_shared_layers {len(kinds) - first} of {len(kinds)} layers leaves no"
            f" {sorted(missing)[0]} whose keys and values the others could share"
        )
    last = {kind: index for index, kind in enumerate(own)}
    return [None if index < first else last[kind] for index, kind in enumerate(kinds)]


def _layer_inputs(config: HfConfig, factory: LayerFactory) -> LayerInputs | None:
    features = config.integer("hidden_size_per_layer_input", 0, least=0)
    if not features:
        return None
    return layer_inputs(
        factory,
        vocab_size=config.integer("vocab_size_per_layer_input"),
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        features=features,
        eps=config.number("rms_norm_eps", 1e-6),
    )


def _rope_settings(config: HfConfig, kind: str) -> RopeSettings:
    if "rope_parameters" not in config:
        config = HfConfig({**config, "rope_parameters": ROPE}, place=config.place)
    stated = config.section("rope_parameters").get(kind)
    if isinstance(stated, Mapping) and not stated.get("rope_type"):
        raise ValueError(f"{config.place}: rope_parameters.{kind} lacks the key 'rope_type': which one isn't clear")
    return rope_settings(config, layer_type=kind)


def _heads(config: HfConfig, kind: str, layer: int) -> HeadSizes:
    """Full layers have sizes of their own; newer configs write what differs by layer."""
    heads = config.heads()
    if "per_layer_config" in config:
        stated = config.section("per_layer_config")
        own = stated.section(str(layer)) if str(layer) in stated else {}
        return HfConfig({**config, **own}, place=config.place).heads()
    if kind == SLIDING:
        return heads
    heads["head_dim"] = config.integer("global_head_dim")
    if config.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in config:
        heads["num_kv_heads"] = config.integer("num_global_key_value_heads")
    return heads


def _attention(
    config: HfConfig, factory: LayerFactory, index: int, *, kind: str, source: tuple[int, Attention] | None
) -> Attention:
    name, eps = f"layers.{index}.attention", config.number("rms_norm_eps", 1e-6)
    heads, has_bias = _heads(config, kind, index), config.flag("attention_bias", False)
    shares_keys = kind == FULL and config.flag("attention_k_eq_v", False)
    steps: list[HeadStep] = [KeysAsValues(heads["head_dim"])] if shares_keys else []
    steps += [factory.value_norm(heads["head_dim"], eps=eps), HandedOn(index)]
    return factory.attention(
        name,
        **heads,
        rope=kind,
        scale=1.0,
        window=config.integer("sliding_window") if kind == SLIDING else None,
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_values=not shares_keys,
        q_norm=factory.head_norm(f"{name}.q_norm", heads["head_dim"], eps=eps),
        k_norm=factory.head_norm(f"{name}.k_norm", heads["head_dim"], eps=eps) if source is None else source[1].k_norm,
        steps=steps if source is None else [TakenOver(source[0])],
        source=source,
    )


def _layer(
    config: HfConfig,
    factory: LayerFactory,
    index: int,
    *,
    kind: str,
    inputs: LayerInputs | None,
    source: tuple[int, Attention] | None,
) -> Gemma4Layer:
    name = f"layers.{index}"
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    act = config.text("hidden_activation", "gelu_pytorch_tanh")
    is_wide = source is not None and config.flag("use_double_wide_mlp", False)

    def norm(part: str) -> Norm:
        return factory.norm(f"{name}.{part}", hidden_size, eps=eps)

    layer = Gemma4Layer(
        input_norm=norm("input_norm"),
        attention=_attention(config, factory, index, kind=kind, source=source),
        attention_post_norm=norm("attention_post_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=factory.mlp(
            f"{name}.mlp",
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size") * (2 if is_wide else 1),
            act=act,
        ),
        mlp_post_norm=norm("mlp_post_norm"),
    )
    layer.experts = _experts(config, factory, f"{name}.experts") if config.flag("enable_moe_block", False) else None
    layer.own = None
    if inputs is not None:
        layer.own = layer_input(factory, f"{name}.own", inputs, layer=index, hidden_size=hidden_size, act=act, eps=eps)
    layer.factor = factory.factor(f"{name}.factor")
    return layer


def _experts(config: HfConfig, factory: LayerFactory, name: str) -> BesideMlp:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
    experts = factory.experts(
        name,
        hidden_size=hidden_size,
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=Routing(config.integer("num_experts"), config.integer("top_k_experts"), normalise=True),
        act=expert_act(config.text("hidden_activation", "gelu_pytorch_tanh")),
        has_expert_scale=True,
    )

    def norm(part: str) -> Norm:
        return factory.norm(f"{name}.{part}", hidden_size, eps=eps)

    return BesideMlp(
        experts,
        seen_norm=norm("seen_norm"),
        norm=norm("norm"),
        mlp_post_norm=norm("mlp_post_norm"),
        post_norm=norm("post_norm"),
        scale=hidden_size**-0.5,
    )
