"""The process of one tensor-parallel rank: an engine that takes plans from a socket."""

from __future__ import annotations

import faulthandler
import shutil
import signal
from pathlib import Path

import msgspec
import zmq

from headrace import log
from headrace.engine.engine import Engine
from headrace.runtime import codec
from headrace.runtime.children import end_with_parent, leave_signals_to_parent, read_order
from headrace.runtime.failure import failed
from headrace.runtime.grammars import compiler_opener
from headrace.runtime.packing import unpack_args, unpack_source
from headrace.runtime.pulse import start_pulse
from headrace.runtime.ranks import RankOrder


def main() -> None:
    order = msgspec.json.decode(read_order(), type=RankOrder)
    pulse = Path(order.pulse)
    # A controller that was killed leaves the folder to its ranks.
    end_with_parent(lambda: shutil.rmtree(pulse.parent, ignore_errors=True))
    start_pulse(pulse)
    leave_signals_to_parent()
    faulthandler.register(signal.SIGUSR1)
    log.setup("warning" if order.rank else "info")
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(order.address)
    try:
        serve(order, socket)
    except BaseException as error:  # reported to the controller, which ends the group
        told = failed(error)
        socket.send(codec.encode(codec.Broken(told.message, told.traceback, told.bad_input)))
    finally:
        socket.close()
        context.term()


def serve(order: RankOrder, socket: zmq.Socket[bytes]) -> None:
    """Until the controller goes away (`end_with_parent`)."""
    args, source = unpack_args(order.args), unpack_source(order.source)
    engine = Engine(
        args,
        source,
        num_valid_ids=order.num_valid_ids,
        open_compiler=compiler_opener(args, source),
        rank=order.rank,
        size=order.size,
        init_method=order.init_method,
    )
    socket.send(codec.encode(codec.Opened(engine.open())))
    in_flight = 0
    while True:
        # With a plan in hand, a further one is taken only if it is there already: this is the overlap.
        if in_flight and not socket.poll(0):
            socket.send(codec.encode(codec.Done(engine.collect())))
            in_flight -= 1
            continue
        message = codec.decode_to_rank(socket.recv())
        if isinstance(message, codec.Allocate):
            engine.allocate(message.sizes)
            socket.send(codec.encode(codec.Allocated()))
        else:
            engine.submit(message.plan)
            in_flight += 1


if __name__ == "__main__":
    main()
