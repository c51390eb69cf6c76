"""Other ways than `PreNormLayer` to put attention, MLP and norms together into a decoder layer."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headrace.layers.attention import AttentionBlock
from headrace.layers.decoder import PreNormLayer
from headrace.layers.experts import Experts
from headrace.layers.mlp import Mlp, PlainMlp
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, Mixer


class PostNormLayer:
    """x + norm(attention(x)), then x + norm(mlp(x)) (OLMo 2)."""

    def __init__(
        self, *, attention: AttentionBlock, attention_post_norm: Norm, mlp: Mlp | Experts, mlp_post_norm: Norm
    ) -> None:
        self.attention = attention
        self.attention_post_norm = attention_post_norm
        self.mlp = mlp
        self.mlp_post_norm = mlp_post_norm

    @property
    def spec(self) -> Any:
        return self.attention.spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        assert partial is None, "a norm after each block leaves nothing owed"
        return self.attention.project(Act(residual), step), residual

    def mix(self, mixer_input: Any, mixer: Mixer) -> Act:
        return self.attention.attend(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[None, Tensor]:
        residual = self.attention_post_norm.settle(self.attention.output(mixed), residual)
        return None, self.mlp_post_norm.settle(self.mlp(Act(residual)), residual)


class SandwichLayer(PreNormLayer):
    """Norms before and after each block: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))) (Gemma 2)."""

    def __init__(
        self,
        *,
        input_norm: Norm,
        attention: AttentionBlock,
        attention_post_norm: Norm,
        mlp_norm: Norm,
        mlp: Mlp | Experts,
        mlp_post_norm: Norm,
    ) -> None:
        super().__init__(input_norm=input_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp)
        self.attention_post_norm = attention_post_norm
        self.mlp_post_norm = mlp_post_norm

    def after(self, mixed: Act, residual: Tensor) -> tuple[None, Tensor]:
        residual = self.attention_post_norm.settle(self.attention.output(mixed), residual)
        act, residual = self.mlp_norm(None, residual)
        return None, self.mlp_post_norm.settle(self.mlp(act), residual)


class Beside(NamedTuple):
    """What a parallel layer carries from `before` to `after`."""

    heads: Any
    """What `mix` takes, then what it answers."""
    mlp: Tensor  # [tokens, hidden], partial


class ParallelLayer:
    """x + attention(norm(x)) + mlp(norm(x)), one norm for both (Cohere)."""

    def __init__(self, *, input_norm: Norm, attention: AttentionBlock, mlp: Mlp | PlainMlp) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp = mlp

    @property
    def spec(self) -> Any:
        return self.attention.spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Beside, Tensor]:
        act, residual = self.input_norm(partial, residual)
        return Beside(self.attention.project(act, step), self.mlp(act)), residual

    def mix(self, mixer_input: Beside, mixer: Mixer) -> Beside:
        return mixer_input._replace(heads=self.attention.attend(mixer_input.heads, mixer))

    def after(self, mixed: Beside, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention.output(mixed.heads) + mixed.mlp, residual
