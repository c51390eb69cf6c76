"""What Gemma 4 has beside attention and MLPs, in numbers; tensors as transformers names them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.hub.keys import Keys
from headrace.hub.mixers import whole
from headrace.hub.shape import Weight


def is_shared(keys: Keys, index: int) -> bool:
    """Whether a layer attends to the keys and values of an earlier one."""
    shared = keys.number("num_kv_shared_layers", default=0)
    return bool(shared) and index >= keys.size("num_hidden_layers") - shared


def shared_source(keys: Keys, kinds: Sequence[str], index: int) -> int | None:
    """The layer that one of the last attends to: the last of its kind that has keys and values of its own."""
    if not is_shared(keys, index):
        return None
    own = range(keys.size("num_hidden_layers") - keys.number("num_kv_shared_layers", default=0))
    return max((at for at in own if kinds[at] == kinds[index]), default=None)


def layer_input_weights(keys: Keys, index: int) -> tuple[Weight, ...]:
    """Of a layer's embedding of tokens; the first layer has the table and the projection for all of them."""
    features = keys.number("hidden_size_per_layer_input", default=0)
    if not features:
        return ()
    hidden = keys.size("hidden_size")
    weights = (Weight(2 * hidden * features), whole(hidden))
    if index:
        return weights
    rows, width = keys.size("vocab_size_per_layer_input"), keys.size("num_hidden_layers") * features
    return (*weights, Weight(rows * width, "vocab", rows, "plain"), Weight(hidden * width), whole(features))


def beside_experts(keys: Keys, count: int) -> Weight:
    """Norms around experts that stand beside an MLP, and what their router multiplies its input and weights with."""
    return whole(4 * keys.size("hidden_size") + count)
