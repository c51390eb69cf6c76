"""Rotary position embedding: reading a config's rope keys, frequencies of every type, cos and sin of positions.

Types and their sources: default (Su et al. 2021), linear (position interpolation, Chen et al. 2023), dynamic
(NTK-aware scaling by sequence length), yarn (Peng et al. 2023), llama3 (Llama 3.1), longrope (Ding et al. 2024),
proportional (the rotated share of the features keeps the wavelengths of the whole head), ntk_alpha (theta stretched by
a constant; configs call it dynamic, with an `alpha`).

Two types depend on the length of a sequence, while a paged cache holds keys that were rotated once and may be shared by
sequences of any length. So that results depend on nothing but positions:

- dynamic: a token at position p is rotated as transformers rotates the last token of a sequence of p + 1 tokens.
  Equal to transformers for sequences up to the original length and for every token generated after it; the first
  chunk of a longer prompt differs (transformers uses the whole prompt's length for all its tokens).
- longrope: the long factors are used for everything when the engine is opened for sequences longer than the original
  length (`max_len`), the short ones otherwise. Keys of one sequence are thus never rotated by two sets of factors.
  Equal to transformers for longer sequences in the first case, and always in the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.layers.port import Rope

COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
NEEDED_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "longrope": frozenset({"short_factor", "long_factor"}),
    "proportional": frozenset(),
    "ntk_alpha": frozenset({"alpha"}),
}
OPTIONAL_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"original_max_position_embeddings"}),
    "dynamic": frozenset(),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "llama3": frozenset({"original_max_position_embeddings"}),
    "longrope": frozenset({"original_max_position_embeddings", "attention_factor", "factor"}),
    "proportional": frozenset({"factor"}),
    "ntk_alpha": frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
}
UNSET_BY_ZERO = ("mscale", "mscale_all_dim")
LIST_KEYS = ("short_factor", "long_factor")
OLD_NAMES = {"su": "longrope"}
DEFAULT_THETA = 10_000.0
MAX_NUMBER = 1e15
"""No rope key has a use for more, and squares of it are still numbers."""


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """One kind of rotary embedding as a config states it, old and new keys made one."""

    kind: str
    theta: float
    rotary_share: float
    """Features rotated, of all in a head."""
    max_positions: int
    """`max_position_embeddings`."""
    original_positions: int
    """The length trained on; `max_positions` where the config has none."""
    values: Mapping[str, Any]
    """The type's own keys."""

    @property
    def factor(self) -> float:
        given = self.values.get("factor")
        return self.max_positions / self.original_positions if given is None else float(given)


def rope_settings(
    config: Mapping[str, Any], *, layer_type: str | None = None, default_theta: float = DEFAULT_THETA
) -> RopeSettings:
    """Read `rope_parameters` (flat or by layer type), or the older `rope_scaling` and `rope_theta`.

    Raises:
        ValueError: an unknown rope type or key, or a key that the type needs is missing; the message names it.
    """
    place, values = _rope_keys(config, layer_type)
    named = values.get("rope_type", values.get("type", "default"))
    kind = OLD_NAMES.get(str(named), str(named))
    if kind == "dynamic" and values.get("alpha"):
        kind = "ntk_alpha"
    if kind not in NEEDED_KEYS:
        raise ValueError(
            f"config.json: {place} has the unknown rope type {named!r}: known are {', '.join(NEEDED_KEYS)}"
        )
    own = {key: value for key, value in values.items() if key not in COMMON_KEYS}
    for key in own:
        if key not in NEEDED_KEYS[kind] | OPTIONAL_KEYS[kind]:
            known = ", ".join(sorted(NEEDED_KEYS[kind] | OPTIONAL_KEYS[kind] | COMMON_KEYS))
            raise ValueError(
                f"config.json: {place} has the unknown key {key!r} for rope type {kind!r}: known are {known}"
            )
    for key in sorted(NEEDED_KEYS[kind]):
        if own.get(key) is None:
            raise ValueError(f"config.json: {place} lacks the key {key!r}, which rope type {kind!r} needs")
    _check_values(place, own)
    thetas, share = (
        (values.get("rope_theta"), config.get("rope_theta"), default_theta),
        values.get("partial_rotary_factor"),
    )
    max_positions = _size("max_position_embeddings", config["max_position_embeddings"])
    return RopeSettings(
        kind=kind,
        theta=_theta(next(theta for theta in thetas if theta is not None)),
        rotary_share=_positive(
            "partial_rotary_factor", share if share is not None else config.get("partial_rotary_factor") or 1.0
        ),
        max_positions=max_positions,
        original_positions=_original_positions(config, own, max_positions),
        values=own,
    )


def _check_values(place: str, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        if value is None or key == "truncate" or (key in UNSET_BY_ZERO and value == 0):
            continue
        if key in LIST_KEYS and not isinstance(value, list):
            raise ValueError(f"config.json: {place}: {key} must be a list of numbers, not {value!r}")
        for item in value if key in LIST_KEYS else [value]:
            _positive(f"{place}: {key}", item)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_NUMBER:
        raise ValueError(f"config.json: {name} must be a number greater than 0, not {value!r}")
    return float(value)


def _theta(value: Any) -> float:
    theta = _positive("rope_theta", value)
    if theta <= 1:
        raise ValueError(f"config.json: rope_theta must be greater than 1, not {value!r}")
    return theta


def _size(name: str, value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"config.json: {name} must be an integer, not {value!r}")
    return int(_positive(name, value))


def _rope_keys(config: Mapping[str, Any], layer_type: str | None) -> tuple[str, Mapping[str, Any]]:
    """(the place for messages, the keys)"""
    for place in ("rope_scaling", "rope_parameters"):
        values = config.get(place)
        if not values:
            continue
        if not isinstance(values, Mapping):
            raise ValueError(f"config.json: {place} must be an object, not {values!r}")
        if any(isinstance(value, Mapping) for value in values.values()):
            if layer_type is None or not isinstance(values.get(layer_type), Mapping):
                raise ValueError(f"config.json: {place} has no rope parameters for {layer_type or 'all'} layers")
            return f"{place}.{layer_type}", values[layer_type]
        return place, values
    return "rope_parameters", {}


def _original_positions(config: Mapping[str, Any], values: Mapping[str, Any], max_positions: int) -> int:
    # Phi-3 states it beside the rope keys, and there it wins.
    given = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    return _size("original_max_position_embeddings", given or max_positions)


def max_position(config: Mapping[str, Any], *, layer_type: str | None = None) -> int:
    """Positions that a model serves: the original length times the factor where the type extends it by one.

    Types whose `max_position_embeddings` is the extended length already (llama3, longrope), and configs in which it is
    larger than the product, keep it.
    """
    settings = rope_settings(config, layer_type=layer_type)
    if settings.kind in ("linear", "dynamic", "yarn"):
        return max(settings.max_positions, int(settings.factor * settings.original_positions))
    return settings.max_positions


class Rotary:
    """cos and sin of positions for one kind of rope."""

    def __init__(
        self, settings: RopeSettings, head_dim: int, *, device: torch.device, max_len: int | None = None
    ) -> None:
        """
        Args:
            max_len: the longest sequence that the engine will run, where it is known to be under `max_position`.
        """
        self.settings = settings
        # A proportional rope turns all of a head, some of it by nothing.
        self.rotary_dim = head_dim if settings.kind == "proportional" else int(head_dim * settings.rotary_share)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= head_dim or settings.rotary_share > 1:
            raise ValueError(
                f"config.json: {self.rotary_dim} of the {head_dim} features of a head (head_dim, or qk_rope_head_dim)"
                " would be rotated, by pairs: give an even one and a partial_rotary_factor of at most 1"
            )
        max_len = settings.max_positions if max_len is None else max_len
        self._frequencies, self._scale = _frequencies(settings, head_dim, self.rotary_dim, max_len)
        self._frequencies = self._frequencies.to(device)  # [rotary_dim / 2] float32

    def __call__(self, positions: Tensor) -> Rope:
        """[tokens] int64 -> cos, sin [tokens, rotary_dim / 2] float32"""
        frequencies = self._frequencies
        if self.settings.kind == "dynamic":
            frequencies = _dynamic_frequencies(self.settings, self.rotary_dim, positions)
        angles = positions.unsqueeze(-1).float() * frequencies
        if self._scale == 1.0:
            return Rope(angles.cos(), angles.sin())
        return Rope(angles.cos() * self._scale, angles.sin() * self._scale)


def _frequencies(settings: RopeSettings, head_dim: int, rotary_dim: int, max_len: int) -> tuple[Tensor, float]:
    """(radians a position, by feature pair; what cos and sin are multiplied with)"""
    if settings.kind == "proportional":
        return _proportional_frequencies(settings, head_dim), 1.0
    if settings.kind == "yarn":
        return _yarn_frequencies(settings, rotary_dim), _yarn_scale(settings)
    if settings.kind == "longrope":
        return _longrope_frequencies(settings, rotary_dim, max_len), _longrope_scale(settings)
    if settings.kind == "ntk_alpha":
        stretch = float(settings.values["alpha"]) ** (rotary_dim / (rotary_dim - 2))
        return 1.0 / _wavelengths(settings.theta * stretch, rotary_dim), 1.0
    plain = 1.0 / _wavelengths(settings.theta, rotary_dim)
    if settings.kind == "linear":
        return plain / settings.factor, 1.0
    if settings.kind == "llama3":
        return _llama3_frequencies(settings, plain), 1.0
    return plain, 1.0


def _wavelengths(theta: float, dim: int) -> Tensor:
    """Positions a radian, by feature pair. [dim / 2]"""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _proportional_frequencies(settings: RopeSettings, head_dim: int) -> Tensor:
    num_turning = int(settings.rotary_share * head_dim // 2)
    turning = 1.0 / (settings.theta ** (torch.arange(0, 2 * num_turning, 2, dtype=torch.float32) / head_dim))
    still = torch.zeros(head_dim // 2 - num_turning)
    return torch.cat((turning, still)) / float(settings.values.get("factor") or 1.0)


def _dynamic_frequencies(settings: RopeSettings, dim: int, positions: Tensor) -> Tensor:
    """[tokens, dim / 2]: theta grows with each token's own position past the original length."""
    lengths = (positions + 1).clamp(min=settings.max_positions).double()
    stretch = settings.factor * lengths / settings.max_positions - (settings.factor - 1)
    theta = (settings.theta * stretch ** (dim / (dim - 2))).float()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    return 1.0 / theta.unsqueeze(-1) ** exponents


def _yarn_frequencies(settings: RopeSettings, dim: int) -> Tensor:
    """Fast pairs keep their frequency, slow ones are interpolated, a linear ramp between (YaRN, section 3.2)."""
    values = settings.values
    wavelengths = _wavelengths(settings.theta, dim)

    def pair_of(rotations: float) -> float:
        """The feature index whose pair turns this often over the original length."""
        return dim * math.log(settings.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(settings.theta))

    low = pair_of(float(values.get("beta_fast") or 32))
    high = pair_of(float(values.get("beta_slow") or 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (settings.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_scale(settings: RopeSettings) -> float:
    values = settings.values
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    if values.get("mscale") and values.get("mscale_all_dim"):
        return _stretch_scale(settings, "mscale") / _stretch_scale(settings, "mscale_all_dim")
    return _stretch_scale(settings)


def _stretch_scale(settings: RopeSettings, key: str | None = None) -> float:
    """How much larger scores become with the factor, weighted by one of the rope's keys."""
    weight = 1.0 if key is None else float(settings.values[key])
    return 1.0 if settings.factor <= 1 else 0.1 * weight * math.log(settings.factor) + 1.0


def score_scale(settings: RopeSettings) -> float:
    """What scores of latent attention are multiplied with beside the usual (DeepSeek's YaRN)."""
    return _stretch_scale(settings, "mscale_all_dim") ** 2 if settings.values.get("mscale_all_dim") else 1.0


def _longrope_frequencies(settings: RopeSettings, dim: int, max_len: int) -> Tensor:
    key = "long_factor" if max_len > settings.original_positions else "short_factor"
    factors = torch.tensor(settings.values[key], dtype=torch.float32)
    if len(factors) != dim // 2:
        raise ValueError(
            f"config.json: {key} of rope type 'longrope' has {len(factors)} numbers, the head needs {dim // 2}"
        )
    return 1.0 / (factors * _wavelengths(settings.theta, dim))


def _longrope_scale(settings: RopeSettings) -> float:
    if settings.values.get("attention_factor") is not None:
        return float(settings.values["attention_factor"])
    if settings.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(settings.factor) / math.log(settings.original_positions))


def _llama3_frequencies(settings: RopeSettings, plain: Tensor) -> Tensor:
    """Slow pairs are divided by the factor, fast ones kept, those between blended."""
    low, high = float(settings.values["low_freq_factor"]), float(settings.values["high_freq_factor"])
    wavelengths = 2 * math.pi / plain
    blend = ((settings.original_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    blended = (1 - blend) * plain / settings.factor + blend * plain
    blended = torch.where(wavelengths > settings.original_positions / low, plain / settings.factor, blended)
    return torch.where(wavelengths < settings.original_positions / high, plain, blended)
