"""The layer factory: a model asks for parts, the factory knows dtype, device, ranks and recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from headrace.attention.port import AttentionSpec
from headrace.layers.attention import Attention, KvScales
from headrace.layers.embedding import Embedding, Head
from headrace.layers.linear import Linear, Output, column_linear, replicated_linear, row_linear
from headrace.layers.mlp import Mlp, activation
from headrace.layers.norm import HeadNorm, Norm, Scale
from headrace.layers.parallel import ParallelContext
from headrace.layers.rope import RopeSettings, Rotary
from headrace.layers.weights import Loadable, WeightMap
from headrace.quant.port import Recipe

RecipeChoice = Callable[[str], Recipe]
"""Module name -> how its weight is stored."""


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
    ) -> None:
        """
        Args:
            dtype: of weights and activations.
            max_len: the longest sequence that the engine will run, when the user has limited it.
        """
        self.dtype = dtype
        self.recipe = recipe
        self.device = torch.device(device)
        self.parallel = parallel or ParallelContext()
        self.max_len = max_len
        self.modules: list[Loadable] = []

    def norm(self, name: str, features: int, *, eps: float, plus_one: bool = False) -> Norm:
        """An RMS norm over the hidden state.

        Args:
            plus_one: the checkpoint stores the scale less one.
        """
        return Norm(self._scale(name, features, eps=eps, plus_one=plus_one), parallel=self.parallel)

    def head_norm(self, name: str, head_dim: int, *, eps: float, plus_one: bool = False) -> HeadNorm:
        """An RMS norm over each attention head's features."""
        return HeadNorm(self._scale(name, head_dim, eps=eps, plus_one=plus_one))

    def linear(self, name: str, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        """A linear layer that every rank computes whole."""
        linear = replicated_linear(
            name,
            in_features,
            out_features,
            bias=bias,
            recipe=self.recipe(name),
            dtype=self.dtype,
            device=self.device,
        )
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
        rope: str,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> Attention:
        """An attention block: modules `{name}.qkv` (slots q, k, v) and `{name}.out`. Heads are the whole model's.

        Args:
            scale: of the scores; head_dim ** -0.5 when None.
            window: tokens a query sees, itself included.
        """
        heads = self.parallel.heads(num_heads, num_kv_heads)
        q_share = (heads.q[0] * head_dim, heads.q[1] * head_dim)
        kv_share = (heads.kv[0] * head_dim, heads.kv[1] * head_dim)
        outputs = [
            Output("q", num_heads * head_dim, q_share),
            Output("k", num_kv_heads * head_dim, kv_share),
            Output("v", num_kv_heads * head_dim, kv_share),
        ]
        spec = AttentionSpec(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            soft_cap=soft_cap,
        )
        kv_scales = KvScales(f"{name}.qkv", device=self.device)
        self.modules.append(kv_scales)
        return Attention(
            self._column(f"{name}.qkv", hidden_size, outputs, bias=qkv_bias),
            self._row(f"{name}.out", num_heads * head_dim, hidden_size, share=q_share, bias=out_bias),
            spec=spec,
            rope=rope,
            kv_scales=kv_scales,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def mlp(self, name: str, *, hidden_size: int, intermediate_size: int, act: str, bias: bool = False) -> Mlp:
        """A gated MLP. Its modules are `{name}.gate_up` (slots gate, up) and `{name}.down`.

        Args:
            act: the activation as the config names it.
        """
        share = self.parallel.share(intermediate_size)
        outputs = [Output("gate", intermediate_size, share), Output("up", intermediate_size, share)]
        return Mlp(
            self._column(f"{name}.gate_up", hidden_size, outputs, bias=bias),
            self._row(f"{name}.down", intermediate_size, hidden_size, share=share, bias=bias),
            kind=activation(act),
        )

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
        soft_cap: float | None = None,
    ) -> Head:
        """Hidden states to float32 logits.

        Args:
            tied_to: the embedding whose table it multiplies with; None gives it a weight of its own.
            soft_cap: logits become soft_cap * tanh(logits / soft_cap).
        """
        head = Head(
            name,
            vocab_size,
            hidden_size,
            recipe=self.recipe(name),
            parallel=self.parallel,
            dtype=self.dtype,
            device=self.device,
            tied=tied_to is not None,
            soft_cap=soft_cap,
        )
        if tied_to is None:
            self.modules.append(head)
        else:
            tied_to.tie(head)
        return head

    def rotary(self, settings: RopeSettings, head_dim: int) -> Rotary:
        return Rotary(settings, head_dim, device=self.device, max_len=self.max_len)

    def weight_map(
        self,
        rules: Mapping[str, str],
        *,
        ignored: Sequence[str] = (),
        tied: Mapping[str, str] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> WeightMap:
        """The map of checkpoint names to the parameters built so far."""
        return WeightMap(tuple(self.modules), rules, ignored, tied or {}, renamed or {})

    def _scale(self, name: str, features: int, *, eps: float, plus_one: bool) -> Scale:
        scale = Scale(name, features, eps=eps, plus_one=plus_one, dtype=self.dtype, device=self.device)
        self.modules.append(scale)
        return scale

    def _column(self, name: str, in_features: int, outputs: Sequence[Output], *, bias: bool) -> Linear:
        linear = column_linear(
            name, in_features, outputs, bias=bias, recipe=self.recipe(name), dtype=self.dtype, device=self.device
        )
        self.modules.append(linear)
        return linear

    def _row(self, name: str, in_features: int, out_features: int, *, share: tuple[int, int], bias: bool) -> Linear:
        linear = row_linear(
            name,
            in_features,
            out_features,
            share=share,
            bias=bias,
            parallel=self.parallel,
            recipe=self.recipe(name),
            dtype=self.dtype,
            device=self.device,
        )
        self.modules.append(linear)
        return linear
