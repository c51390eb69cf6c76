"""Which linears of a quantised checkpoint stay plain: held for any model, by the names in a checkpoint of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engine.build import build_model
from headrace.layers.experts import ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.recipes import HEAD, Recipes
from headrace.layers.weights import LinearNames, WeightMap
from headrace.quant.fp8_dynamic import Fp8Dynamic
from headrace.quant.none import Dense
from headrace.quant.port import ExpertsRecipe, Recipe


@dataclass
class Asked:
    """What a model asks recipes for."""

    linears: dict[str, LinearNames]
    experts: dict[str, LinearNames]
    weights: WeightMap

    @classmethod
    def by(cls, config: Mapping[str, Any]) -> Asked:
        linears: dict[str, LinearNames] = {}
        experts: dict[str, LinearNames] = {}
        recipes = recipes_with(())

        def linear(names: LinearNames) -> Recipe:
            linears[names.here] = names
            return recipes(names)

        def product(names: LinearNames) -> ExpertsRecipe:
            experts[names.here] = names
            return recipes.of_experts(names)

        factory = LayerFactory(dtype=torch.float32, recipe=linear, experts=ExpertsSetup(product), plain=recipes.plain)
        weights = build_model(config, factory).weight_map()
        linears.pop(HEAD)
        return cls(linears, experts, weights)

    @property
    def names(self) -> set[str]:
        return {*self.linears, *self.experts}

    def plain(self, ignored: Iterable[str]) -> set[str]:
        """With this list."""
        recipes = recipes_with(ignored)
        plain = {here for here, names in self.linears.items() if recipes(names) is recipes.plain}
        return plain | {here for here, names in self.experts.items() if recipes.of_experts(names) is recipes.plain}

    def holders(self, stored: Iterable[str]) -> dict[str, set[str]]:
        """Name of a tensor, as a list of modules has it -> those of `names` that it is a weight of."""
        found: dict[str, set[str]] = {}
        for name in stored:
            canonical = self.weights.canonical(name)
            targets = [self.weights.find(piece) for piece in (*self.weights.pieces(canonical), canonical)]
            weights = {target.parameter.name for target in targets if target is not None}
            held = {weight.removesuffix(".weight") for weight in weights if weight.endswith(".weight")} & self.names
            if held:
                found[name.removesuffix(".weight")] = held
        return found


def recipes_with(ignored: Iterable[str]) -> Recipes:
    return Recipes(Fp8Dynamic(), Dense(), tuple(ignored))


def check_plain_linears(config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """stored: names of the tensors in a checkpoint of the model."""
    asked = Asked.by(config)
    holders = asked.holders(stored)
    assert {here for held in holders.values() for here in held} == asked.names
    assert asked.plain(()) == set()
    assert asked.plain(holders) == asked.names, "named one by one"
    assert asked.plain({f"re:{name.partition('.')[0]}[.].*" for name in holders}) == asked.names, "by their beginning"
    assert asked.plain({f"re:.*[.]{name.rpartition('.')[2]}$" for name in holders}) == asked.names, "by their ends"
    for here in asked.names:
        of_it = {name for name, held in holders.items() if here in held}
        beside = {other for name in of_it for other in holders[name]}
        assert asked.plain(of_it) == beside == {here}
    for old, new in asked.weights.renamed.items():
        whole = {name: asked.weights.canonical(name) for name in holders}
        prefixed = {
            old + whole[name].removeprefix(new): held for name, held in holders.items() if whole[name].startswith(new)
        }
        assert asked.plain(prefixed) == {here for held in prefixed.values() for here in held}, f"behind {old}"
