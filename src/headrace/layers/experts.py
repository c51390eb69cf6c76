"""Mixture of experts: a router, the routed experts' weights stacked by expert, and a shared expert beside them.

Ranks share the inner features of every expert, as of a dense MLP, so a layer's result is a partial sum. A rank may also
hold a part of the experts only (`ExpertsShare.experts`): it leaves out what is routed to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headrace.kernels.moe._twin import scores_of, weighed
from headrace.kernels.moe.port import ExpertAct as ExpertAct
from headrace.kernels.moe.port import ExpertWeights, MoeBackend
from headrace.kernels.moe.port import Routing as Routing
from headrace.layers.experts_backend import find_backend
from headrace.layers.hf_config import HfConfig
from headrace.layers.linear import Linear
from headrace.layers.mlp import Mlp, PlainMlp, activation
from headrace.layers.norm import Norm
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act
from headrace.layers.stacked import ByExpert, ExpertsShare, Side, StackedLinear, inner_unit, stacked_names
from headrace.layers.weights import Init, LinearNames, Parameter, WeightMap
from headrace.quant._fixed import unfixed
from headrace.quant.port import ExpertsRecipe

FusedForm = Literal["out_in", "in_out"]
"""How a checkpoint that joins all experts in one tensor has them: [experts, out, in], or each transposed."""

STORED = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "input_scale", "bias")
FUSED_STORED = {
    "": "weight",
    "_bias": "bias",
    "_blocks": "blocks",
    "_scales": "scales",
    "_scale": "weight_scale",
    "_scale_inv": "weight_scale_inv",
}
"""What is appended to a fused tensor's name -> the stored tensor."""


@dataclass(frozen=True, slots=True)
class ExpertsSetup:
    """What an engine decides for all experts layers."""

    recipe: Callable[[LinearNames], ExpertsRecipe] | None = None
    """A product -> how its weights are stored; None: as the factory's recipe of it."""
    backend: str = "AUTO"
    """As `moe_config.backend` names it, or a plug-in."""
    max_num_tokens: int | None = None
    """Most tokens that experts take at once."""


class RoutedExperts:
    """The stacked weights of a layer's routed experts, handed to the backend once both products are loaded."""

    def __init__(
        self,
        gate_up: StackedLinear,
        down: StackedLinear,
        *,
        backend: MoeBackend,
        act: ExpertAct,
        share: ExpertsShare,
        weighs_input: bool,
        dtype: torch.dtype,
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._backend = backend
        self._act = act
        self._first_expert = share.experts[0]
        self._weighs_input = weighs_input
        self._dtype = dtype
        self._prepared: Any = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self._gate_up.parameters, *self._down.parameters)

    @property
    def recipes(self) -> dict[str, ExpertsRecipe]:
        """By name, how each product's weights are stored."""
        return {part.name: unfixed(part.recipe) for part in (self._gate_up, self._down)}

    def finish(self) -> None:
        weights = ExpertWeights(
            self._gate_up.stack(), self._down.stack(), self._act, self._dtype, self._first_expert, self._weighs_input
        )
        self._prepared = self._backend.prepare(weights)

    def ready(self) -> Any:
        """What the backend runs."""
        assert self._prepared is not None, f"{self._gate_up.name} is not loaded"
        return self._prepared


class ExpertsLatent(Protocol):
    """The narrower state that routed experts work on (`layers/latent_experts.py`)."""

    @property
    def size(self) -> int:
        """Its features."""
        ...

    def into(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, size]"""
        ...

    def back(self, summed: Tensor) -> Tensor:
        """The weighted sum over experts, partial [tokens, size] -> [tokens, hidden], partial"""
        ...


class Experts:
    """A mixture of experts in an MLP's place. Its result is a partial sum."""

    def __init__(
        self,
        router: Linear,
        routed: RoutedExperts,
        *,
        backend: MoeBackend,
        routing: Routing,
        correction: ByExpert | None,
        shared: Mlp | PlainMlp | None,
        shared_gate: Linear | None,
        router_dtype: torch.dtype | None,
        max_num_tokens: int | None,
        latent: ExpertsLatent | None = None,
        expert_scale: ByExpert | None = None,
    ) -> None:
        """
        Args:
            correction: what is added to experts' scores when they are chosen.
            expert_scale: what the weights of the chosen ones are multiplied with.
            latent: to what the routed experts see of a token, and back from their sum; None: they see all of it.
            shared: an expert that every token is sent to.
            shared_gate: to one number, whose sigmoid the shared expert's result is multiplied with.
            router_dtype: the router is computed in; None is that of the activations.
        """
        self.router = router
        self.routed = routed
        self.routing = routing
        self.shared = shared
        self._backend = backend
        self._correction = correction
        self._shared_gate = shared_gate
        self._router_dtype = router_dtype
        self._max_num_tokens = max_num_tokens
        self._latent = latent
        self._expert_scale = expert_scale

    def feed_from(self, norm: Norm) -> None:
        """The norm's result goes to the router too, so it stays plain."""

    def __call__(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], partial"""
        assert act.scales is None, "experts take plain activations"
        return self.run(act.data, act.data)

    def run(self, x: Tensor, router_input: Tensor, chosen: Tensor | None = None) -> Tensor:
        """As a call, for models whose router sees something else than the experts do, or whose experts are `chosen`
        already ([tokens, top_k] int64)."""
        limit = self._max_num_tokens or max(len(x), 1)
        picks = [None] * len(x) if chosen is None else chosen.split(limit)
        parts = [self._run(*part) for part in zip(x.split(limit), router_input.split(limit), picks)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, x: Tensor, router_input: Tensor, chosen: Tensor | None) -> Tensor:
        seen = router_input if self._router_dtype is None else router_input.to(self._router_dtype)
        correction = None if self._correction is None else self._correction.ready()
        logits = self.router(Act(seen))
        if chosen is None:
            routed = self._backend.route(logits, correction, self.routing)
        else:
            routed = weighed(scores_of(logits, self.routing), chosen, self.routing)
        if self._expert_scale is not None:
            routed = routed._replace(weights=routed.weights * self._expert_scale.ready()[routed.ids])
        if self._latent is None:
            out = self._backend.run(x, routed, self.routed.ready())
        else:
            seen = self._latent.into(Act(x))
            out = self._latent.back(self._backend.run(seen, routed, self.routed.ready()))
        if self.shared is None:
            return out
        shared = self.shared(Act(x))
        if self._shared_gate is not None:
            shared = shared * torch.sigmoid(self._shared_gate(Act(x)))
        return out + shared


@dataclass(frozen=True, slots=True)
class ExpertsBuilder:
    """Makes the parts of one experts layer on one rank."""

    name: str
    setup: ExpertsSetup
    recipe: Callable[[LinearNames], object]
    weights: WeightMap
    parallel: ParallelContext
    dtype: torch.dtype
    device: torch.device
    backend: MoeBackend = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", find_backend(self.setup.backend, self.device.type))

    def routed(
        self,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        *,
        act: ExpertAct,
        bias: bool,
        fused: FusedForm,
        weighs_input: bool,
    ) -> RoutedExperts:
        """
        Raises:
            ValueError: numbers that don't fit each other, or a recipe that experts can't be stored by.
        """
        check_routing(self.name, routing)
        names = ("gate", "up") if act.is_gated else ("up",)
        first = self._recipe("gate_up", names, routing.num_experts)
        second = self._recipe("down", ("",), routing.num_experts)
        share = self._share(routing.num_experts, intermediate_size, (first, second))
        gate_up = StackedLinear(
            f"{self.name}.gate_up",
            Side(names, intermediate_size, hidden_size, 0, act.is_interleaved),
            num_experts=routing.num_experts,
            share=share,
            recipe=first,
            bias=bias,
            transposed=fused == "in_out",
            dtype=self.dtype,
            device=self.device,
        )
        down = StackedLinear(
            f"{self.name}.down",
            Side(("",), hidden_size, intermediate_size, 1),
            num_experts=routing.num_experts,
            share=share,
            recipe=second,
            bias=bias,
            keeps_bias=self.parallel.rank == 0,
            transposed=fused == "in_out",
            dtype=self.dtype,
            device=self.device,
        )
        return RoutedExperts(
            gate_up,
            down,
            backend=self.backend,
            act=act,
            share=share,
            weighs_input=weighs_input,
            dtype=self.dtype,
        )

    def correction(self, num_experts: int) -> ByExpert:
        return self._by_expert("correction", num_experts, dtype=torch.float32, init="zero")

    def expert_scale(self, num_experts: int) -> ByExpert:
        return self._by_expert("expert_scale", num_experts, dtype=self.dtype, init="one")

    def _by_expert(self, part: str, num_experts: int, *, dtype: torch.dtype, init: Init) -> ByExpert:
        return ByExpert(f"{self.name}.router.{part}", num_experts, dtype=dtype, device=self.device, init=init)

    def _recipe(self, part: str, slots: Sequence[str], num_experts: int) -> ExpertsRecipe:
        name = f"{self.name}.{part}"
        found: Any = (self.setup.recipe or self.recipe)(stacked_names(self.weights, name, slots, num_experts))
        stored = unfixed(found)
        if not isinstance(stored, ExpertsRecipe):
            raise ValueError(
                f"{name}: experts can't be stored as {type(stored).__name__}: use an unquantised checkpoint, or one in"
                " FP8 or MXFP4"
            )
        return found

    def _share(self, num_experts: int, intermediate_size: int, recipes: Sequence[ExpertsRecipe]) -> ExpertsShare:
        """Whole blocks that share a scale, as even as they go."""
        unit = math.lcm(*(inner_unit(recipe, self.dtype) for recipe in recipes))
        start, stop = self.parallel.share(-(-intermediate_size // unit))
        if start == stop:
            raise ValueError(
                f"{self.name}: tensor_parallel_size {self.parallel.size} is too large for experts of"
                f" {intermediate_size} inner features in blocks of {unit}: choose a smaller one"
            )
        return ExpertsShare((0, num_experts), (start * unit, min(stop * unit, intermediate_size)))


def expert_act(name: str) -> ExpertAct:
    """A gated activation as a config names it.

    Raises:
        ValueError: no kernel for it.
    """
    return ExpertAct(activation(name))


def num_experts(config: HfConfig, default: int) -> int:
    """Under any of the keys that configs have it by; older and newer ones of a model differ."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in config:
            return config.integer(key)
    return default


def corrected_routing(config: HfConfig, count: int) -> Routing:
    """Sigmoid scores, chosen within the best groups, as DeepSeek-V3's keys state it, or refused; `count` experts."""
    config.only({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    return Routing(
        num_experts=count,
        top_k=config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
    )


def is_sparse(config: HfConfig, layer: int) -> bool:
    """Whether a layer has experts: every `decoder_sparse_step`-th one, but those of `mlp_only_layers` (Qwen)."""
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ValueError(f"{config.place}: mlp_only_layers must be a list of layers, not {dense!r}")
    return layer not in dense and (layer + 1) % config.integer("decoder_sparse_step", 1) == 0


def check_routing(name: str, routing: Routing) -> None:
    """Raises ValueError for numbers that don't fit each other."""
    count, groups = routing.num_experts, routing.num_groups
    if routing.top_k > count:
        raise ValueError(
            f"{name}: {routing.top_k} experts a token, but there are only {count}: see num_experts_per_tok"
            " (top_k_experts) in config.json"
        )
    if count % groups or routing.top_groups > groups:
        raise ValueError(
            f"{name}: {count} experts can't be chosen from {routing.top_groups} of {groups} equal groups: see"
            " n_group and topk_group in config.json"
        )
    if groups > 1 and routing.group_score == "top2" and count // groups < 2:
        raise ValueError(f"{name}: groups of one expert have no two best: see n_group in config.json")
    if routing.top_k > count // groups * routing.top_groups:
        raise ValueError(
            f"{name}: {routing.top_k} experts a token, but {routing.top_groups} groups have only"
            f" {count // groups * routing.top_groups}: see num_experts_per_tok, n_group and topk_group in config.json"
        )


def expert_rules(
    block: str,
    part: str,
    *,
    router: str = "gate",
    experts: str = "experts",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    fused: Sequence[str] = ("gate_up_proj", "down_proj"),
    shared: str = "shared_experts",
) -> Mapping[str, str]:
    """Weight rules of an experts layer.

    Args:
        block: what checkpoints call the layer, such as `model.layers.*.mlp`.
        part: its name here, such as `layers.*.mlp`.
        names: of an expert's gate, up and down.
        fused: of the two tensors that hold all experts, where a checkpoint has such.
    """
    gate, up, down = names
    rules = {
        f"{block}.{router}.weight": f"{part}.router.weight",
        f"{block}.{router}.bias": f"{part}.router.bias",
        f"{block}.{router}.e_score_correction_bias": f"{part}.router.correction",
        f"{block}.e_score_correction_bias": f"{part}.router.correction",
        f"{block}.{router.split('.')[0]}.per_expert_scale": f"{part}.router.expert_scale",
        f"{block}.{shared}.gate_proj.*": f"{part}.shared.gate_up.*:gate",
        f"{block}.{shared}.up_proj.*": f"{part}.shared.gate_up.*:up",
        f"{block}.{shared}.down_proj.*": f"{part}.shared.down.*",
        f"{block}.{shared}_gate.weight": f"{part}.shared_gate.weight",
    }
    for stored in STORED:
        rules[f"{block}.{experts}.*.{gate}.{stored}"] = f"{part}.gate_up.{stored}:*.gate"
        rules[f"{block}.{experts}.*.{up}.{stored}"] = f"{part}.gate_up.{stored}:*.up"
        rules[f"{block}.{experts}.*.{down}.{stored}"] = f"{part}.down.{stored}:*"
    for end, stored in FUSED_STORED.items():
        rules[f"{block}.{experts}.{fused[0]}{end}"] = f"{part}.gate_up.{stored}:fused"
        rules[f"{block}.{experts}.{fused[1]}{end}"] = f"{part}.down.{stored}:fused"
    return rules
