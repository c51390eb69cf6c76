"""How many positions the model of a config serves, as the engine counts them (`layers/rope.py: max_position`)."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.hub.errors import ModelError
from headrace.hub.keys import MAX_NUMBER, Keys

LENGTHENING = ("linear", "dynamic", "yarn")
"""Ropes whose factor says how much longer a sequence may be than the length trained on."""
NAMES = ("max_position_embeddings", "model_max_length", "max_seq_len", "n_positions")


def max_position(keys: Keys, *, is_stated: bool) -> int:
    """
    Args:
        is_stated: what the config states is all, whatever its rope is.

    Raises:
        ModelError: a config that states none, or a length that is no number.
    """
    stated, rope = keys.size(*NAMES), _rope(keys)
    kind, factor = rope.find("rope_type", "type"), rope.find("factor")
    if is_stated or kind not in LENGTHENING or (kind == "dynamic" and rope.find("alpha")):
        return stated
    original = keys.find("original_max_position_embeddings") or rope.find("original_max_position_embeddings") or stated
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in (original, factor)):
        return stated  # the engine takes the quotient of the two lengths, or refuses what is no number
    if not 0 <= factor * original <= MAX_NUMBER:
        raise ModelError(f"{rope.place}: factor {factor!r} times {original!r} positions is no length")
    return max(stated, int(factor * original))


def _rope(keys: Keys) -> Keys:
    """Of layers that attend to everything, where a config states ropes by kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        held = keys.section(name)
        if held.values:
            whole = held.section("full_attention")
            by_kind = any(isinstance(part, Mapping) for part in held.values.values())
            return whole if by_kind else held
    return keys.section("rope_parameters")
