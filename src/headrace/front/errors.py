"""What a request can do wrong, with all that an HTTP error body needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["RequestError", "RequestFailed", "RuntimeFailure", "context_overflow", "prompt_too_long"]


class RequestError(ValueError):
    """A request that can't be run as asked, found before any device work. One line with the remedy."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class RequestFailed(RuntimeError):
    """An accepted request that the runtime could not finish; others are not concerned.

    `outputs` holds all outputs of the call that raised, the failed ones with their `error`.
    """

    def __init__(self, message: str, *, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class RuntimeFailure(RuntimeError):
    """The runtime could not start or has ended; the message is its root cause."""

    def __init__(self, message: str, *, traceback: str = "", bad_input: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.traceback = traceback
        self.bad_input = bad_input


def context_overflow(*, num_prompt: int, num_new: int, limit: int, param: str) -> RequestError:
    """One text for every route, so that clients can match it."""
    return RequestError(
        f"This model's context length is {limit} tokens; the request has {num_prompt} in the prompt and asks for"
        f" {num_new} new ones, {num_prompt + num_new} in all: shorten the prompt or ask for fewer",
        param=param,
        code="context_length_exceeded",
    )


def prompt_too_long(num_prompt: int, *, limit: int, param: str) -> RequestError:
    """It was not even counted to its end."""
    return RequestError(
        f"This model's context length is {limit} tokens; the prompt has more than {num_prompt}: shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )
