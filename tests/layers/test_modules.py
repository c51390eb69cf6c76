"""Linears, norms, embedding and head: on several ranks they compute what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.rope import apply_rope_twin
from headrace.layers.factory import LayerFactory
from headrace.layers.heads import Sinks
from headrace.layers.mlp import activation
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act, ForwardStep, Rope
from headrace.layers.weights import LinearNames, Loadable
from headrace.quant.none import Dense


class Recorder:
    """Collectives of a rank that runs alone: keeps what it was given, for the test to combine."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.given.append(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.given.append(tensor)
        return tensor

    def close(self) -> None: ...


def factories(size: int) -> list[LayerFactory]:
    dense = Dense()
    return [
        LayerFactory(dtype=torch.float32, recipe=lambda name: dense, parallel=ParallelContext(rank, size, Recorder()))
        for rank in range(size)
    ]


def fill(modules: list[Loadable], values: Callable[[str, str, tuple[int, ...]], Tensor]) -> None:
    for module in modules:
        for parameter in module.parameters:
            for slot in parameter.slots:
                if parameter.default is not None:
                    parameter.view(slot).fill_(parameter.default)
                    parameter.mark_loaded(slot)
                    continue
                whole = values(parameter.name, slot.name, slot.shape)
                part = slot.part
                parameter.view(slot).copy_(
                    whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start)
                )
                parameter.mark_loaded(slot)
        module.finish()


class Values:
    """The same random checkpoint for every rank."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Tensor] = {}

    def __call__(self, name: str, slot: str, shape: tuple[int, ...]) -> Tensor:
        if (name, slot) not in self.known:
            self.known[name, slot] = torch.randn(shape)
        return self.known[name, slot]


def by_rank(size: int, build: Callable[[LayerFactory], Any], values: Values) -> list[Any]:
    built = []
    for factory in factories(size):
        built.append(build(factory))
        fill(factory.modules, values)
    return built


@pytest.mark.parametrize("size", [1, 2, 3])
def test_mlp_adds_up(size: int) -> None:
    values = Values()
    mlps = by_rank(size, lambda f: f.mlp("mlp", hidden_size=6, intermediate_size=11, act="silu", bias=True), values)
    x = torch.randn(5, 6)
    got = sum(mlp(Act(x)) for mlp in mlps)
    gate, up = (x @ values("mlp.gate_up.weight", s, ()).T + values("mlp.gate_up.bias", s, ()) for s in ("gate", "up"))
    hidden = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(got, hidden @ values("mlp.down.weight", "", ()).T + values("mlp.down.bias", "", ()))


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_attention_adds_up(size: int) -> None:
    """6 heads over 2 KV heads; attending is replaced by adding a head's v to its q."""
    values = Values()

    def build(factory: LayerFactory) -> Any:
        return factory.attention(
            "a", hidden_size=10, num_heads=6, num_kv_heads=2, head_dim=4, rope="all", qkv_bias=True, out_bias=True
        )

    x, num_tokens = torch.randn(5, 10), 5
    angles = torch.randn(num_tokens, 2)
    step = ForwardStep(torch.arange(num_tokens), {"all": Rope(angles.cos(), angles.sin())}, torch.arange(num_tokens))

    def run(attention: Any) -> Tensor:
        packed = attention.project(Act(x), step)
        q, k, v = packed.heads()
        q, k = apply_rope_twin(q, k, packed.cos, packed.sin)
        group = q.shape[1] // v.shape[1]
        mixed = q + (v + k).repeat_interleave(group, 1)
        return attention.output(Act(mixed.flatten(1)))

    (alone,) = (run(attention) for attention in by_rank(1, build, values))
    torch.testing.assert_close(sum(run(attention) for attention in by_rank(size, build, values)), alone)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("is_tied", [True, False])
def test_embedding_and_head(size: int, is_tied: bool) -> None:
    """10 rows: on 4 ranks the last holds one row and two of padding."""
    values, vocab_size = Values(), 10

    def build(factory: LayerFactory) -> Any:
        embedding = factory.embedding("embed", vocab_size, 6)
        return embedding, factory.head("head", vocab_size, 6, tied_to=embedding if is_tied else None)

    ids, hidden = torch.tensor([0, 9, 3, 3, 7]), torch.randn(4, 6)
    ranks = by_rank(size, build, values)
    table = values("embed.weight", "", ())
    torch.testing.assert_close(sum(embedding(ids) for embedding, _ in ranks), table[ids])
    local = [head.recipe.linear(Act(hidden), head._ready()) for _, head in ranks]
    assert len({part.shape for part in local}) == 1, "ranks gather equal shapes"
    weight = table if is_tied else values("head.weight", "", ())
    torch.testing.assert_close(torch.cat(local, -1)[:, :vocab_size], hidden @ weight.T)
    if size == 1:
        logits = ranks[0][1](Act(hidden))
        assert logits.shape == (4, vocab_size) and logits.dtype == torch.float32


def test_head_gathers_and_cuts_the_padding() -> None:
    (factory,) = factories(1)
    head = factory.head("head", 5, 4, soft_cap=2.0)
    fill(factory.modules, Values())
    gathered = torch.randn(3, 8) * 5

    class Gather(Recorder):
        def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
            assert dim == -1
            return gathered

    head.parallel = ParallelContext(0, 2, Gather())
    torch.testing.assert_close(head(Act(torch.randn(3, 4))), 2.0 * torch.tanh(gathered[:, :5] / 2.0))


def test_norm_reduces_adds_and_normalises() -> None:
    (factory,) = factories(1)

    class Double(Recorder):
        def all_reduce(self, tensor: Tensor) -> Tensor:
            return 2 * tensor

    factory.parallel = ParallelContext(0, 2, Double())
    norm, shifted = factory.norm("norm", 6, eps=1e-5), factory.norm("shifted", 6, eps=1e-5, plus_one=True)
    values = Values()
    fill(factory.modules, values)
    partial, residual = torch.randn(3, 6), torch.randn(3, 6)
    weight = values("norm.weight", "", ())

    def rms(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    act, new_residual = norm(partial, residual)
    torch.testing.assert_close(new_residual, residual + 2 * partial)
    torch.testing.assert_close(act.data, rms(residual + 2 * partial) * weight)
    act, same = norm(None, residual)
    assert same is residual
    torch.testing.assert_close(act.data, rms(residual) * weight)
    settled = shifted.settle(partial, residual)
    torch.testing.assert_close(settled, residual + rms(2 * partial) * (1 + values("shifted.weight", "", ())))


def test_head_norm_is_by_head() -> None:
    (factory,) = factories(1)
    norm = factory.head_norm("q_norm", 4, eps=1e-6)
    values = Values()
    fill(factory.modules, values)
    x = torch.randn(3, 5 * 4).unflatten(-1, (5, 4))
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * values("q_norm.weight", "", ())
    torch.testing.assert_close(norm(x), want)
    strided = torch.randn(3, 30)[:, :20].unflatten(-1, (5, 4))
    assert norm(strided).shape == (3, 5, 4)


def test_replicated_linear() -> None:
    values = Values()
    for linear in by_rank(2, lambda f: f.linear("router", 6, 3, bias=True), values):
        x = torch.randn(2, 6)
        torch.testing.assert_close(
            linear(Act(x)), x @ values("router.weight", "", ()).T + values("router.bias", "", ())
        )


def test_recipes_are_chosen_by_module_name() -> None:
    asked: list[str] = []

    def choose(linear: LinearNames) -> Dense:
        asked.append(linear.here)
        return Dense()

    factory = LayerFactory(dtype=torch.float32, recipe=choose)
    factory.mlp("layers.0.mlp", hidden_size=4, intermediate_size=8, act="silu")
    factory.head("head", 8, 4)
    assert asked == ["layers.0.mlp.gate_up", "layers.0.mlp.down", "head"]


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="unknown activation 'quick_gelu' .*: known are silu"):
        activation("quick_gelu")


def test_use_before_loading_is_caught() -> None:
    (factory,) = factories(1)
    with pytest.raises(AssertionError, match="router is not loaded"):
        factory.linear("router", 6, 3)(Act(torch.randn(2, 6)))


def test_a_spec_that_was_read_early_has_what_is_loaded_later() -> None:
    (factory,) = factories(1)
    heads = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    attention = factory.attention("attention", **heads, rope=None, has_sinks=True)
    assert attention.spec.sinks is None and attention.spec.k_scale == 1.0
    for _ in range(2):  # weights may be loaded again
        fill(factory.modules, Values())
        sinks = next(module for module in factory.modules if isinstance(module, Sinks))
        assert attention.spec.sinks is sinks.logits is not None
    attention.kv_scales.values = (0.5, 0.25)
    assert (attention.spec.k_scale, attention.spec.v_scale) == (0.5, 0.25)
    attention.kv_scales.values = (1.0, 1.0)
    assert attention.spec.k_scale == 1.0
