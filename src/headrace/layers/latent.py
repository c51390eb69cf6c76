"""Multi-head latent attention (DeepSeek-AI 2024): everything of the block but attending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.attention._compressed import PoolProjected
from headrace.attention._latent import Choice, IndexProjected, LatentProjected, LatentSpec
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.indexer import Indexer
from headrace.layers.linear import Linear, Output, column_linear
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, Mixer, Rope
from headrace.layers.rope import RopeSettings, score_scale
from headrace.layers.weights import Parameter

LATENT_RULES = {
    "model.layers.*.self_attn.kv_a_proj_with_mqa.*": "layers.*.attention.down.*:kv",
    "model.layers.*.self_attn.kv_a_layernorm.weight": "layers.*.attention.kv_norm.weight",
    "model.layers.*.self_attn.kv_b_proj.*": "layers.*.attention.kv.*:kv",
    "model.layers.*.self_attn.o_proj.*": "layers.*.attention.out.*",
}
"""The names that Hugging Face checkpoints use, but for the queries."""

NORM_EPS = 1e-6
"""Of the norms of low ranks, whatever `rms_norm_eps` is, in DeepSeek's code and in what follows it."""

DIRECT_QUERY_RULES = {"model.layers.*.self_attn.q_proj.*": "layers.*.attention.q.*:q"}
LOW_RANK_QUERY_RULES = {
    "model.layers.*.self_attn.q_a_proj.*": "layers.*.attention.down.*:q",
    "model.layers.*.self_attn.q_a_layernorm.weight": "layers.*.attention.q_norm.weight",
    "model.layers.*.self_attn.q_b_proj.*": "layers.*.attention.q.*:q",
}


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """As a config states them; heads are the whole model's."""

    num_heads: int
    q_rank: int | None
    """None: queries are projected in one step."""
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def rules(self) -> dict[str, str]:
        return {**LATENT_RULES, **(DIRECT_QUERY_RULES if self.q_rank is None else LOW_RANK_QUERY_RULES)}

    @classmethod
    def of(cls, config: HfConfig) -> LatentSizes:
        return cls(
            num_heads=config.integer("num_attention_heads"),
            q_rank=config.optional_integer("q_lora_rank"),
            rank=config.integer("kv_lora_rank"),
            nope_dim=config.integer("qk_nope_head_dim"),
            rope_dim=config.integer("qk_rope_head_dim", least=0),
            v_dim=config.integer("v_head_dim"),
        )


class Unfold:
    """The functions from latents to keys and values, by head, as matrices that attention absorbs."""

    def __init__(self, linear: Linear, *, num_heads: int, nope_dim: int, rank: int) -> None:
        """linear: from the latent to (key, value) of each head of this rank in turn."""
        self.linear = linear
        self._shape = (num_heads, -1, rank)
        self._nope_dim = nope_dim
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.linear.parameters

    def finish(self) -> None:
        self.linear.finish()
        weight = self.linear.take_plain().view(self._shape)
        self._keys = weight[:, : self._nope_dim].contiguous()
        self._values = weight[:, self._nope_dim :].contiguous()

    def ready(self) -> tuple[Tensor, Tensor]:
        """([heads, nope_dim, rank], [heads, v_dim, rank])"""
        assert self._keys is not None and self._values is not None, f"{self.linear.name} is not loaded"
        return self._keys, self._values


class Chooser(Protocol):
    """An indexer of any kind."""

    def project(self, act: Act, q_act: Act, rope: Rope) -> IndexProjected | PoolProjected:
        """
        Args:
            act: [tokens, hidden], what the layer's first products take.
            q_act: [tokens, q rank], what queries are made of.
        """
        ...


class LatentAttention:
    """The projections around attending. `down` yields what queries and latents are made of, in one product."""

    def __init__(
        self,
        *,
        down: Linear,
        q_norm: Norm | None,
        q: Linear,
        kv_norm: Norm,
        unfold: Unfold,
        out: Linear,
        spec: LatentSpec,
        rope: str,
        interleaved: bool,
        indexer: Chooser | None = None,
        is_sparse: bool = False,
    ) -> None:
        """
        Args:
            q_norm: None: queries are made of the hidden state itself.
            indexer: chooses what queries see; without one a sparse layer takes what the last one before it chose.
        """
        self.down = down
        self.q_norm = q_norm
        self.q = q
        self.kv_norm = kv_norm
        self.unfold = unfold
        self.out = out
        self.spec = spec
        self.rope = rope
        self.interleaved = interleaved
        self.indexer = indexer
        self.is_sparse = is_sparse
        if q_norm is not None and indexer is None:
            q_norm.feed(q)

    def feed_from(self, norm: Norm) -> None:
        """The norm before the block makes what its first product takes; two products take it plain."""
        if self.q_norm is not None and self.indexer is None:
            norm.feed(self.down)

    def project(self, act: Act, step: ForwardStep) -> LatentProjected:
        """[tokens, hidden] -> queries and latents, and what is owed to them"""
        spec = self.spec
        parts = self.down(act)
        kv = parts[:, -(spec.rank + spec.rope_dim) :]
        q_act = act
        if self.q_norm is not None:
            q_act = self.q_norm(None, parts[:, : -(spec.rank + spec.rope_dim)].contiguous())[0]
        latent = self.kv_norm(None, kv[:, : spec.rank].contiguous())[0].data
        rope = step.ropes[self.rope]
        k_up, v_up = self.unfold.ready()
        index = None if self.indexer is None else self.indexer.project(act, q_act, rope)
        return LatentProjected(
            q=self.q(q_act).unflatten(-1, (spec.num_heads, spec.nope_dim + spec.rope_dim)),
            latent=latent,
            k_rope=kv[:, spec.rank :],
            cos=rope.cos,
            sin=rope.sin,
            k_up=k_up,
            v_up=v_up,
            interleaved=self.interleaved,
            index=index,
            choice=step.carried.setdefault("choice", Choice()) if self.is_sparse else None,
        )

    def attend(self, mixer_input: LatentProjected, mixer: Mixer) -> Act:
        return mixer(mixer_input, self.out.wanted)

    def output(self, mixed: Act) -> Tensor:
        """[tokens, heads * v_dim] -> [tokens, hidden], partial"""
        return self.out(mixed)


def latent_attention(
    factory: LayerFactory,
    name: str,
    *,
    hidden_size: int,
    sizes: LatentSizes,
    settings: RopeSettings,
    bias: bool,
    interleaved: bool,
    eps: float = NORM_EPS,
    rope: str = "all",
    indexer: Chooser | None = None,
    is_sparse: bool = False,
) -> LatentAttention:
    """Modules `{name}.down` (slots q, kv), `{name}.q_norm`, `{name}.q`, `{name}.kv_norm`, `{name}.kv`, `{name}.out`.

    Args:
        settings: of the rope; YaRN scales the scores too.
        bias: of the first and the last product.
        eps: of the norms of low ranks.
    """
    heads = factory.parallel.heads(sizes.num_heads, sizes.num_heads)
    start, stop = heads.q
    q_dim, kv_dim = sizes.nope_dim + sizes.rope_dim, sizes.nope_dim + sizes.v_dim

    def by_heads(slot: str, dim: int) -> list[Output]:
        return [Output(slot, sizes.num_heads * dim, (start * dim, stop * dim))]

    down = [Output("kv", sizes.rank + sizes.rope_dim, (0, sizes.rank + sizes.rope_dim))]
    if sizes.q_rank is not None:
        down.insert(0, Output("q", sizes.q_rank, (0, sizes.q_rank)))
    unfold = _unfold(factory, f"{name}.kv", sizes, by_heads("kv", kv_dim))
    q_features = hidden_size if sizes.q_rank is None else sizes.q_rank
    return LatentAttention(
        down=factory.column(f"{name}.down", hidden_size, down, bias=bias),
        q_norm=None if sizes.q_rank is None else factory.norm(f"{name}.q_norm", sizes.q_rank, eps=eps),
        q=factory.column(f"{name}.q", q_features, by_heads("q", q_dim), bias=False),
        kv_norm=factory.norm(f"{name}.kv_norm", sizes.rank, eps=eps),
        unfold=unfold,
        out=factory.row(
            f"{name}.out",
            sizes.num_heads * sizes.v_dim,
            hidden_size,
            share=(start * sizes.v_dim, stop * sizes.v_dim),
            bias=bias,
        ),
        spec=LatentSpec(
            num_heads=stop - start,
            rank=sizes.rank,
            rope_dim=sizes.rope_dim,
            nope_dim=sizes.nope_dim,
            v_dim=sizes.v_dim,
            scale=q_dim**-0.5 * score_scale(settings),
            index=indexer.spec if isinstance(indexer, Indexer) else None,
        ),
        rope=rope,
        interleaved=interleaved,
        indexer=indexer,
        is_sparse=is_sparse,
    )


def _unfold(factory: LayerFactory, name: str, sizes: LatentSizes, outputs: Sequence[Output]) -> Unfold:
    """outputs: keys and values by head, this rank's share of them."""
    linear = column_linear(
        name, sizes.rank, outputs,
        bias=False, recipe=factory.recipe_of(name, [out.name for out in outputs]), dtype=factory.dtype,
        device=factory.device,
    )  # fmt: skip
    num_heads = outputs[0].local_features // (sizes.nope_dim + sizes.v_dim)
    unfold = Unfold(linear, num_heads=num_heads, nope_dim=sizes.nope_dim, rank=sizes.rank)
    factory.modules.append(unfold)
    return unfold
