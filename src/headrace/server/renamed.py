"""Errors of the chat that another API's request became, in that API's words."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from headrace.front.errors import RequestError
from headrace.server.bodies import Body

__all__ = ["names_for", "renamed"]


def names_for(names: Mapping[str, str], body: Body, *, without_effect: frozenset[str]) -> Mapping[str, str]:
    """Of another API's `names`, those that its client has used: `body` may have a field of the chat API as it is."""
    given = (body.model_extra or {}).keys() - without_effect
    return {name: own for name, own in names.items() if name not in given}


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Errors that are raised inside name fields as `names` says, in `param` and where the message begins with one.

    What a template says about its messages stays as it is.
    """
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        error.param = names.get(param, error.param)
        first = re.match(r"\w+(?![\w.\[])", error.message)
        if first is not None and first[0] in names and param == first[0]:
            error.message = names[first[0]] + error.message[first.end() :]
        raise
