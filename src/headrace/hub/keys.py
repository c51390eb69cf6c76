"""Typed look-ups in a Hugging Face config, by any of the names that models give a thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headrace.hub.errors import ModelError

MAX_NUMBER = 2**31 - 1


class Keys:
    """A config's keys. A key that is null counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def find(self, *names: str) -> Any:
        """The value of the first of these names that is there, else None."""
        return self.values.get(self._stated(names))

    def _stated(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self), names[0])

    def number(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """A whole number.

        Raises:
            ModelError: none of the names is there and nothing stands in for it, or it is no such number.
        """
        value = self.find(*names)
        if value is None:
            if default is None:
                raise ModelError(f"{self.place} lacks {' or '.join(names)}: is it the config of a language model?")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_NUMBER:
            raise ModelError(
                f"{self.place}: {self._stated(names)} must be a whole number of at least {least}, not {value!r}"
            )
        return value

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return self.number(*names, default=default, least=1)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def words(self, *names: str) -> list[str] | None:
        """A list of strings.

        Raises:
            ModelError: something else.
        """
        value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[Any]", value)):
            raise ModelError(f"{self.place}: {self._stated(names)} must be a list of words, not {value!r}")
        return cast("list[str]", value)

    def section(self, name: str) -> Keys:
        """The keys of a nested object; of nothing where there is none."""
        value = self.values.get(name)
        nothing: dict[str, Any] = {}
        held = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else nothing
        return Keys(held, f"{self.place}: {name}")
