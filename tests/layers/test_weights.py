from __future__ import annotations

import pytest
import torch

from headrace.layers.weights import Parameter, Part, Slot, WeightMap


class Module:
    """Two parameters, as a biased linear has them."""

    def __init__(self, name: str) -> None:
        slots = [Slot("q", (8, 3), Part(0, 2, 6)), Slot("k", (4, 3), Part(0, 1, 2))]
        self.weight = make(f"{name}.weight", slots)
        self.bias = make(f"{name}.bias", [Slot("q", (8,), Part(0, 2, 6)), Slot("k", (4,), Part(0, 1, 2))])

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight, self.bias)

    def finish(self) -> None: ...


def make(name: str, slots: list[Slot], *, num_padding: int = 0) -> Parameter:
    return Parameter(name, slots, dtype=torch.bfloat16, device=torch.device("cpu"), num_padding=num_padding)


def test_slots_lie_one_after_another() -> None:
    parameter = Module("layers.0.qkv").weight
    assert parameter.shape == (5, 3) and parameter.size_bytes == 5 * 3 * 2
    q, k = parameter.slots
    parameter.view(k).fill_(2.0)
    parameter.view(q).fill_(1.0)
    assert parameter.missing == ["q", "k"]
    parameter.mark_loaded(k)
    assert parameter.missing == ["q"] and not parameter.is_loaded
    parameter.mark_loaded(q)
    assert parameter.take().tolist() == [[1.0] * 3] * 4 + [[2.0] * 3]


def test_columns_and_padding() -> None:
    slot = Slot("", (4, 6), Part(1, 2, 5))
    parameter = make("down.weight", [slot], num_padding=2)
    assert slot.local_shape == (4, 3) and parameter.shape == (6, 3)
    parameter.view(slot).fill_(1.0)
    parameter.mark_loaded(slot)
    assert parameter.take().sum(1).tolist() == [3.0] * 4 + [0.0] * 2


def test_a_parameter_is_taken_only_when_it_is_loaded() -> None:
    parameter = Module("layers.0.qkv").weight
    parameter.view(parameter.slots[0])
    with pytest.raises(AssertionError):
        parameter.take()


@pytest.fixture
def weights() -> WeightMap:
    return WeightMap(
        modules=[Module("layers.0.qkv"), Module("layers.11.qkv")],
        rules={"model.layers.*.q_proj.*": "layers.*.qkv.*:q", "model.layers.*.k_proj.*": "layers.*.qkv.*:k"},
        ignored=("model.layers.*.rotary.inv_freq", "vision.**"),
        tied={"lm_head.weight": "model.embed.weight"},
        renamed={"language_model.": "model."},
    )


def test_names_find_their_slots(weights: WeightMap) -> None:
    target = weights.find("model.layers.11.k_proj.bias")
    assert target is not None
    assert (target.parameter.name, target.slot.name) == ("layers.11.qkv.bias", "k")
    assert target.module is weights.modules[1]
    assert weights.checkpoint_name(target.parameter, "k") == "model.layers.11.k_proj.bias"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.q_proj.weight",  # no such layer
        "model.layers.0.q_proj.scale",  # no such parameter
        "model.layers.0.v_proj.weight",  # no rule
        "layers.0.q_proj.weight",
        "model.layers.0.extra.q_proj.weight",  # a star is one segment
        "xmodel.layers.0.q_proj.weight",
    ],
)
def test_names_without_a_place(weights: WeightMap, name: str) -> None:
    assert weights.find(name) is None


def test_ignored_and_renamed(weights: WeightMap) -> None:
    assert weights.is_ignored("model.layers.3.rotary.inv_freq")
    assert weights.is_ignored("vision.blocks.3.attention.weight")
    assert not weights.is_ignored("model.layers.3.q_proj.weight")
    assert weights.canonical("language_model.layers.0.q_proj.weight") == "model.layers.0.q_proj.weight"
    assert weights.canonical("model.layers.0.q_proj.weight") == "model.layers.0.q_proj.weight"


def test_bytes_are_known_before_loading(weights: WeightMap) -> None:
    assert weights.weight_bytes == 2 * (5 * 3 + 5) * 2
