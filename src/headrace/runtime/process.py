"""The runtime as a process of its own: `headrace serve` starts one and speaks wire messages with it."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from typing import Any

import msgspec

from headrace import log as logs
from headrace.runtime.children import end_with_parent, read_order

log = logging.getLogger("headrace.runtime")


HELLO_WAIT_S = 0.3


class RuntimeOrder(msgspec.Struct):
    """What the process is told on its standard input."""

    args: dict[str, Any]
    source: dict[str, str | None]
    address: str
    log_level: str = "info"


def main() -> int:
    order = msgspec.json.decode(read_order(), type=RuntimeOrder)
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logs.setup(order.log_level)
    from headrace.runtime.failure import failed
    from headrace.runtime.links import ZmqLink

    link = ZmqLink(order.address)
    try:
        run(order, link)
        return 0
    except SystemExit:
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


def run(order: RuntimeOrder, link: Any) -> None:
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
        core.loop(args, link).run()
    finally:
        core.close()


if __name__ == "__main__":
    sys.exit(main())
