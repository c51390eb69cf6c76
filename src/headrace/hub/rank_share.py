"""What one rank holds of a model: bytes of its weights, and its layer groups with their bytes a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.hub.errors import ModelError
from headrace.hub.shape import (
    AttentionShape,
    Form,
    LatentShape,
    LayerShape,
    ModelShape,
    PartedShape,
    PartShape,
    RecurrentShape,
    Storage,
    Weight,
)
from headrace.seam import GroupSpec, Region

DTYPE_BITS: Mapping[str, float] = {
    "float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "float8_e4m3fn": 8, "nvfp4": 4 + 8 / 16,
}  # fmt: skip
"""Of an element of the cache, scales included."""
STATE_ALIGN_BYTES = 16
"""Each tensor of a state begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How a model is spread over ranks."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Of the tensor-parallel ranks, how many divide the experts; the rest cut each of them."""
    attention_data: bool = False
    """Attention is data parallel over the tensor-parallel ranks: each has all heads, and requests of its own."""

    @property
    def attention(self) -> int:
        """Ranks that share the heads of a request."""
        return 1 if self.attention_data else self.tensor

    @property
    def count(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class CacheTypes:
    """What the cache is stored in, and how far back layers see."""

    kv: str
    state: str
    activations: str
    windows: tuple[int | None, ...] = ()
    """By layer, as configured; () is as the model says."""
    sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One layer group of a rank, and where its bytes come from."""

    spec: GroupSpec
    kind: str
    """MHA, GQA, MQA, MLA, or the kind of recurrent layer."""
    formula: str
    replicas: int = 1
    """Ranks that hold the same keys and values, because there are fewer KV heads than ranks."""


def ceil_share(total: int, size: int) -> int:
    """The largest share when `total` units are dealt to `size` ranks."""
    return -(-total // size)


def heads_of_rank(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, int]:
    """(query heads, KV heads) of the rank with most, as `layers.parallel.share_heads` deals them.

    Raises:
        ModelError: a rank would hold no query head.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        count = ceil_share(num_kv_heads, size)
        return count * group, count
    if ceil_share(size, num_kv_heads) > group:
        raise ModelError(
            f"tensor_parallel_size {size} is too large for {num_heads} attention heads over {num_kv_heads} KV heads:"
            f" use at most {num_heads}"
        )
    return ceil_share(group, size // num_kv_heads), 1


def local_count(weight: Weight, ranks: Ranks) -> int:
    """Elements of a weight on the rank that holds most of it."""
    each = weight.count // weight.units
    if weight.split == "heads":
        return each * heads_of_rank(weight.units, weight.kv_heads, ranks.attention)[0]
    if weight.split == "kv_heads":
        return each * (ceil_share(weight.units, ranks.attention) if weight.units >= ranks.attention else 1)
    if weight.split == "dense":
        return each * ceil_share(weight.units, ranks.attention)
    if weight.split == "experts":
        cut = ranks.tensor // ranks.expert
        experts = ceil_share(weight.units, ranks.expert)
        return experts * each * ceil_share(weight.features, cut) // weight.features
    if weight.split == "vocab":
        return each * ceil_share(weight.units, ranks.attention)
    return weight.count


def weight_bytes(
    shape: ModelShape,
    layers: Sequence[LayerShape],
    ranks: Ranks,
    *,
    plain: str,
    storage: Storage,
    first: bool,
    last: bool,
) -> dict[Form, int]:
    """Bytes of one rank by form.

    Args:
        plain: dtype of what is not quantised.
        first: the rank holds the embedding; last: the final norm and the head.
    """
    bits = int(DTYPE_BITS[plain])
    totals: dict[Form, float] = {"plain": 0.0, "linear": 0.0, "expert": 0.0, "float32": 0.0}
    for layer in layers:
        for weight in layer.weights:
            totals[weight.form] += local_count(weight, ranks) * storage.bits_of(weight.form, bits)
    table = ceil_share(shape.vocab_size, ranks.attention) * shape.hidden_size
    holds_head = last and not (shape.is_tied and first)
    totals["plain"] += bits * (table * first + (table if holds_head else 0) + shape.norm_size * last)
    return {form: round(total) // 8 for form, total in totals.items()}


def rank_groups(layers: Sequence[LayerShape], at: Sequence[int], ranks: Ranks, types: CacheTypes) -> list[PlannedGroup]:
    """The layer groups of a rank, in the order of their first layer, as `engine.groups` makes them.

    Args:
        at: the layers' places in the model.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for place, layer in zip(at, layers, strict=True):
        mixer = layer.mixer
        if mixer is None or (isinstance(mixer, AttentionShape) and mixer.is_shared):
            continue
        if isinstance(mixer, RecurrentShape):
            found.setdefault(("recurrent",), []).append(place)
        elif isinstance(mixer, LatentShape):
            found.setdefault(("latent", mixer), []).append(place)
        elif isinstance(mixer, PartedShape):
            _check_groups(mixer, ranks)
            for part in mixer.parts:
                found.setdefault((mixer.kind, part), []).append(place)
        else:
            found.setdefault(("heads", replace(mixer, window=None), _window(mixer, place, types)), []).append(place)
    by_place = dict(zip(at, layers, strict=True))
    groups: list[PlannedGroup] = []
    for (kind, *rest), members in found.items():
        if rest and isinstance(rest[0], PartShape):
            groups.append(_part_group(str(kind), rest[0], members, ranks, types))
            continue
        mixers = [by_place[place].mixer for place in members]
        first = mixers[0]
        if isinstance(first, AttentionShape):
            groups.append(_heads_group(first, members, ranks, types))
        elif isinstance(first, LatentShape):
            groups.append(_latent_group(first, members, ranks, types))
        else:
            recurrent = [mixer for mixer in mixers if isinstance(mixer, RecurrentShape)]
            groups.append(_recurrent_group(recurrent, members, ranks, types))
    return groups


def _window(mixer: AttentionShape, place: int, types: CacheTypes) -> int | None:
    return types.windows[place] if types.windows else mixer.window


def _heads_group(mixer: AttentionShape, members: Sequence[int], ranks: Ranks, types: CacheTypes) -> PlannedGroup:
    _, kv_heads = heads_of_rank(mixer.num_heads, mixer.num_kv_heads, ranks.attention)
    bits, count = DTYPE_BITS[types.kv], len(members)
    window = _window(mixer, members[0], types)
    size = int(count * (2 * kv_heads * mixer.head_dim + mixer.index_dim) * bits) // 8
    formula = f"2 x {_many(count, 'layer')} x {_many(kv_heads, 'KV head')} x {mixer.head_dim} x {_bytes(bits)}"
    regions: list[Region] = []
    if mixer.index_dim:
        formula += f" + {count} x {mixer.index_dim} index key x {_bytes(bits)}"
        regions = [Region(name, (kv_heads, mixer.head_dim), types.kv) for name in "kv"]
        regions.append(Region("index_keys", (mixer.index_dim,), types.kv))
    spec = GroupSpec(
        layers=tuple(members),
        num_kv_heads=kv_heads,
        head_dim=mixer.head_dim,
        dtype=types.kv,
        window=window,
        bytes_per_token=size,
        sink_tokens=types.sink_tokens if window is not None else 0,
        attention="sparse" if regions else "heads",
        regions=tuple(regions),
    )
    return PlannedGroup(spec, mixer.kind, formula, max(ranks.attention // mixer.num_kv_heads, 1))


def _latent_group(mixer: LatentShape, members: Sequence[int], ranks: Ranks, types: CacheTypes) -> PlannedGroup:
    heads_of_rank(mixer.num_heads, mixer.num_heads, ranks.attention)
    bits, count, width = DTYPE_BITS[types.kv], len(members), mixer.latent_dim + mixer.rope_dim
    size = int(count * (width + mixer.index_dim) * bits) // 8
    regions = [Region("latent", (width,), types.kv)]
    parts = f"{mixer.latent_dim} latent + {mixer.rope_dim} rope"
    if mixer.index_dim:
        regions.append(Region("index_keys", (mixer.index_dim,), types.kv))
        parts += f" + {mixer.index_dim} index key"
    formula = f"{_many(count, 'layer')} x ({parts}) x {_bytes(bits)}"
    spec = GroupSpec(
        layers=tuple(members),
        num_kv_heads=1,
        head_dim=width,
        dtype=types.kv,
        bytes_per_token=size,
        attention="latent",
        regions=tuple(regions),
    )
    return PlannedGroup(spec, mixer.kind, formula, ranks.attention)


def _check_groups(mixer: PartedShape, ranks: Ranks) -> None:
    """As the engine does."""
    if mixer.kind == "compressed" and ranks.attention > mixer.num_groups:
        raise ModelError(
            f"tensor_parallel_size {ranks.attention} is too large for {mixer.num_groups} groups of heads (o_groups):"
            f" use at most {mixer.num_groups}"
        )
    heads_of_rank(mixer.num_heads, mixer.num_groups, ranks.attention)


def _part_group(kind: str, part: PartShape, members: Sequence[int], ranks: Ranks, types: CacheTypes) -> PlannedGroup:
    dtype = "bfloat16" if part.is_exact and DTYPE_BITS[types.kv] < 16 else types.kv
    bits, count = DTYPE_BITS[dtype], len(members)
    entry_bytes = int(count * sum(width for _, width in part.regions) * bits) // 8
    parts = " + ".join(f"{width} {name.replace('_', ' ')}" for name, width in part.regions)
    formula = f"{_many(count, 'layer')} x ({parts}) x {_bytes(bits)}"
    if part.every > 1:
        formula += f" / {part.every} tokens, at least one a block"
    spec = GroupSpec(
        layers=tuple(members),
        num_kv_heads=1,
        head_dim=part.regions[0][1],
        dtype=types.kv,
        window=part.window,
        bytes_per_token=-(-entry_bytes // part.every),
        attention=kind,
        regions=tuple(Region(name, (width,), dtype) for name, width in part.regions),
        every=part.every,
        entry_bytes=entry_bytes if part.every > 1 else 0,
    )
    return PlannedGroup(spec, kind, formula, ranks.attention)


def _recurrent_group(
    mixers: Sequence[RecurrentShape], members: Sequence[int], ranks: Ranks, types: CacheTypes
) -> PlannedGroup:
    state, conv = DTYPE_BITS[types.state], DTYPE_BITS[types.activations]
    size = 0
    for mixer in mixers:
        heads, groups = heads_of_rank(mixer.num_heads, mixer.num_groups, ranks.attention)
        conv_count = mixer.conv_count * heads // mixer.num_heads + mixer.group_conv_count * groups // mixer.num_groups
        size += _aligned(int(conv_count * conv) // 8)
        size += _aligned(int(mixer.state_count * heads // mixer.num_heads * state) // 8)
    first = mixers[0]
    formula = (
        f"{_many(len(mixers), 'layer')} x ({first.state_count:,} state x {_bytes(state)}"
        f" + {first.conv_count + first.group_conv_count:,} convolution x {_bytes(conv)})"
    )
    if ranks.attention > 1:
        formula += f" / {ranks.attention} ranks"
    spec = GroupSpec(layers=tuple(members), num_kv_heads=0, head_dim=0, dtype=types.state, state_bytes=size)
    return PlannedGroup(spec, first.kind, formula)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // STATE_ALIGN_BYTES) * STATE_ALIGN_BYTES


def _bytes(bits: float) -> str:
    return f"{bits / 8:g} byte{'' if bits == 8 else 's'}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
