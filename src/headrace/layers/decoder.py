"""The plain pre-norm decoder that most architectures are, put together from parts that the model file chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from headrace.layers.attention import AttentionBlock
from headrace.layers.embedding import Embedding, Head
from headrace.layers.experts import Experts
from headrace.layers.mlp import Mlp, PlainMlp
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, Layer, Mixer, Rope
from headrace.layers.rope import Rotary

COMMON_RULES: Mapping[str, str] = {
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.*.self_attn.q_proj.*": "layers.*.attention.qkv.*:q",
    "model.layers.*.self_attn.k_proj.*": "layers.*.attention.qkv.*:k",
    "model.layers.*.self_attn.v_proj.*": "layers.*.attention.qkv.*:v",
    "model.layers.*.self_attn.k_scale": "layers.*.attention.qkv.k_scale:k",
    "model.layers.*.self_attn.v_scale": "layers.*.attention.qkv.v_scale:v",
    "model.layers.*.self_attn.o_proj.*": "layers.*.attention.out.*",
    "model.layers.*.mlp.gate_proj.*": "layers.*.mlp.gate_up.*:gate",
    "model.layers.*.mlp.up_proj.*": "layers.*.mlp.gate_up.*:up",
    "model.layers.*.mlp.down_proj.*": "layers.*.mlp.down.*",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
"""The names that Hugging Face checkpoints use for all but the norms of layers."""

PRE_NORM_RULES: Mapping[str, str] = {
    **COMMON_RULES,
    "model.layers.*.input_layernorm.weight": "layers.*.input_norm.weight",
    "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm.weight",
}

QK_NORM_RULES: Mapping[str, str] = {
    "model.layers.*.self_attn.q_norm.weight": "layers.*.attention.q_norm.weight",
    "model.layers.*.self_attn.k_norm.weight": "layers.*.attention.k_norm.weight",
}

POST_NORM_RULES: Mapping[str, str] = {
    **COMMON_RULES,
    "model.layers.*.post_attention_layernorm.weight": "layers.*.attention_post_norm.weight",
    "model.layers.*.post_feedforward_layernorm.weight": "layers.*.mlp_post_norm.weight",
}

SANDWICH_RULES: Mapping[str, str] = {
    **POST_NORM_RULES,
    "model.layers.*.input_layernorm.weight": "layers.*.input_norm.weight",
    "model.layers.*.pre_feedforward_layernorm.weight": "layers.*.mlp_norm.weight",
}

ROTARY_NAMES: Sequence[str] = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
"""Tables that old checkpoints carry; they are computed here."""


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, *, input_norm: Norm, attention: AttentionBlock, mlp_norm: Norm, mlp: Mlp | PlainMlp | Experts
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        attention.feed_from(input_norm)
        mlp.feed_from(mlp_norm)

    @property
    def spec(self) -> Any:
        return self.attention.spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        act, residual = self.input_norm(partial, residual)
        return self.attention.project(act, step), residual

    def mix(self, mixer_input: Any, mixer: Mixer) -> Act:
        return self.attention.attend(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        act, residual = self.mlp_norm(self.attention.output(mixed), residual)
        return self.mlp(act), residual


class Decoder:
    """Embedding, layers, final norm, head; architectures derive from it and declare their weight map."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full"})
    """What layers may be: `full`, `window`, `latent`, another kind of attention, or `state` (recurrent)."""
    has_experts: ClassVar[bool] = False
    reads_mxfp4: ClassVar[bool] = False
    """Whether its experts may be stored in MXFP4."""
    is_capturable: ClassVar[bool] = True
    """Whether its steps may run as CUDA graphs."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: Norm,
        head: Head,
        ropes: Mapping[str, Rotary],
        max_position: int,
    ) -> None:
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.vocab_head = head
        self.rotaries = dict(ropes)
        self.vocab_size = embedding.vocab_size
        self.max_position = max_position

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        return {kind: rotary(positions) for kind, rotary in self.rotaries.items()}

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def final(self, partial: Tensor | None, residual: Tensor) -> Act:
        return self.norm(partial, residual)[0]

    def head(self, hidden: Act) -> Tensor:
        return self.vocab_head(hidden)
