"""The layer factory: a model asks for parts, the factory knows dtype, device, ranks and recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from headrace.attention.port import AttentionSpec
from headrace.kernels.moe.port import ExpertAct, Routing
from headrace.layers.attention import Attention, KvScales
from headrace.layers.embedding import Embedding, Head
from headrace.layers.experts import Experts, ExpertsBuilder, ExpertsLatent, ExpertsSetup, FusedForm
from headrace.layers.heads import HeadStep, Sinks, UnitNorm, ValueNorm, WholeNorm, WholeNorms, num_copies
from headrace.layers.linear import Linear, Output, column_linear, replicated_linear, row_linear
from headrace.layers.mlp import ClampedMlp, Mlp, PlainMlp, activation, plain_activation
from headrace.layers.norm import CentredScale, Factor, HeadNorm, Norm, Scale
from headrace.layers.parallel import ParallelContext
from headrace.layers.rope import RopeSettings, Rotary
from headrace.layers.weights import LinearNames, Loadable, Part, Slot, WeightMap
from headrace.quant.none import Dense
from headrace.quant.port import Recipe

SILU = ExpertAct()
RecipeChoice = Callable[[LinearNames], Recipe]
"""A linear -> how its weight is stored."""


class LayerFactory:
    """Builds the layers of one model on one rank, and remembers those with parameters. One factory a model."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        recipe: RecipeChoice,
        device: torch.device | str = "cpu",
        parallel: ParallelContext | None = None,
        max_len: int | None = None,
        state_dtype: torch.dtype | None = None,
        experts: ExpertsSetup | None = None,
        plain: Recipe | None = None,
    ) -> None:
        """
        Args:
            dtype: of weights and activations.
            max_len: the longest sequence that the engine will run, when the user has limited it.
            state_dtype: of recurrent states; None is the config's, or that of the model.
            plain: of linears that no checkpoint quantises; None is a dense one.
        """
        self.dtype = dtype
        self.recipe = recipe
        self.device = torch.device(device)
        self.parallel = parallel or ParallelContext()
        self.max_len = max_len
        self.state_dtype = state_dtype
        self.experts_setup = experts or ExpertsSetup()
        self.plain = plain or Dense()
        self.modules: list[Loadable] = []
        self._weights = WeightMap((), {})
        """What the model has said of checkpoints."""

    def read(self, weights: WeightMap) -> None:
        """Take what checkpoints call things, to what was taken before; ahead of any linear, since how it is stored may
        go by these names."""
        self._weights = self._weights.with_names(weights)

    def weight_map(self) -> WeightMap:
        """The names that were taken, for the parameters built so far."""
        return replace(self._weights, modules=tuple(self.modules))

    def recipe_of(self, name: str, slots: Sequence[str] = ("",)) -> Recipe:
        """Of a linear, whose weight has these slots."""
        return self.recipe(self._weights.linear_names(name, slots))

    @property
    def is_plain(self) -> bool:
        """Whether the usual linears are stored as they are computed with."""
        return all(
            isinstance(self.recipe(LinearNames(f"layers.0.{part}")), Dense) for part in ("attention.qkv", "mlp.down")
        )

    def norm(self, name: str, features: int, *, eps: float, plus_one: bool = False) -> Norm:
        """An RMS norm over the hidden state.

        Args:
            plus_one: the checkpoint stores the scale less one.
        """
        return Norm(self._scale(name, features, eps=eps, plus_one=plus_one), parallel=self.parallel)

    def layer_norm(
        self,
        name: str,
        features: int,
        *,
        eps: float,
        bias: bool = False,
        plus_one: bool = False,
        kind: type[CentredScale] = CentredScale,
    ) -> Norm:
        """A layer norm (the mean taken off) over the hidden state, or the model file's own `kind`."""
        scale = kind(name, features, eps=eps, bias=bias, plus_one=plus_one, dtype=self.dtype, device=self.device)
        self.modules.append(scale)
        return Norm(scale, parallel=self.parallel)

    def whole_norms(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> WholeNorms:
        """RMS norms of queries and of keys over all heads at once: a step of `attention`. Modules `{name}.q_norm` and
        `{name}.k_norm`."""
        heads = self.parallel.heads(num_heads, num_kv_heads)
        copies = num_copies(num_heads, num_kv_heads, self.parallel)

        def norm(part: str, count: int, share: tuple[int, int], same: int) -> WholeNorm:
            features = count * head_dim
            scale = Scale(
                f"{name}.{part}",
                features,
                eps=eps,
                plus_one=False,
                dtype=self.dtype,
                device=self.device,
                share=(share[0] * head_dim, share[1] * head_dim),
            )
            self.modules.append(scale)
            return WholeNorm(scale, features=features, num_copies=same, parallel=self.parallel)

        return WholeNorms(norm("q_norm", num_heads, heads.q, 1), norm("k_norm", num_kv_heads, heads.kv, copies))

    def value_norm(self, head_dim: int, *, eps: float) -> ValueNorm:
        """An RMS norm without a weight over each value head: a step of `attention`."""
        return ValueNorm(self.unit_norm(head_dim, eps=eps))

    def unit_norm(self, head_dim: int, *, eps: float) -> UnitNorm:
        """An RMS norm without a weight over each head's features."""
        return UnitNorm(head_dim, eps=eps, dtype=self.dtype, device=self.device)

    def factor(self, name: str) -> Factor:
        """A stored number that a layer's result is multiplied with."""
        factor = Factor(name, dtype=self.dtype, device=self.device)
        self.modules.append(factor)
        return factor

    def head_norm(self, name: str, head_dim: int, *, eps: float, plus_one: bool = False) -> HeadNorm:
        """An RMS norm over each attention head's features."""
        return HeadNorm(self._scale(name, head_dim, eps=eps, plus_one=plus_one))

    def linear(self, name: str, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        """A linear layer that every rank computes whole."""
        linear = replicated_linear(
            name, in_features, out_features,
            bias=bias, recipe=self.recipe_of(name), dtype=self.dtype, device=self.device,
        )  # fmt: skip
        self.modules.append(linear)
        return linear

    def plain_linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype | None = None
    ) -> Linear:
        """A linear layer that every rank computes whole and no checkpoint quantises: a router's, an indexer's weights.

        Args:
            dtype: it is held and computed in; None is that of the model.
        """
        linear = replicated_linear(
            name, in_features, out_features,
            bias=bias, recipe=self.plain, dtype=dtype or self.dtype, device=self.device,
        )  # fmt: skip
        self.modules.append(linear)
        return linear

    def attention(
        self,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: str | None,
        interleaved: bool = False,
        scale: float | None = None,
        window: int | None = None,
        is_chunked: bool = False,
        soft_cap: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        steps: Sequence[HeadStep] = (),
        has_sinks: bool = False,
        has_values: bool = True,
        source: tuple[int, Attention] | None = None,
    ) -> Attention:
        """An attention block: modules `{name}.qkv` (slots q, k, v) and `{name}.out`. Heads are the whole model's.

        Args:
            rope: a kind of the model's ropes, or None; `interleaved` turns neighbours (2i, 2i + 1), not i and i + half.
            scale: of the scores, instead of head_dim ** -0.5.
            window: tokens a query sees, itself included; with `is_chunked`, those since the last multiple of it.
            has_values: without, the slot v isn't there, and one of `steps` (`layers/heads.py`) has to make values.
            source: the layer whose keys and values are attended to: queries alone, and `TakenOver` the first step.
            has_sinks: a logit per head takes part in the softmax's sum: module `{name}.sinks`.
        """
        heads = self.parallel.heads(num_heads, num_kv_heads)
        q_share, kv_share = ((start * head_dim, stop * head_dim) for start, stop in (heads.q, heads.kv))
        outputs = [Output("q", num_heads * head_dim, q_share)]
        if source is None:
            outputs += [Output(slot, num_kv_heads * head_dim, kv_share) for slot in ("kv" if has_values else "k")]
        spec = AttentionSpec(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            is_chunked=is_chunked,
            soft_cap=soft_cap,
            source=source[0] if source else None,
        )
        return Attention(
            self.column(f"{name}.qkv", hidden_size, outputs, bias=qkv_bias),
            self.row(f"{name}.out", num_heads * head_dim, hidden_size, share=q_share, bias=out_bias),
            spec=spec,
            rope=rope,
            kv_scales=self._kv_scales(f"{name}.qkv") if source is None else source[1].kv_scales,
            interleaved=interleaved,
            q_norm=q_norm,
            k_norm=k_norm,
            steps=steps,
            sinks=self._sinks(f"{name}.sinks", num_heads, share=heads.q) if has_sinks else None,
        )

    def mlp(
        self, name: str, *, hidden_size: int, intermediate_size: int, act: str | ExpertAct, bias: bool = False
    ) -> Mlp:
        """A gated MLP. Its modules are `{name}.gate_up` (slots gate, up) and `{name}.down`.

        Args:
            act: the activation as the config names it, or as experts have it.
        """
        share = self.parallel.share(intermediate_size)
        outputs = [Output("gate", intermediate_size, share), Output("up", intermediate_size, share)]
        gate_up = self.column(f"{name}.gate_up", hidden_size, outputs, bias=bias)
        down = self.row(f"{name}.down", intermediate_size, hidden_size, share=share, bias=bias)
        if isinstance(act, ExpertAct):
            return ClampedMlp(gate_up, down, act=act)
        return Mlp(gate_up, down, kind=activation(act))

    def plain_mlp(
        self, name: str, *, hidden_size: int, intermediate_size: int, act: str, bias: bool = False
    ) -> PlainMlp:
        """An MLP without a gate. Its modules are `{name}.up` (slot up) and `{name}.down`."""
        share = self.parallel.share(intermediate_size)
        return PlainMlp(
            self.column(f"{name}.up", hidden_size, [Output("up", intermediate_size, share)], bias=bias),
            self.row(f"{name}.down", intermediate_size, hidden_size, share=share, bias=bias),
            act=plain_activation(act),
        )

    def experts(
        self,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        act: ExpertAct = SILU,
        bias: bool = False,
        router_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        has_correction: bool = False,
        shared_size: int | None = None,
        has_shared_gate: bool = False,
        shared_act: str | ExpertAct = "silu",
        fused: FusedForm = "out_in",
        weighs_input: bool = False,
        latent: ExpertsLatent | None = None,
        has_expert_scale: bool = False,
    ) -> Experts:
        """A mixture of experts; `layers/experts.py: expert_rules` makes its weight rules.

        Its modules are `{name}.router` (with a `correction`), `{name}.gate_up` (slots `{expert}.gate`, `{expert}.up`),
        `{name}.down` (slots `{expert}`), and where asked for `{name}.shared` (an MLP) and `{name}.shared_gate`.

        Args:
            router_dtype: the router is held and computed in; None is that of the model.
            intermediate_size, shared_size: inner features of each routed expert, and of all shared ones together.
            fused: how a checkpoint with all experts in one tensor has them.
            latent: what routed experts see of a token, and the way back from their sum.
        """
        builder = ExpertsBuilder(
            name, setup=self.experts_setup, recipe=self.recipe, weights=self._weights, parallel=self.parallel,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        routed = builder.routed(
            latent.size if latent else hidden_size, intermediate_size, routing, act=act, bias=bias, fused=fused,
            weighs_input=weighs_input,
        )  # fmt: skip
        num = routing.num_experts
        router = self.plain_linear(f"{name}.router", hidden_size, num, bias=router_bias, dtype=router_dtype)
        correction = builder.correction(num) if has_correction else None
        scale = builder.expert_scale(num) if has_expert_scale else None
        shared_gate = self.plain_linear(f"{name}.shared_gate", hidden_size, 1) if has_shared_gate else None
        self.modules += filter(None, (routed, correction, scale))
        shared, part = None, f"{name}.shared"
        if shared_size is not None:
            if act.is_gated:
                shared = self.mlp(part, hidden_size=hidden_size, intermediate_size=shared_size, act=shared_act)
            else:
                shared = self.plain_mlp(part, hidden_size=hidden_size, intermediate_size=shared_size, act=act.kind)
        return Experts(
            router, routed, backend=builder.backend, routing=routing, correction=correction, shared=shared,
            shared_gate=shared_gate, router_dtype=router_dtype, latent=latent, expert_scale=scale,
            max_num_tokens=self.experts_setup.max_num_tokens,
        )  # fmt: skip

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        embedding = Embedding(
            name, vocab_size, hidden_size, parallel=self.parallel, dtype=self.dtype, device=self.device
        )
        self.modules.append(embedding)
        return embedding

    def head(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> Head:
        """Hidden states to float32 logits.

        Args:
            tied_to: the embedding whose table it multiplies with; None gives it a weight of its own.
            scale: what logits are multiplied with, before the cap.
            soft_cap: logits become soft_cap * tanh(logits / soft_cap).
        """
        head = Head(
            name,
            vocab_size,
            hidden_size,
            recipe=self.recipe_of(name),
            parallel=self.parallel,
            dtype=self.dtype,
            device=self.device,
            tied=tied_to is not None,
            scale=scale,
            soft_cap=soft_cap,
        )
        if tied_to is None:
            self.modules.append(head)
        else:
            tied_to.tie(head)
        return head

    def rotary(self, settings: RopeSettings, head_dim: int) -> Rotary:
        return Rotary(settings, head_dim, device=self.device, max_len=self.max_len)

    def _kv_scales(self, name: str) -> KvScales:
        scales = KvScales(name, device=self.device)
        self.modules.append(scales)
        return scales

    def _sinks(self, name: str, num_heads: int, *, share: tuple[int, int]) -> Sinks:
        slot = Slot("", (num_heads,), Part(0, *share))
        sinks = Sinks(name, slot=slot, dtype=self.dtype, device=self.device)
        self.modules.append(sinks)
        return sinks

    def _scale(self, name: str, features: int, *, eps: float, plus_one: bool) -> Scale:
        scale = Scale(name, features, eps=eps, plus_one=plus_one, dtype=self.dtype, device=self.device)
        self.modules.append(scale)
        return scale

    def column(self, name: str, in_features: int, outputs: Sequence[Output], *, bias: bool) -> Linear:
        linear = column_linear(
            name, in_features, outputs,
            bias=bias, recipe=self.recipe_of(name, [out.name for out in outputs]), dtype=self.dtype, device=self.device,
        )  # fmt: skip
        self.modules.append(linear)
        return linear

    def row(self, name: str, in_features: int, out_features: int, *, share: tuple[int, int], bias: bool) -> Linear:
        linear = row_linear(
            name,
            in_features,
            out_features,
            share=share,
            bias=bias,
            parallel=self.parallel,
            recipe=self.recipe_of(name),
            dtype=self.dtype,
            device=self.device,
        )
        self.modules.append(linear)
        return linear
