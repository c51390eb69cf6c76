"""Messages across a real socket."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zmq

from headrace import wire
from headrace.runtime.links import QueueLink, ZmqLink
from headrace.scheduler.scheduler import Outbox
from headrace.types import Delta, Request, Sampling


def front(address: str, number: int) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    socket.send(wire.encode(wire.Hello(number)))
    return socket


def request(request_id: int) -> Request:
    return Request(id=request_id, prompt=[1], sampling=Sampling(), max_tokens=1)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link"


def test_outputs_go_to_the_front_end_that_owns_them(address: str) -> None:
    link = ZmqLink(address)
    fronts = [front(address, number) for number in (0, 1)]
    try:
        hellos: list[wire.Up] = []
        while len(hellos) < 2:
            hellos.extend(link.receive(5.0))
        link.greet(wire.Failed("broken", bad_input=True))
        assert all(wire.decode_down(socket.recv()) == wire.Failed("broken", bad_input=True) for socket in fronts)
        other = 1 << wire.FRONT_SHIFT
        ids = np.asarray([5, other | 5, 6], np.int64)
        deltas = [Delta(id=other | 7, finish="abort")]
        link.send(Outbox(ids, np.asarray([50, 51, 60], np.int32), deltas), step=3)
        first, second = (wire.decode_down(socket.recv()) for socket in fronts)
        assert isinstance(first, wire.Outputs) and isinstance(second, wire.Outputs)
        assert [part.tolist() for part in first.plain] == [[5, 6], [50, 60]] and not first.deltas
        assert [part.tolist() for part in second.plain] == [[other | 5], [51]] and second.deltas == deltas
    finally:
        for socket in fronts:
            socket.close()
        link.close()


def test_a_late_front_end_is_greeted_too(address: str) -> None:
    link = ZmqLink(address)
    link.greet(wire.Failed("broken"))
    late = front(address, 4)
    try:
        assert link.receive(5.0) == [wire.Hello(4)]
        assert wire.decode_down(late.recv()) == wire.Failed("broken")
    finally:
        late.close()
        link.close()


def test_a_front_end_that_has_gone_stops_nobody(address: str) -> None:
    link = ZmqLink(address)
    gone = front(address, 0)
    link.receive(5.0)
    gone.close()
    try:
        for step in range(3):
            link.send(Outbox.of([Delta(id=1, finish="stop")]), step)
    finally:
        link.close()


def test_the_queue_waits_for_a_first_message_only() -> None:
    told: list[wire.Down] = []
    link = QueueLink(told.append)
    assert link.receive(0.0) == [] and link.receive(0.001) == []
    for number in (1, 2):
        link.put(wire.Submit([request(number)]))
    assert len(link.receive(5.0)) == 2
    link.send(Outbox.of([Delta(id=1)]), 9)
    assert told == [wire.Outputs(9, deltas=[Delta(id=1)])]
