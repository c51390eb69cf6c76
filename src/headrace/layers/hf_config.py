"""Reading a Hugging Face config: typed look-ups whose errors name the key."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypedDict

MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
"""A damaged config must not start a loop without end, nor name a size that no tensor can have."""


class HeadSizes(TypedDict):
    """What `LayerFactory.attention` is told of heads and hidden state."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class HfConfig(Mapping[str, Any]):
    """A config's keys. A key that is null counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], *, place: str = "config.json") -> None:
        """
        Args:
            place: what messages call it.
        """
        self.place = place
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        if self._values.get(key) is None:
            raise ValueError(f"{self.place} lacks the key {key!r}: is it the config of a {self.model_type} model?")
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return self._values.get(key) is not None if isinstance(key, str) else False

    def __iter__(self) -> Iterator[str]:
        return (key for key, value in self._values.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def with_defaults(self, defaults: Mapping[str, Any]) -> HfConfig:
        """Fill in keys that the config does not state at all; a stated null stays."""
        return HfConfig({**defaults, **self._values}, place=self.place)

    @property
    def model_type(self) -> str:
        return str(self._values.get("model_type"))

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`: most are sizes, and no size is 0."""
        value = self.get(key, default) if default is not None else self[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.place}: {key} must be an integer, not {value!r}")
        if value < least:
            raise ValueError(f"{self.place}: {key} must be at least {least}, not {value}")
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if value > most:
            raise ValueError(f"{self.place}: {key} must be at most {most}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default) if default is not None else self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{self.place}: {key} must be a number, not {value!r}")
        return float(value)

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            raise ValueError(f"{self.place}: {key} must be greater than 0, not {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.place}: {key} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ValueError(f"{self.place}: {key} must be a string, not {value!r}")
        return value

    def kinds(self, key: str, known: Collection[str]) -> list[str] | None:
        """What `key` states for each layer; None where it states nothing."""
        stated, count = self.get(key), self.integer("num_hidden_layers")
        if stated is None:
            return None
        if not isinstance(stated, list) or len(stated) != count or not all(kind in known for kind in stated):
            raise ValueError(f"{self.place}: {key} must state {' or '.join(known)} for each of {count} layers")
        return list(stated)

    def section(self, key: str) -> HfConfig:
        value = self[key]
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.place}: {key} must be an object, not {value!r}")
        return HfConfig(value, place=f"{self.place}: {key}")

    def head_dim(self) -> int:
        """Features a head: stated, or hidden_size / num_attention_heads."""
        return self.integer("head_dim", self.integer("hidden_size") // self.integer("num_attention_heads"))

    def heads(self) -> HeadSizes:
        """From the usual keys."""
        return HeadSizes(
            hidden_size=self.integer("hidden_size"),
            num_heads=self.integer("num_attention_heads"),
            num_kv_heads=self.num_kv_heads(),
            head_dim=self.head_dim(),
        )

    def num_kv_heads(self) -> int:
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads != 0:
            raise ValueError(
                f"{self.place}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            )
        return kv_heads
