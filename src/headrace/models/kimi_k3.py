"""Kimi-K3 (Moonshot AI 2026), its language model: Kimi Linear's layers with attention over residuals between them.

What it has beyond `kimi_linear.py`, each switched by a key of the published config: a mix of earlier stretches' sums
before every block (`attn_res_block_size`), routed experts on a latent with a norm behind their sum
(`routed_expert_hidden_size`, `latent_moe_use_norm`), SiTU in every MLP, a gate on latent attention's result
(`mla_use_output_gate`), and in KDA a gate made in one product and a decay that is bounded (`use_full_rank_gate`,
`gate_lower_bound`). Latent attention has its 64 features beside the latent, but nothing turns them.

transformers has no such model. Sources: keys, names and shapes of the released checkpoint, and formulas of the code
that comes with it, as public ports (TensorRT-LLM, vLLM for Ascend, llama.cpp, mlxcel) and line-by-line descriptions
state them; they follow the technical report (arXiv:2607.24653) and Attention Residuals (arXiv:2603.15031). Where
ports differ the checkpoint's own code counts: the norms of latent attention's low ranks have an epsilon of 1e-6
whatever `rms_norm_eps` is. `A_log` is stored with zeros behind its heads (96 of 128), as several that read it say; a
checkpoint with anything else there is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.layers.causal import TEXT_PREFIXES, CausalLm, text_section
from headrace.layers.decoder import PRE_NORM_RULES, PreNormLayer
from headrace.layers.depth import DEPTH_RULES, Depth, DepthLayer, DepthRecurrentLayer, deepened, depth_mix_of
from headrace.layers.experts import ExpertAct, Experts, corrected_routing, expert_act, expert_rules
from headrace.layers.factory import LayerFactory
from headrace.layers.gated import GatedLatent, gated_latent
from headrace.layers.hf_config import HfConfig
from headrace.layers.kimi_delta import KimiDelta, KimiDeltaSizes, beside_delta, full_layers, kimi_delta
from headrace.layers.latent import LatentAttention, LatentSizes, latent_attention
from headrace.layers.latent_experts import experts_latent
from headrace.layers.mlp import Mlp
from headrace.layers.pooled import no_features
from headrace.layers.port import Act, Layer, Rope
from headrace.layers.recurrent import RecurrentPreNormLayer, state_dtype
from headrace.layers.rope import rope_settings

__all__ = ["KimiK3Model"]

EXPERTS = "model.layers.*.block_sparse_moe"
SITU = "situ"

RULES: Mapping[str, str] = {
    **{name: place for name, place in PRE_NORM_RULES.items() if ".self_attn." not in name},
    **expert_rules(EXPERTS, "layers.*.mlp", names=("w1", "w3", "w2")),
    f"{EXPERTS}.routed_expert_down_proj.*": "layers.*.mlp.into_latent.*",
    f"{EXPERTS}.routed_expert_norm.weight": "layers.*.mlp.latent_norm.weight",
    f"{EXPERTS}.routed_expert_up_proj.*": "layers.*.mlp.from_latent.*",
}
GATE_RULES = {"model.layers.*.self_attn.g_proj.*": "layers.*.attention.gate.*"}
"""Of latent attention; KDA calls its own the same."""
NOT_TEXT = ("vision_tower.**", "mm_projector.**")

ALIASES: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
}
"""This model's keys -> those that others have for the same."""
DELTA_KEYS = frozenset({
    "full_attn_layers", "gate_lower_bound", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size",
    "use_full_rank_gate",
})  # fmt: skip
OWN_KEYS = frozenset({
    "activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size", "latent_moe_use_norm",
    "mla_use_nope", "mla_use_output_gate", "mla_use_rope", "moe_intermediate_size", "moe_layer_freq",
    "moe_renormalize", "moe_router_activation_func", "routed_expert_hidden_size",
})  # fmt: skip
OWN_PREFIXES = ("activation_", "attn_res_", "kda_", "latent_moe_", "mla_", "moe_", "routed_expert_")
"""A key that begins so and is none of OWN_KEYS would change what is computed, in a way that is not known here."""
ONLY: Mapping[str, Any] = {
    "mla_use_nope": True,
    "mla_use_rope": False,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
}
"""Keys with the one value that is published, and whose others nothing says the meaning of."""


class KimiK3Model(CausalLm):
    """Images and videos are not read."""

    model_types = ("kimi_k3",)
    layer_kinds = frozenset({"latent", "state"})
    has_experts = True
    reads_mxfp4 = True

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = _checked(text_section(config) if "text_config" in config else config)
        full, num_layers = full_layers(config), config.integer("num_hidden_layers")
        stretch, hidden_size = config.optional_integer("attn_res_block_size"), config.integer("hidden_size")
        self.num_stretches = 0 if stretch is None else -(-num_layers // stretch)
        eps = config.number("rms_norm_eps")
        self.depths = depth_mix_of(factory, "depths", hidden_size, eps=eps) if self.num_stretches else None
        latent_rules = {**LatentSizes.of(config).rules, **GATE_RULES}
        super().__init__(
            config,
            factory,
            layer=lambda name, index: _layer(config, factory, name, index, is_full=index in full),
            rules={**RULES, **DEPTH_RULES, **beside_delta(latent_rules, sorted(full))},
            ropes={},
            positions=config.integer("max_position_embeddings"),
            ignored=NOT_TEXT,
            renamed=TEXT_PREFIXES,
        )

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        """Nothing is turned: the layers between know where a token is."""
        return {"all": no_features(positions)}

    def embed(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, stretches + 1, hidden], or [tokens, hidden] without attention over residuals"""
        hidden = super().embed(ids)
        return deepened(hidden, self.num_stretches) if self.num_stretches else hidden

    def final(self, partial: Tensor | None, residual: Tensor) -> Act:
        if self.depths is None:
            return super().final(partial, residual)
        owed = None if partial is None else self.norm.parallel.collectives.all_reduce(partial)
        return super().final(None, self.depths(residual, self.num_stretches + 1, owed))


def _layer(config: HfConfig, factory: LayerFactory, name: str, index: int, *, is_full: bool) -> Layer:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    input_norm = factory.norm(f"{name}.input_norm", hidden_size, eps=eps)
    mlp_norm = factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps)
    mlp = _mlp(config, factory, name, index)
    block = _attention(config, factory, f"{name}.attention") if is_full else _delta(config, factory, f"{name}.delta")
    stretch = config.optional_integer("attn_res_block_size")
    if stretch is None:
        if isinstance(block, KimiDelta):
            return RecurrentPreNormLayer(input_norm=input_norm, mixer=block, mlp_norm=mlp_norm, mlp=mlp)
        return PreNormLayer(input_norm=input_norm, attention=block, mlp_norm=mlp_norm, mlp=mlp)
    parts: dict[str, Any] = {
        "depth": Depth.of(index, stretch),
        "mix_depths": depth_mix_of(factory, f"{name}.mix_depths", hidden_size, eps=eps),
        "input_norm": input_norm,
        "mlp_depths": depth_mix_of(factory, f"{name}.mlp_depths", hidden_size, eps=eps),
        "mlp_norm": mlp_norm,
        "mlp": mlp,
        "parallel": factory.parallel,
    }
    return DepthRecurrentLayer(block, **parts) if isinstance(block, KimiDelta) else DepthLayer(block, **parts)


def _attention(config: HfConfig, factory: LayerFactory, name: str) -> LatentAttention | GatedLatent:
    hidden_size, sizes = config.integer("hidden_size"), LatentSizes.of(config)
    latent = latent_attention(
        factory,
        name,
        hidden_size=hidden_size,
        sizes=sizes,
        settings=rope_settings({"max_position_embeddings": config.integer("max_position_embeddings")}),
        bias=False,
        interleaved=True,
    )
    if not config.flag("mla_use_output_gate", False):
        return latent
    return gated_latent(factory, name, latent, hidden_size=hidden_size, sizes=sizes)


def _delta(config: HfConfig, factory: LayerFactory, name: str) -> KimiDelta:
    stated = config.section("linear_attn_config")
    num_heads, dim = stated.integer("num_heads"), stated.integer("head_dim")
    return kimi_delta(
        factory,
        name,
        hidden_size=config.integer("hidden_size"),
        sizes=KimiDeltaSizes(
            num_heads=num_heads,
            dim=dim,
            kernel=stated.integer("short_conv_kernel_size", least=2),
            lower_bound=stated.optional_negative("gate_lower_bound"),
            is_decay_flat=True,
            num_spare_decays=max(dim - num_heads, 0),
            has_full_gate=stated.flag("use_full_rank_gate", False),
        ),
        eps=config.number("rms_norm_eps"),
        state_dtype=state_dtype(factory, config),
    )


def _mlp(config: HfConfig, factory: LayerFactory, name: str, index: int) -> Mlp | Experts:
    hidden_size, act = config.integer("hidden_size"), _act(config)
    if index < config.integer("first_k_dense_replace", least=0):
        inner = config.integer("intermediate_size")
        return factory.mlp(f"{name}.mlp", hidden_size=hidden_size, intermediate_size=inner, act=act)
    inner, size = config.integer("moe_intermediate_size"), config.optional_integer("routed_expert_hidden_size")
    num_shared = config.integer("num_shared_experts", least=0)
    norm_eps = config.number("rms_norm_eps") if config.flag("latent_moe_use_norm", False) else None
    routing = corrected_routing(config, config.integer("num_experts"))
    return factory.experts(
        f"{name}.mlp",
        hidden_size=hidden_size,
        intermediate_size=inner,
        # The weight of one chosen expert alone stays as it is.
        routing=replace(routing, normalise=routing.normalise and routing.top_k > 1),
        act=act,
        router_dtype=torch.float32,
        has_correction=True,
        shared_size=inner * num_shared or None,
        shared_act=act,
        latent=experts_latent(factory, f"{name}.mlp", hidden_size=hidden_size, size=size, norm_eps=norm_eps),
    )


def _act(config: HfConfig) -> ExpertAct:
    """SiTU, whose bounds stand beside it, or an activation of others."""
    name = config.text("hidden_act", SITU)
    if name != SITU:
        return expert_act(name)
    if "activation_situ_beta" not in config:
        raise ValueError(f"{config.place}: hidden_act {SITU!r} needs activation_situ_beta")
    limit = config.positive("activation_situ_linear_beta") if "activation_situ_linear_beta" in config else None
    return ExpertAct(SITU, alpha=config.positive("activation_situ_beta"), limit=limit)


def _checked(config: HfConfig) -> HfConfig:
    """Under keys that the layers know, once none of the config's says what isn't known here."""
    config.only(ONLY)
    strange = [key for key in config if key.startswith(OWN_PREFIXES) and key not in OWN_KEYS]
    delta = config.section("linear_attn_config")
    strange += [f"linear_attn_config.{key}" for key in delta if key not in DELTA_KEYS]
    if strange:
        raise ValueError(
            f"{config.place}: {', '.join(sorted(strange))}: not known of Kimi-K3: such a model isn't served"
        )
    if config.flag("latent_moe_use_norm", False) and "routed_expert_hidden_size" not in config:
        raise ValueError(f"{config.place}: latent_moe_use_norm needs routed_expert_hidden_size")
    return config.renamed(ALIASES)
