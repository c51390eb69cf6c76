"""How a runtime says why it ended."""

from __future__ import annotations

import traceback

from headrace import wire


def failed(error: BaseException) -> wire.Failed:
    """One line for the user, the traceback for the log; a ValueError is the user's input at fault."""
    text = " ".join(str(error).split()) or type(error).__name__
    expected = isinstance(error, (ValueError, MemoryError, OSError, NotImplementedError))
    message = text if expected else f"{type(error).__name__}: {text}"
    return wire.Failed(
        message=message,
        traceback="".join(traceback.format_exception(error)),
        bad_input=isinstance(error, (ValueError, NotImplementedError)),
    )
