"""Which recipe each linear of a checkpoint has, as its files state it.

Read are `quantization_config` of config.json (methods `fp8`, `modelopt`, `compressed-tensors` and `mxfp4`, which is
for experts only) and ModelOpt's hf_quant_config.json. Embedding, head and routers are plain in all of these forms.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from headrace.config.on_load import plain_layers
from headrace.layers.weights import LinearNames
from headrace.quant._fixed import Fixed
from headrace.quant.fp8 import Fp8
from headrace.quant.fp8_block import Fp8Block
from headrace.quant.fp8_dynamic import Fp8Dynamic
from headrace.quant.fp8_on_load import Fp8OnLoad
from headrace.quant.mxfp4 import Mxfp4
from headrace.quant.mxfp4_packed import Mxfp4Packed
from headrace.quant.none import Dense
from headrace.quant.port import ExpertsRecipe, Recipe

RATES = ("delta.rates", "delta.beta")
"""Small linears of recurrent layers, which say how much a state takes up and how fast it decays."""
BLOCK_SIDES = [128, 128]
MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP4_WEIGHTS: Mapping[str, Any] = {"type": "float", "num_bits": 4, "group_size": 32}
"""What compressed-tensors states of such a group's weights."""
HEAD = "head"

MODELOPT: Mapping[str, Recipe] = {
    "FP8": Fp8(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Dynamic(),
    "FP8_BLOCK_SCALES": Fp8Block(),
}


@dataclass(frozen=True)
class Recipes:
    """A recipe for every linear: a `RecipeChoice`."""

    quantised: Recipe
    plain: Recipe
    ignored: tuple[str, ...] = ()
    """Names as checkpoints have them, patterns with `*`, or `re:` and a regular expression, of linears that are
    plain."""
    is_kv_fp8: bool = False
    """The checkpoint asks for an FP8 cache."""
    experts: ExpertsRecipe | None = None
    """Of routed experts, where theirs is another recipe than the linears'."""
    plain_here: tuple[str, ...] = ()
    """The like, by names as the layer factory has them."""

    def fixed(self) -> Recipes:
        """The same weights, multiplied alike whatever the number of rows is (`deterministic`)."""
        plain = Fixed(self.plain)
        return replace(self, quantised=plain if self.quantised is self.plain else Fixed(self.quantised), plain=plain)

    def __call__(self, linear: LinearNames) -> Recipe:
        """
        Raises:
            ValueError: of linears that are computed as one, some are quantised and some are not.
        """
        if linear.here == HEAD or self.quantised is self.plain:
            return self.plain
        return self.plain if self._is_plain(linear) else self.quantised

    def of_experts(self, product: LinearNames) -> ExpertsRecipe:
        """product: of a layer's routed experts.

        Raises:
            ValueError: a recipe that experts can't be stored by, or not all of them by one.
        """
        found = self.plain if self._is_plain(product) else self.experts or self.quantised
        if not isinstance(found, ExpertsRecipe):
            raise ValueError(
                f"{product.here}: experts stored as {type(found).__name__} are not served: use an unquantised"
                " checkpoint, or one in FP8 or MXFP4"
            )
        return found

    def _is_plain(self, linear: LinearNames) -> bool:
        if self._plain_here.holds(linear.here):
            return True
        plain, others = list[str](), list[str]()
        for names in linear.stored or ((linear.here,),):
            known = next(filter(self._ignored.holds, names), None)
            (others if known is None else plain).append(known or names[0])
        if plain and others:
            raise ValueError(
                f"the checkpoint leaves {plain[0]} unquantised but not {others[0]}, which is fused with it: not served"
            )
        return not others

    @cached_property
    def _ignored(self) -> Modules:
        return Modules.of(self.ignored)

    @cached_property
    def _plain_here(self) -> Modules:
        return Modules.of(self.plain_here)


@dataclass(frozen=True, slots=True)
class Modules:
    """A checkpoint's list of modules. Such lists may have tens of thousands of names."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, entries: Sequence[str]) -> Modules:
        """
        Raises:
            re.error: an entry with a faulty regular expression.
        """
        names = frozenset(entry for entry in entries if not entry.startswith("re:") and not set(entry) & {*"*?["})
        return cls(names, tuple(_pattern(entry) for entry in entries if entry not in names))

    def holds(self, name: str) -> bool:
        """Whether some entry means this linear: its name or the end of it (as transformers reads them), or a module
        around it."""
        dots = [at for at, character in enumerate(name) if character == "."]
        known = (name, *(name[:at] for at in dots), *(name[at + 1 :] for at in dots))
        return not self.names.isdisjoint(known) or any(pattern.match(name) for pattern in self.patterns)


def _pattern(entry: str) -> re.Pattern[str]:
    if entry.startswith("re:"):
        return re.compile(entry[3:])
    return re.compile(f"{fnmatch.translate(entry)}|{fnmatch.translate(f'{entry}.*')}")


def _plain_on_load(num_layers: int) -> tuple[str, ...]:
    """What stays as it is where a plain checkpoint is quantised; plans count the same."""
    layers = plain_layers(num_layers)
    ends = [f"layers.{layer}" for layer in layers]
    return (*ends, *(("inputs",) if layers else ()), *(f"layers.*.{part}" for part in RATES))


def read_recipes(
    config: Mapping[str, Any],
    *,
    hf_quant_config: Mapping[str, Any] | None = None,
    force_dynamic: bool = False,
    num_layers: int = 0,
) -> Recipes:
    """The recipes of a checkpoint.

    Args:
        config: config.json, of the language model.
        hf_quant_config: that file, where there is one.
        force_dynamic: quantise a plain checkpoint to FP8 at load (`force_dynamic_quantization`), but for its
            `plain_layers` and what decides how fast states decay.
        num_layers: of the model, for `force_dynamic`.

    Raises:
        ValueError: a form that is not served; the message names the key.
    """
    stated = config.get("quantization_config")
    if stated is None and hf_quant_config is not None:
        inner = hf_quant_config.get("quantization")
        if not isinstance(inner, Mapping):
            raise ValueError("hf_quant_config.json has no quantization object: is the download complete?")
        return _modelopt(inner, "hf_quant_config.json: quantization", ignored=inner.get("exclude_modules"))
    if stated is None:
        plain = Dense()
        on_load = Recipes(Fp8OnLoad(), plain, plain_here=_plain_on_load(num_layers))
        return on_load if force_dynamic else Recipes(plain, plain)
    place = "config.json: quantization_config"
    if not isinstance(stated, Mapping):
        raise ValueError(f"{place} must be an object, not {stated!r}")
    method = stated.get("quant_method")
    if method == "modelopt":
        return _modelopt(stated, place, ignored=stated.get("ignore", stated.get("exclude_modules")))
    if method == "fp8":
        return _fp8(stated, place)
    if method == "compressed-tensors":
        return _compressed(stated, place)
    if method == "mxfp4":
        plain = Dense()
        return Recipes(plain, plain, _names(stated.get("modules_to_not_convert"), place), experts=Mxfp4())
    raise ValueError(
        f"{place}: quant_method {method!r} is not served: fp8, modelopt, compressed-tensors (FP8, or experts in MXFP4)"
        " and mxfp4 (experts) are; use such a checkpoint, an unquantised one or a GGUF file"
    )


def _modelopt(stated: Mapping[str, Any], place: str, *, ignored: Any) -> Recipes:
    algorithm = str(stated.get("quant_algo"))
    if algorithm not in MODELOPT:
        raise ValueError(f"{place}: quant_algo {algorithm!r} is not served: {', '.join(MODELOPT)} are")
    cache = stated.get("kv_cache_quant_algo")
    scheme = stated.get("kv_cache_scheme")
    is_kv_fp8 = cache == "FP8" or (isinstance(scheme, Mapping) and scheme.get("type") == "float")
    return Recipes(MODELOPT[algorithm], Dense(), _names(ignored, place), is_kv_fp8)


def _fp8(stated: Mapping[str, Any], place: str) -> Recipes:
    sides = stated.get("weight_block_size")
    scheme = stated.get("activation_scheme", "dynamic")
    recipe: Recipe
    if sides is not None:
        if list(sides) != BLOCK_SIDES or scheme != "dynamic":
            raise ValueError(f"{place}: weight_block_size {sides} with {scheme} activations is not served: only"
                             f" {BLOCK_SIDES} with dynamic ones")  # fmt: skip
        recipe = Fp8Block()
    elif scheme in ("static", "dynamic"):
        recipe = Fp8() if scheme == "static" else Fp8Dynamic(by_output=False)
    else:
        raise ValueError(f"{place}: activation_scheme {scheme!r} is not known: it is static or dynamic")
    ignored = stated.get("ignored_layers") or stated.get("modules_to_not_convert")
    of_experts = stated.get("expert_dtype", "fp8")
    if of_experts not in ("fp8", "fp4"):
        raise ValueError(f"{place}: expert_dtype {of_experts!r} is not served: fp8 and fp4 are")
    experts = Mxfp4Packed() if of_experts == "fp4" else None
    return Recipes(recipe, Dense(), _names(ignored, place), stated.get("kv_cache_scheme") == "static", experts)


def _compressed(stated: Mapping[str, Any], place: str) -> Recipes:
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError(f"{place}: config_groups must have one group; others are not served")
    (group,) = groups.values()
    if not isinstance(group, Mapping):
        raise ValueError(f"{place}: config_groups must hold objects, not {group!r}")
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        raise ValueError(f"{place}: config_groups: weights and input_activations must be objects, not {group!r}")
    if (group.get("format") or stated.get("format")) == MXFP4_FORMAT:
        return _mxfp4(stated, place, weights, inputs)
    strategy, is_dynamic = weights.get("strategy"), bool(inputs.get("dynamic"))
    is_fp8 = all(part.get("type") == "float" and part.get("num_bits") == 8 for part in (weights, inputs))
    recipe: Recipe | None = None
    if is_fp8 and strategy == "tensor":
        recipe = Fp8Dynamic(by_output=False) if is_dynamic else Fp8()
    elif is_fp8 and strategy == "channel" and is_dynamic:
        recipe = Fp8Dynamic()
    if recipe is None:
        raise ValueError(
            f"{place}: weights {weights.get('type')}{weights.get('num_bits')} by {strategy} with"
            f" {'dynamic' if is_dynamic else 'static'} activations are not served: FP8 by tensor or channel is"
        )
    cache = stated.get("kv_cache_scheme")
    is_kv_fp8 = isinstance(cache, Mapping) and cache.get("type") == "float" and cache.get("num_bits") == 8
    return Recipes(recipe, Dense(), _names(stated.get("ignore"), place), is_kv_fp8)


def _mxfp4(stated: Mapping[str, Any], place: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Recipes:
    """Experts alone (Kimi-K3): a checkpoint that stores other linears so is refused by its tensors' names."""
    found = [weights.get(key) for key in MXFP4_WEIGHTS]
    if found != [*MXFP4_WEIGHTS.values()] or inputs:
        said = ", ".join(f"{key} {value}" for key, value in zip(MXFP4_WEIGHTS, found))
        raise ValueError(
            f"{place}: {MXFP4_FORMAT} of {said}{' and quantised activations' if inputs else ''} is not served: only"
            f" {', '.join(f'{key} {value}' for key, value in MXFP4_WEIGHTS.items())} with plain activations is"
        )
    plain = Dense()
    experts = Mxfp4Packed(codes="weight_packed", scales="weight_scale")
    return Recipes(plain, plain, _names(stated.get("ignore"), place), experts=experts)


def _names(ignored: Any, place: str) -> tuple[str, ...]:
    if ignored is None:
        return ()
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise ValueError(f"{place}: the list of modules that are not quantised must hold names, not {ignored!r}")
    try:
        Modules.of(ignored)
    except re.error as error:
        raise ValueError(f"{place}: the list of modules that are not quantised: {error}") from error
    return tuple(ignored)
