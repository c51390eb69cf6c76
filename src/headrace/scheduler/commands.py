"""Work of the engine that is no step: what goes down with the next plan, and who hears of its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.seam import Command

Then = Callable[[Any], None]


class Commands:
    def __init__(self) -> None:
        self._next_id = 1
        self._unsent: list[Command] = []
        self._then: dict[int, Then] = {}
        """By command that has not ended."""

    def begin(self, name: str, args: dict[str, Any], then: Then) -> None:
        """With the next plan. `then` is called in a commit, with what came of it."""
        self._unsent.append(Command(self._next_id, name, args))
        self._then[self._next_id] = then
        self._next_id += 1

    def take(self) -> tuple[Command, ...]:
        unsent, self._unsent = self._unsent, []
        return tuple(unsent)

    def finish(self, results: Mapping[int, Any]) -> None:
        for command, result in results.items():
            self._then.pop(command)(result)

    @property
    def is_busy(self) -> bool:
        """Something has not ended."""
        return bool(self._then)
