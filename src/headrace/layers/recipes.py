"""Which recipe each linear of a checkpoint has, as its files state it.

Read are `quantization_config` of config.json (methods `fp8`, `modelopt`, `compressed-tensors` and `mxfp4`, which is
for experts only) and ModelOpt's hf_quant_config.json. Embedding, head and routers are plain in all of these forms.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.quant._fixed import Fixed
from headrace.quant.fp8 import Fp8
from headrace.quant.fp8_block import Fp8Block
from headrace.quant.fp8_dynamic import Fp8Dynamic
from headrace.quant.fp8_on_load import Fp8OnLoad
from headrace.quant.mxfp4 import Mxfp4
from headrace.quant.mxfp4_packed import Mxfp4Packed
from headrace.quant.none import Dense
from headrace.quant.port import ExpertsRecipe, Recipe

CHECKPOINT_NAMES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "shared.gate_up": ("shared_experts.gate_proj", "shared_experts.up_proj"),
    "shared.down": ("shared_experts.down_proj",),
}
"""The end of a linear's name here -> what checkpoints call the linears that are fused in it."""

EXPERTS_NAMES = ("mlp.experts", "block_sparse_moe.experts", "feed_forward.experts")
"""What checkpoints call the experts of a layer."""

BLOCK_SIDES = [128, 128]
MIN_LAYERS = 8
"""Of a model whose first and last layer stay as they are where weights are quantised at load."""
MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP4_WEIGHTS: Mapping[str, Any] = {"type": "float", "num_bits": 4, "group_size": 32}
"""What compressed-tensors states of such a group's weights."""
HEAD = "head"

MODELOPT: Mapping[str, Recipe] = {
    "FP8": Fp8(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Dynamic(),
    "FP8_BLOCK_SCALES": Fp8Block(),
}


@dataclass(frozen=True, slots=True)
class Recipes:
    """A recipe for every linear: a `RecipeChoice`."""

    quantised: Recipe
    plain: Recipe
    ignored: tuple[str, ...] = ()
    """Names, patterns with `*`, or `re:` and a regular expression, of linears that are plain."""
    is_kv_fp8: bool = False
    """The checkpoint asks for an FP8 cache."""
    experts: ExpertsRecipe | None = None
    """Of routed experts, where theirs is another recipe than the linears'."""

    def fixed(self) -> Recipes:
        """The same weights, multiplied alike whatever the number of rows is (`deterministic`)."""
        plain = Fixed(self.plain)
        return replace(self, quantised=plain if self.quantised is self.plain else Fixed(self.quantised), plain=plain)

    def __call__(self, name: str) -> Recipe:
        """name: of a linear as the layer factory has it.

        Raises:
            ValueError: of linears that are computed as one, some are quantised and some are not.
        """
        if name == HEAD or self.quantised is self.plain:
            return self.plain
        names = checkpoint_names(name)
        ignored = [any(is_named(known, pattern) for pattern in self.ignored) for known in names]
        if ".shared." in name:  # the other spelling
            other = [known.replace("shared_experts", "shared_expert") for known in names]
            ignored = [
                was or any(is_named(known, pattern) for pattern in self.ignored) for was, known in zip(ignored, other)
            ]
        if any(ignored) != all(ignored):
            plain = names[ignored.index(True)]
            raise ValueError(f"the checkpoint leaves {plain} unquantised but not the linears fused with it: not served")
        return self.plain if ignored[0] else self.quantised

    def of_experts(self, name: str) -> ExpertsRecipe:
        """name: of a product of a layer's routed experts, as the layer factory has it.

        Raises:
            ValueError: a recipe that experts can't be stored by.
        """
        layer = name.split(".mlp")[0]
        names = [f"model.{layer}.{block}{part}" for block in EXPERTS_NAMES for part in ("", ".0.down_proj", ".0.w2")]
        is_plain = any(is_named(known, pattern) for known in names for pattern in self.ignored)
        found = self.plain if is_plain else self.experts or self.quantised
        if not isinstance(found, ExpertsRecipe):
            raise ValueError(
                f"{name}: experts stored as {type(found).__name__} are not served: use an unquantised checkpoint, or"
                " one in FP8 or MXFP4"
            )
        return found


def _end_layers(num_layers: int | None) -> tuple[str, ...]:
    """Modules of the first and the last layer, whose errors weigh most (Llama Team 2024, section 6.2); none of a model
    with few layers."""
    if num_layers is None or num_layers < MIN_LAYERS:
        return ()
    return tuple(f"{prefix}layers.{layer}" for layer in (0, num_layers - 1) for prefix in ("model.", ""))


def checkpoint_names(name: str) -> tuple[str, ...]:
    """`layers.3.mlp.down` -> `model.layers.3.mlp.down_proj`; a fused linear has several."""
    for end, originals in CHECKPOINT_NAMES.items():
        if name.endswith(f".{end}"):
            return tuple(f"model.{name.removesuffix(end)}{original}" for original in originals)
    return (name,)


def is_named(name: str, pattern: str) -> bool:
    """Whether an entry of a checkpoint's list of ignored modules means a linear: it, or a module around it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


def read_recipes(
    config: Mapping[str, Any],
    *,
    hf_quant_config: Mapping[str, Any] | None = None,
    force_dynamic: bool = False,
    num_layers: int | None = None,
) -> Recipes:
    """The recipes of a checkpoint.

    Args:
        config: config.json, of the language model.
        hf_quant_config: that file, where there is one.
        force_dynamic: quantise a plain checkpoint to FP8 at load (`force_dynamic_quantization`), but for its first and
            last layer.
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
        return Recipes(Fp8OnLoad(), plain, _end_layers(num_layers)) if force_dynamic else Recipes(plain, plain)
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
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
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
    return tuple(ignored)
