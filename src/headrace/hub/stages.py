"""Which layers each pipeline stage has. What a layer shares with an earlier one stays on one stage."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.hub.errors import ModelError
from headrace.hub.shape import LayerShape


def stages(layers: Sequence[LayerShape], count: int, partition: Sequence[int] | None = None) -> list[range]:
    """The layers of each of `count` stages: as stated, else even, the first ones larger, where layers may be parted.

    Raises:
        ModelError: fewer stages can be made; a partition of another number of layers, or one that parts layers that
            share keys and values or a choice of tokens.
    """
    cuts = _cuts(layers)
    if partition is None:
        if len(cuts) < count - 1:
            shared = "" if len(cuts) == len(layers) - 1 else ", some of which share what they keep of tokens"
            raise ModelError(
                f"pipeline_parallel_size: {count} stages are too many for {len(layers)} layers{shared}:"
                f" use at most {len(cuts) + 1}"
            )
        ends = [*_even(len(layers), cuts, count), len(layers)]
    else:
        ends = [sum(partition[: stage + 1]) for stage in range(len(partition))]
        _check(layers, ends, partition, cuts)
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _cuts(layers: Sequence[LayerShape]) -> list[int]:
    """Layers before which a stage may end, ascending."""
    joined: set[int] = set()
    for at, layer in enumerate(layers):
        if layer.source is not None:
            joined.update(range(layer.source + 1, at + 1))
    return [at for at in range(1, len(layers)) if at not in joined]


def _even(num_layers: int, cuts: Sequence[int], count: int) -> list[int]:
    """The cut nearest to each even one, a later one where two are as near, which leaves enough for those behind it."""
    base, more = divmod(num_layers, count)
    ends: list[int] = []
    first = 0
    for stage in range(1, count):
        wanted = stage * base + min(stage, more)
        usable = range(first, len(cuts) - (count - 1 - stage))
        best = min(usable, key=lambda at: (abs(cuts[at] - wanted), -cuts[at]))
        ends.append(cuts[best])
        first = best + 1
    return ends


def _check(layers: Sequence[LayerShape], ends: Sequence[int], partition: Sequence[int], cuts: Sequence[int]) -> None:
    if ends[-1] != len(layers) or min(partition) < 1:
        raise ModelError(f"pp_partition: stages of {list(partition)} layers don't make up the model's {len(layers)}")
    bad = next((end for end in ends[:-1] if end not in cuts), None)
    if bad is not None:
        at, source = next(
            (at, layer.source)
            for at, layer in enumerate(layers)
            if layer.source is not None and layer.source < bad <= at
        )
        raise ModelError(
            f"pp_partition: a stage that ends before layer {bad} parts layer {at} from layer {source}, from which it"
            f" takes over more than the residual: end it before one of the layers {_spans(cuts)}"
        )


def _spans(numbers: Sequence[int]) -> str:
    """`1 to 13, 35`"""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans) or "none"
