"""A whole decoder from a config whose keys, and a checkpoint whose names, are the usual ones: what a model file starts
from when only its layers are its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from headrace.layers.decoder import ROTARY_NAMES, Decoder
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mlp import Mlp
from headrace.layers.norm import Norm
from headrace.layers.port import Layer, Model
from headrace.layers.rope import Rotary, max_position, rope_settings
from headrace.layers.weights import Fused, WeightMap

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
TEXT_PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Of the language model in multimodal checkpoints, newer and older -> of it alone; `renamed` of a `WeightMap`."""


class CausalLm(Decoder):
    """Embedding, layers, final norm and head, and their weight map."""

    def __init__(
        self,
        config: HfConfig,
        factory: LayerFactory,
        *,
        layer: Callable[[str, int], Layer],
        rules: Mapping[str, str],
        norm: Norm | None = None,
        eps: float = 1e-6,
        ropes: Mapping[str, Rotary] | None = None,
        positions: int | None = None,
        logit_scale: float = 1.0,
        soft_cap: float | None = None,
        ignored: Sequence[str] = (),
        kept: Sequence[str] = (),
        fused: Fused | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            config: with the defaults of its architecture filled in.
            layer: makes the layer of this name and index.
            norm: the last one; None is an RMS norm of `rms_norm_eps`, of `eps` where a config states none.
            ropes: by kind; None is one kind, "all", from the usual keys.
            positions: None is what the rope keys of a config for all layers allow.
            ignored: names beside `ROTARY_NAMES`.
            kept, fused, renamed: as in `WeightMap`.
        """
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        is_tied = config.flag("tie_word_embeddings", False)
        tied = TIED if is_tied else {}
        factory.read(
            WeightMap((), rules, (*ROTARY_NAMES, *ignored), tied, renamed=renamed or {}, fused=fused or {}, kept=kept)
        )
        embedding = factory.embedding("embed", vocab_size, hidden_size)
        super().__init__(
            embedding=embedding,
            layers=[layer(f"layers.{index}", index) for index in range(config.integer("num_hidden_layers"))],
            norm=norm or factory.norm("norm", hidden_size, eps=config.number("rms_norm_eps", eps)),
            head=factory.head(
                "head",
                vocab_size,
                hidden_size,
                tied_to=embedding if is_tied else None,
                scale=logit_scale,
                soft_cap=soft_cap,
            ),
            ropes=ropes if ropes is not None else {"all": factory.rotary(rope_settings(config), config.head_dim())},
            max_position=max_position(config) if positions is None else positions,
        )
        self._weights = factory.weight_map()

    def weight_map(self) -> WeightMap:
        return self._weights


class TextOf:
    """The language model of a multimodal checkpoint: its names have prefixes, and other parts stand beside it."""

    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full"})
    has_experts: ClassVar[bool] = False
    reads_mxfp4: ClassVar[bool] = False
    """Whether its experts may be stored in MXFP4."""
    is_capturable: ClassVar[bool] = True
    """As in `Decoder`."""

    def __init__(
        self,
        make: Callable[[], Model],
        factory: LayerFactory,
        *,
        renamed: Mapping[str, str],
        ignored: Sequence[str],
    ) -> None:
        """make: the language model, from this factory."""
        factory.read(WeightMap((), {}, ignored, renamed=renamed))
        text = make()
        self.layers = text.layers
        self.vocab_size = text.vocab_size
        self.max_position = text.max_position
        self.ropes, self.embed, self.final, self.head = text.ropes, text.embed, text.final, text.head
        self._weights = text.weight_map()

    def weight_map(self) -> WeightMap:
        return self._weights


def text_section(config: HfConfig) -> HfConfig:
    """`text_config`, which may leave whether head and embedding are tied to the config around it."""
    text = config.section("text_config")
    tie = config.get("tie_word_embeddings")
    return text if tie is None else text.with_defaults({"tie_word_embeddings": tie})


def gated_mlp(config: HfConfig, factory: LayerFactory, name: str) -> Mlp:
    """`{name}.mlp` from the usual keys."""
    return factory.mlp(
        f"{name}.mlp",
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        act=config.text("hidden_act", "silu"),
        bias=config.flag("mlp_bias", False),
    )


def fused_names(config: HfConfig) -> Fused:
    """q, k and v in one checkpoint tensor, gate and up in another (Phi 3)."""
    heads = config.heads()
    kv_rows, inner = heads["num_kv_heads"] * heads["head_dim"], config.integer("intermediate_size")
    attention = "model.layers.*.self_attn"
    return {
        f"{attention}.qkv_proj.*": {
            f"{attention}.q_proj.*": heads["num_heads"] * heads["head_dim"],
            f"{attention}.k_proj.*": kv_rows,
            f"{attention}.v_proj.*": kv_rows,
        },
        **fused_mlp_names(inner),
    }


def fused_mlp_names(intermediate_size: int, mlp: str = "model.layers.*.mlp") -> Fused:
    return {f"{mlp}.gate_up_proj.*": {f"{mlp}.gate_proj.*": intermediate_size, f"{mlp}.up_proj.*": intermediate_size}}
