"""The runtime as a process of its own: `headrace serve` starts one and speaks wire messages with it."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace import log as logs
from headrace.runtime.children import end_with_parent, leave_signals_to_parent, read_order

if TYPE_CHECKING:
    from headrace.runtime.loop import Loop

log = logging.getLogger("headrace.runtime")


HELLO_WAIT_S = 0.3
END_TIMEOUT_S = 3.5
"""For the step in hand, and for what is worth keeping on its way to disk."""


class Ending:
    """The parent has closed the pipe, or has died: both end this process alike, on a thread of its own."""

    def __init__(self, address: str) -> None:
        self._folder = Path(address.removeprefix("ipc://")).parent
        self._loop: Loop | None = None
        self._begun, self._ended = threading.Event(), threading.Event()

    def watch(self, loop: Loop) -> None:
        """It has something to keep from now on."""
        self._loop = loop

    def end(self) -> None:
        """Returns when the process may be ended; the caches have been written then, if that was soon done."""
        self._begun.set()
        if self._loop is not None:
            self._loop.stop()
            self._ended.wait(END_TIMEOUT_S)
        self._remove()

    def done(self) -> None:
        """From the main thread, last. The other one may not live to see it."""
        if self._begun.is_set():
            self._remove()
        self._ended.set()

    def _remove(self) -> None:
        """A parent that was killed leaves its folder to us."""
        shutil.rmtree(self._folder, ignore_errors=True)


class RuntimeOrder(msgspec.Struct):
    """What the process is told on its standard input."""

    args: dict[str, Any]
    source: dict[str, str | None]
    address: str
    log_level: str = "info"


def main() -> int:
    order = msgspec.json.decode(read_order(), type=RuntimeOrder)
    ending = Ending(order.address)
    end_with_parent(ending.end)
    leave_signals_to_parent()
    logs.setup(order.log_level)
    from headrace.runtime.failure import failed
    from headrace.runtime.links import ZmqLink

    link = ZmqLink(order.address)
    try:
        run(order, link, ending)
        return 0
    except BaseException as error:  # the front ends are told, then the process ends
        told = failed(error)
        link.greet(told)
        link.receive(HELLO_WAIT_S)  # front ends whose Hello is still on its way are answered as it is read
        if not link.has_fronts:  # a front end prints it itself, last
            log.error("%s", told.message)
            log.debug("%s", told.traceback)
        return 2 if told.bad_input else 1
    finally:
        link.close()
        ending.done()


def run(order: RuntimeOrder, link: Any, ending: Ending) -> None:
    started_s = time.monotonic()
    from headrace.runtime.core import model_info, open_core
    from headrace.runtime.engines import make_engine
    from headrace.runtime.packing import unpack_args, unpack_source
    from headrace.wire import Ready

    args, source = unpack_args(order.args), unpack_source(order.source)
    core = open_core(args, make_engine(args, source))
    # What lives as long as the process is not searched for garbage again: a full collection would stall a step.
    gc.collect()
    gc.freeze()
    gc.set_threshold(args.garbage_collection_gen0_threshold)
    try:
        link.greet(Ready(model_info(args, source, core, started_s=started_s)))
        loop = core.loop(args, link)
        ending.watch(loop)
        loop.run()
    finally:
        core.close()


if __name__ == "__main__":
    sys.exit(main())
