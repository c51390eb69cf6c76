from __future__ import annotations

import pytest
import torch

from headrace.sampling import processors


def test_calls_in_order_with_the_reference_signature() -> None:
    calls = []

    def first(req_id, logits, token_ids, stream_ptr, client_id):
        calls.append((req_id, tuple(logits.shape), logits.dtype, token_ids, stream_ptr, client_id))
        logits[:] = 0.0

    def second(req_id, logits, token_ids, stream_ptr, client_id):
        logits[0, 0, 1] += 2.0
        token_ids[0].append(99)  # its own copy

    tokens = [4, 5]
    row = torch.tensor([3.0, 3.0, 3.0])
    assert processors.run((first, second), row, tokens, request_id=7) == ""
    assert calls == [(7, (1, 1, 3), torch.float32, [[4, 5]], None, None)]
    assert row.tolist() == [0.0, 2.0, 0.0]
    assert tokens == [4, 5]


def test_an_exception_is_told_and_stops_the_chain() -> None:
    def bad(*_):
        raise RuntimeError("no such state")

    def never(*_):
        raise AssertionError("must not run")

    assert processors.run((bad, never), torch.zeros(2), [], request_id=1) == (
        "logits_processor: RuntimeError: no such state"
    )


def test_registry() -> None:
    def one(*_):
        pass

    key, other = processors.register([one]), processors.register([one, one])
    assert key != other and key > 0 and other > 0
    assert processors.lookup(key) == (one,)
    processors.release(key)
    processors.release(key)
    with pytest.raises(ValueError, match="logits_processor"):
        processors.lookup(key)
    assert processors.lookup(other) == (one, one)
    processors.release(other)


def test_refuses_what_cannot_be_called() -> None:
    with pytest.raises(ValueError, match="logits_processor: int is not callable"):
        processors.register([3])  # type: ignore[list-item]
