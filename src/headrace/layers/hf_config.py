"""Reading a Hugging Face config: typed look-ups whose errors name the key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypedDict

MAX_COUNT, MAX_WIDTH, MAX_SIZE = 10_000, 2**16, 2**31 - 1
"""A damaged config must not start a loop without end (layers, experts, heads), take the memory for tables and scratch
(features of a head, tokens chosen), nor name a size that no tensor can have."""
MAX_NUMBER = 1e30
"""With more, float32 overflows at once."""


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
        self._spelt: dict[str, str] = {}
        """By key, what the file calls it, for messages."""

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
        return self._with({**defaults, **self._values})

    def with_values(self, values: Mapping[str, Any]) -> HfConfig:
        """With these in place of what the config states."""
        return self._with({**self._values, **values})

    def renamed(self, names: Mapping[str, str]) -> HfConfig:
        """With these keys (theirs -> ours) under our names, which messages don't mention; null ones are left out."""
        config = self._with({names.get(key, key): value for key, value in self.items()})
        config._spelt |= {names[key]: key for key in self if key in names}
        return config

    def _with(self, values: Mapping[str, Any]) -> HfConfig:
        config = HfConfig(values, place=self.place)
        config._spelt = dict(self._spelt)
        return config

    def _at(self, key: str) -> str:
        return f"{self.place}: {self._spelt.get(key, key)}"

    @property
    def model_type(self) -> str:
        return str(self._values.get("model_type"))

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`: most are sizes, and no size is 0."""
        value = self.get(key, default) if default is not None else self[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self._at(key)} must be an integer, not {value!r}")
        if value < least:
            raise ValueError(f"{self._at(key)} must be at least {least}, not {value}")
        if value > _most(key):
            raise ValueError(f"{self._at(key)} must be at most {_most(key)}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite one; what keeps a norm from dividing by zero is at most 1."""
        value = self.get(key, default) if default is not None else self[key]
        if not _is_number(value):
            raise ValueError(f"{self._at(key)} must be a number, not {value!r}")
        if key.endswith(("eps", "epsilon")) and not 0 <= value <= 1:
            raise ValueError(f"{self._at(key)} must be from 0 to 1, not {value}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...] | None:
        """`count` of them; None where the key is not stated."""
        stated = self.get(key)
        if stated is None:
            return None
        if not isinstance(stated, list) or len(stated) != count or not all(_is_number(each) for each in stated):
            raise ValueError(f"{self._at(key)} must be a list of {count} numbers, not {stated!r}")
        return tuple(float(each) for each in stated)

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def optional_negative(self, key: str) -> float | None:
        value = self.optional_number(key)
        if value is not None and value >= 0:
            raise ValueError(f"{self._at(key)} must be less than 0, not {value}")
        return value

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            raise ValueError(f"{self._at(key)} must be greater than 0, not {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A stated null is false in transformers, so where it would be true here nobody knows what was meant; but of
        ties, which some converters leave null and loading holds against the tensors."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._at(key)} must be true or false, not {value!r}")
        if value and key != "tie_word_embeddings" and self._values.get(key, value) is None:
            raise ValueError(f"{self._at(key)} must be true or false, not null")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ValueError(f"{self._at(key)} must be a string, not {value!r}")
        return value

    def words(self, key: str) -> list[str] | None:
        """A list of strings; None where the key is not stated."""
        stated = self.get(key)
        if stated is not None and not (isinstance(stated, list) and all(isinstance(each, str) for each in stated)):
            raise ValueError(f"{self._at(key)} must be a list of strings, not {stated!r}")
        return stated

    def places(self, key: str) -> list[int]:
        """A list of whole numbers; an empty one where the key is not stated."""
        stated = self.get(key, [])
        if not isinstance(stated, list) or not all(isinstance(each, int) for each in stated):
            raise ValueError(f"{self._at(key)} must be a list of whole numbers, not {stated!r}")
        return stated

    def marks(self, key: str) -> list[bool] | None:
        """A list of zeros and ones; None where the key is not stated."""
        stated = self.get(key)
        if stated is not None and not (isinstance(stated, list) and all(each in (0, 1) for each in stated)):
            raise ValueError(f"{self._at(key)} must be a list of zeros and ones, not {stated!r}")
        return None if stated is None else [bool(each) for each in stated]

    def kinds(self, key: str, known: Collection[str]) -> list[str] | None:
        """What `key` states for each layer; None where it states nothing."""
        stated, count = self.get(key), self.integer("num_hidden_layers")
        if stated is None:
            return None
        if not isinstance(stated, list) or len(stated) != count or not all(kind in known for kind in stated):
            raise ValueError(f"{self._at(key)} must state {' or '.join(known)} for each of {count} layers")
        return list(stated)

    def only(self, values: Mapping[str, Any]) -> None:
        """Refuse other values of these keys than the one that is known here; what a config leaves out has it.

        Raises:
            ValueError: by name.
        """
        for key, only in values.items():
            stated = self.get(key, only)
            if stated != only:
                raise ValueError(f"{self._at(key)} {stated!r} is not served: only {only!r} is")

    def section(self, key: str) -> HfConfig:
        value = self[key]
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._at(key)} must be an object, not {value!r}")
        return HfConfig(value, place=f"{self.place}: {key}")

    def head_dim(self) -> int:
        """Features a head: stated, or hidden_size / num_attention_heads."""
        if "head_dim" in self:
            return self.integer("head_dim")
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if not 0 < hidden // heads <= MAX_WIDTH:
            raise ValueError(
                f"{self.place}: hidden_size {hidden} by num_attention_heads {heads} makes no head_dim: state one"
            )
        return hidden // heads

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


def _most(key: str) -> int:
    """Of a whole number, by what its key counts."""
    if key.startswith(("num_", "n_")) or key.endswith("_iters"):
        return MAX_COUNT
    return MAX_WIDTH if key.endswith("head_dim") or key.startswith("index_") else MAX_SIZE


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_NUMBER <= value <= MAX_NUMBER
