"""What is wrong with a grammar."""

from __future__ import annotations

__all__ = ["GrammarError"]


class GrammarError(ValueError):
    """A grammar that can't be enforced to the letter; `pointer` (RFC 6901) is the place in a schema or a tag."""

    def __init__(self, problem: str, *, pointer: str = "") -> None:
        super().__init__(f"{pointer}: {problem}" if pointer else problem)
        self.pointer = pointer


def step(pointer: str, *parts: object) -> str:
    """The pointer of something within."""
    return pointer + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)
