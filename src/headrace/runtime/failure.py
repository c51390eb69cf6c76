"""How a runtime says why it ended."""

from __future__ import annotations

import traceback

from headrace import wire


class ProcessEnd(RuntimeError):
    """A process of ours has ended, or can't go on; the message says which one and why."""


NO_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "Cannot allocate memory")


def failed(error: BaseException) -> wire.Failed:
    """One line for the user, the traceback for the log; a ValueError is the user's input at fault."""
    return wire.Failed(
        message=_message(error),
        traceback="".join(traceback.format_exception(error)),
        bad_input=isinstance(error, (ValueError, NotImplementedError)),
    )


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (ValueError, NotImplementedError)):
        return text
    sign = next((sign for sign in NO_MEMORY_SIGNS if sign in text), None)
    if sign is not None:  # libraries say it in many ways, some of them pages long
        return f"{sign}: lower max_batch_size, max_num_tokens or max_seq_len, choose a smaller model, or free memory"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}: check the path and its permissions"
    return text if isinstance(error, (MemoryError, OSError, ProcessEnd)) else f"{type(error).__name__}: {text}"
