"""Errors of the chat that another API's request became, in that API's words."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from headrace.front.errors import RequestError

__all__ = ["renamed"]


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
