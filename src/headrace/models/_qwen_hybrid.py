"""What Qwen's hybrids share: layers of Gated DeltaNet between those of gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.layers.causal import TEXT_PREFIXES, CausalLm
from headrace.layers.decoder import PRE_NORM_RULES, QK_NORM_RULES, PreNormLayer
from headrace.layers.delta_net import DeltaSizes, delta_net
from headrace.layers.experts import Experts, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.gated import gated_attention
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.recurrent import RecurrentPreNormLayer, state_dtype
from headrace.layers.rope import RopeSettings, max_position, rope_settings
from headrace.layers.weights import Fused
from headrace.models._qwen_moe import qwen_mlp

LINEAR, FULL = "linear_attention", "full_attention"

BLOCK, PART = "model.layers.*.linear_attn", "layers.*.delta"
RULES: Mapping[str, str] = {
    **PRE_NORM_RULES,
    **QK_NORM_RULES,
    **expert_rules("model.layers.*.mlp", "layers.*.mlp", shared="shared_expert"),
    f"{BLOCK}.in_proj_qkvz.*": f"{PART}.in.*:qkvz",
    f"{BLOCK}.in_proj_ba.*": f"{PART}.rates.*:ba",
    **{f"{BLOCK}.in_proj_{slot}.*": f"{PART}.in.*:{slot}" for slot in ("q", "k", "v", "z")},
    f"{BLOCK}.in_proj_b.*": f"{PART}.rates.*:b",
    f"{BLOCK}.in_proj_a.*": f"{PART}.rates.*:a",
    **{f"{BLOCK}.conv1d.{slot}.weight": f"{PART}.conv:{slot}" for slot in ("q", "k", "v")},
    f"{BLOCK}.A_log": f"{PART}.decay",
    f"{BLOCK}.dt_bias": f"{PART}.time_bias",
    f"{BLOCK}.norm.weight": f"{PART}.norm",
    f"{BLOCK}.out_proj.*": f"{PART}.out.*",
}

LEFT_OUT = ("model.visual.**", "visual.**")
"""What checkpoints hold beside the language model."""
VISION_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
"""Of ropes: how positions of images are told apart; those of text are all the same."""


DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""What transformers takes for keys that a config of any of them leaves out."""


class QwenHybrid(CausalLm):
    """Pre-norm decoder. Subclasses say what a config leaves out and how checkpoints order the recurrent projections."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full", "state"})
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    is_grouped: ClassVar[bool] = False
    """Recurrent projections lie together by key head."""

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        is_tied = config.flag("tie_word_embeddings", False)
        text = (config.section("text_config") if "text_config" in config else config).with_defaults(self.defaults)
        text = HfConfig({**text, "tie_word_embeddings": is_tied}, place=text.place)
        text.only({"hidden_act": "silu"})  # of the convolution too
        kinds = _kinds(text)
        eps = text.number("rms_norm_eps", 1e-6)
        super().__init__(
            text,
            factory,
            layer=lambda name, index: self._layer(text, factory, name, index, kinds[index]),
            rules=RULES,
            norm=factory.norm("norm", text.integer("hidden_size"), eps=eps, plus_one=True),
            ropes={"all": factory.rotary(_rope(text), text.head_dim())},
            positions=max_position(_text_only(text)),
            ignored=LEFT_OUT,
            kept=("mtp.**",),
            fused=_fused(DeltaSizes.of(text)) if LINEAR in kinds else {},
            renamed=TEXT_PREFIXES,
        )

    def _layer(
        self, config: HfConfig, factory: LayerFactory, name: str, index: int, kind: str
    ) -> PreNormLayer | RecurrentPreNormLayer:
        hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps", 1e-6)
        input_norm = factory.norm(f"{name}.input_norm", hidden_size, eps=eps, plus_one=True)
        mlp_norm = factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps, plus_one=True)
        mlp = self.mlp(config, factory, f"{name}.mlp", index)
        if kind == LINEAR:
            mixer = delta_net(
                factory,
                f"{name}.delta",
                hidden_size=hidden_size,
                sizes=DeltaSizes.of(config),
                eps=eps,
                is_grouped=self.is_grouped,
                state_dtype=state_dtype(factory, config),
            )
            return RecurrentPreNormLayer(input_norm=input_norm, mixer=mixer, mlp_norm=mlp_norm, mlp=mlp)
        head_dim = config.head_dim()
        attention = gated_attention(
            factory,
            f"{name}.attention",
            **config.heads(),
            rope="all",
            bias=config.flag("attention_bias", False),
            q_norm=factory.head_norm(f"{name}.attention.q_norm", head_dim, eps=eps, plus_one=True),
            k_norm=factory.head_norm(f"{name}.attention.k_norm", head_dim, eps=eps, plus_one=True),
        )
        return PreNormLayer(input_norm=input_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)

    def mlp(self, config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
        return factory.mlp(
            name,
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            act=config.text("hidden_act", "silu"),
        )


class QwenHybridMoe(QwenHybrid):
    """With experts, and a shared one behind a gate."""

    has_experts: ClassVar[bool] = True

    def mlp(self, config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
        return qwen_mlp(config, factory, name, index, count=256, normalises=True, has_shared=True)


def _kinds(config: HfConfig) -> list[str]:
    """`layer_types`, or full attention every `full_attention_interval` layers."""
    stated = config.kinds("layer_types", (LINEAR, FULL))
    if stated is not None:
        return stated
    every = config.integer("full_attention_interval", 4)
    return [LINEAR if (layer + 1) % every else FULL for layer in range(config.integer("num_hidden_layers"))]


def _text_only(config: HfConfig) -> HfConfig:
    """Without the rope keys that are about images."""
    for place in ("rope_parameters", "rope_scaling"):
        stated = config.get(place)
        if isinstance(stated, Mapping):
            kept = {key: value for key, value in stated.items() if key not in VISION_KEYS}
            return HfConfig({**config, place: kept}, place=config.place)
    return config


def _rope(config: HfConfig) -> RopeSettings:
    return rope_settings(_text_only(config))


def _fused(sizes: DeltaSizes) -> Fused:
    keys, values = sizes.num_k_heads * sizes.k_dim, sizes.num_v_heads * sizes.v_dim
    rows = {"q": keys, "k": keys, "v": values}
    return {
        f"{BLOCK}.conv1d.weight": {f"{BLOCK}.conv1d.{slot}.weight": count for slot, count in rows.items()},
        f"{BLOCK}.in_proj_qkv.*": {f"{BLOCK}.in_proj_{slot}.*": count for slot, count in rows.items()},
    }
