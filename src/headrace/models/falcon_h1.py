"""Falcon-H1 (TII 2025): attention and Mamba-2 side by side on one norm, their results added; constant factors at each.

Each layer of the checkpoint is two of the runner's: the first mixes by its state, the second attends and ends with the
MLP. What the norm yields goes from one to the other with the step, since both take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from headrace.layers.attention import Attention
from headrace.layers.causal import CausalLm, gated_mlp
from headrace.layers.decoder import COMMON_RULES
from headrace.layers.factory import LayerFactory
from headrace.layers.hf_config import HfConfig
from headrace.layers.mamba import IN_SLOTS, Gating, Mamba, MambaSizes, mamba, mamba_fused, mamba_rules, time_limits
from headrace.layers.mlp import FactorMlp, Mlp
from headrace.layers.norm import Norm
from headrace.layers.port import Act, ForwardStep, LiveState, Mixer
from headrace.layers.recurrent import state_dtype

__all__ = ["FalconH1Model"]

BLOCK = "model.layers.*.mamba"
NORMED = "falcon_h1 normed"
RULES: Mapping[str, str] = {
    **{name.replace(".mlp.", ".feed_forward."): place for name, place in COMMON_RULES.items()},
    **mamba_rules(BLOCK, "layers.*.mamba"),
    "model.layers.*.input_layernorm.weight": "layers.*.input_norm.weight",
    "model.layers.*.pre_ff_layernorm.weight": "layers.*.mlp_norm.weight",
    "model.final_layernorm.weight": "norm.weight",
}
DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
"""What transformers takes for keys that a config leaves out."""


class StateHalf:
    """The first half: mamba(norm(x)), owed."""

    spec = None

    def __init__(self, *, input_norm: Norm, mixer: Mamba, factors: tuple[float, float]) -> None:
        """factors: of what goes in, and of what comes out."""
        self.input_norm = input_norm
        self.mixer = mixer
        self.factors = factors
        self.state = mixer.state

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        act, residual = self.input_norm(partial, residual)
        step.carried[NORMED] = act
        return self.mixer.project(scaled(act, self.factors[0])), residual

    def mix(self, mixer_input: Any, mixer: LiveState) -> Act:
        return self.mixer.mix(mixer_input, mixer)

    def after(self, mixed: Act, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.mixer.output(mixed) * self.factors[1], residual


class Owed(NamedTuple):
    """What the second half carries from `before` to `after`."""

    heads: Any
    """What `mix` takes, then what it answers."""
    first: Tensor  # [tokens, hidden], partial


class HeadsHalf:
    """The second half: x + what is owed + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, *, first: StateHalf, attention: Attention, mlp_norm: Norm, mlp: Mlp, factors: tuple[float, float]
    ) -> None:
        self.first = first
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.factors = factors
        mlp.feed_from(mlp_norm)

    @property
    def spec(self) -> Any:
        return self.attention.spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Owed, Tensor]:
        assert partial is not None, "the first half owes its result"
        normed = scaled(step.carried.pop(NORMED), self.factors[0])
        return Owed(self.attention.project(normed, step), partial), residual

    def mix(self, mixer_input: Owed, mixer: Mixer) -> Owed:
        return mixer_input._replace(heads=self.attention.attend(mixer_input.heads, mixer))

    def after(self, mixed: Owed, residual: Tensor) -> tuple[Tensor, Tensor]:
        owed = mixed.first + self.attention.output(mixed.heads) * self.factors[1]
        act, residual = self.mlp_norm(owed, residual)
        return self.mlp(act), residual


def scaled(act: Act, factor: float) -> Act:
    assert act.scales is None, "the norm feeds two products and yields plain activations"
    return act if factor == 1.0 else Act(act.data * factor)


class FalconH1Model(CausalLm):
    model_types = ("falcon_h1",)
    layer_kinds = frozenset({"full", "state"})

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        config = config.with_defaults(DEFAULTS)
        self.embedding_multiplier = config.number("embedding_multiplier", 1.0)
        super().__init__(
            config,
            factory,
            layer=lambda name, _: _layer(config, factory, name),
            rules=RULES,
            logit_scale=config.number("lm_head_multiplier", 1.0),
            fused=mamba_fused(BLOCK, _mamba_sizes(config)),
        )
        self.layers = [half for layer in self.layers if isinstance(layer, HeadsHalf) for half in (layer.first, layer)]

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.embedding_multiplier


def _layer(config: HfConfig, factory: LayerFactory, name: str) -> HeadsHalf:
    hidden_size, eps = config.integer("hidden_size"), config.number("rms_norm_eps")
    first = StateHalf(
        input_norm=factory.norm(f"{name}.input_norm", hidden_size, eps=eps),
        mixer=mamba(
            factory,
            f"{name}.mamba",
            hidden_size=hidden_size,
            sizes=_mamba_sizes(config),
            eps=eps,
            state_dtype=state_dtype(factory, config),
            out_bias=config.flag("projectors_bias", False),
        ),
        factors=(config.number("ssm_in_multiplier", 1.0), config.number("ssm_out_multiplier", 1.0)),
    )
    heads, has_bias = config.heads(), config.flag("attention_bias", False)
    attention = factory.attention(
        f"{name}.attention",
        **heads,
        rope="all",
        scale=heads["head_dim"] ** -0.5 * config.number("key_multiplier", 1.0),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )
    plain = gated_mlp(config, factory, name)
    gate, result = _factors(config, "mlp_multipliers", 2)
    mlp = FactorMlp(plain.gate_up, plain.down, kind=plain.kind, factors=(gate, result))
    return HeadsHalf(
        first=first,
        attention=attention,
        mlp_norm=factory.norm(f"{name}.mlp_norm", hidden_size, eps=eps),
        mlp=mlp,
        factors=(config.number("attention_in_multiplier", 1.0), config.number("attention_out_multiplier", 1.0)),
    )


def _mamba_sizes(config: HfConfig) -> MambaSizes:
    config.only({"hidden_act": "silu"})  # of the convolution too
    heads, width = config.integer("mamba_n_heads"), config.optional_integer("mamba_d_ssm")
    if width is None:
        width = config.integer("mamba_expand") * config.integer("hidden_size")
    dim = width // heads if config.get("mamba_d_head", "auto") == "auto" else config.integer("mamba_d_head")
    if dim * heads != width:
        wanted = "mamba_d_ssm" if "mamba_d_ssm" in config else "mamba_expand * hidden_size"
        raise ValueError(
            f"{config.place}: {heads} Mamba heads (mamba_n_heads) of {dim} features (mamba_d_head) are not {wanted}"
            f" {width}"
        )
    gating: Gating = "gate"
    if config.flag("mamba_rms_norm", False):
        gating = "norm, gate" if config.flag("mamba_norm_before_gate", True) else "gate, norm"
    return MambaSizes(
        num_heads=heads,
        dim=dim,
        num_groups=config.integer("mamba_n_groups"),
        state=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv", least=2),
        time_limits=time_limits(config),
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
        gating=gating,
        factors=_factors(config, "ssm_multipliers", len(IN_SLOTS)),
    ).checked(config.place)


def _factors(config: HfConfig, key: str, count: int) -> tuple[float, ...]:
    return config.numbers(key, count) or (1.0,) * count
