"""Child processes: started by module name, told what to do on standard input, ended with their parent.

A child's standard input stays open as long as its parent lives; its end is how a child notices that
the parent has died. No fork (threads and CUDA do not survive it) and no pickle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

WAIT_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads at a barrier sleep: a spinning one would hold the core that the last thread needs."""


STDIN = 0


def start_child(
    module: str, order: bytes, *, capture_stderr: bool = False, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """`python -m module`, with `order` and a newline on its standard input; it inherits `descriptors`."""
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE if capture_stderr else None,
        env={**WAIT_POLICY, **os.environ},
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C reaches the parent, which ends its children in order
    )
    assert child.stdin is not None
    child.stdin.write(order + b"\n")
    child.stdin.flush()
    return child


def read_order() -> bytes:
    """In the child: the line that `start_child` wrote.

    Read from the descriptor: a buffered reader that a daemon thread still holds stops the interpreter's end.
    """
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(STDIN, 1 << 16)
        if not part:
            raise EOFError("the parent ended before it said what to do")
        data += part
    return data


def end_with_parent(last: Callable[[], object] = lambda: None) -> None:
    """In the child: exit when the parent's end of standard input closes, once `last` is done."""

    def watch() -> None:
        while os.read(STDIN, 1 << 16):
            pass
        try:
            last()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="headrace-parent-watch", daemon=True).start()


def leave_signals_to_parent() -> None:
    """In the child: what a supervisor sends to all processes at once is the parent's; it ends its children in order."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_children(children: Sequence[subprocess.Popen[bytes]], *, timeout_s: float) -> None:
    """Close their input, wait, then kill. None is left afterwards."""
    for child in children:
        if child.stdin is not None and not child.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
    deadline_s = time.monotonic() + timeout_s
    for child in children:
        try:
            child.wait(max(deadline_s - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
