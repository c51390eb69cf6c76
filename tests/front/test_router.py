from __future__ import annotations

import numpy as np

from headrace import wire
from headrace.front.collector import Collector
from headrace.front.router import Router
from headrace.params import SamplingParams
from headrace.types import Delta

from .making import TOKENIZER, ids_of, make_builder


def add(router: Router, **params: object) -> Collector:
    requests, resolved = make_builder().build(
        ids_of("hello"),
        SamplingParams(**params),
        allocate=router.allocate,  # pyright: ignore[reportArgumentType]
    )
    collector = Collector(requests, resolved, tokenizer=TOKENIZER, streaming=True)
    router.add(collector)
    return collector


def outputs(plain: dict[int, int], *deltas: Delta) -> wire.Outputs:
    ids = np.fromiter(plain, np.int64).tobytes()
    return wire.Outputs(1, ids, np.fromiter(plain.values(), np.int32).tobytes(), list(deltas))


def test_ids_carry_their_front_end() -> None:
    ids = Router(3).allocate(2)
    assert [wire.front_of(i) for i in ids] == [3, 3] and len(set(ids)) == 2


def test_each_gets_its_own_and_unknown_ids_are_dropped() -> None:
    router = Router(1)
    first, second = add(router), add(router)
    (a,), (b,) = first.request_ids, second.request_ids
    done = router.dispatch(outputs({a: 97, b: 98, 12345: 99}, Delta(id=b, tokens=[99], finish="length")))
    assert [c.choices[0].text for c in (first, second)] == ["a", "bc"]
    assert done.touched == [first, second] and done.aborts == []
    assert router.num_running == 1
    assert router.dispatch(outputs({b: 100})).touched == []


def test_a_stop_string_aborts_the_sequence_with_its_reason() -> None:
    router = Router()
    collector = add(router, stop="b")
    (a,) = collector.request_ids
    assert router.dispatch(outputs({a: 97})).aborts == []
    done = router.dispatch(outputs({a: 98}))
    assert done.aborts == [wire.Abort([a], "stop")] and done.touched == [collector]
    assert router.dispatch(outputs({}, Delta(id=a, finish="stop"))).touched == []
    assert collector.choices[0].stop_reason == "b"


def test_no_abort_when_the_runtime_ended_it_too() -> None:
    router = Router()
    collector = add(router, stop="b")
    (a,) = collector.request_ids
    done = router.dispatch(outputs({}, Delta(id=a, tokens=[97, 98], finish="length")))
    assert done.aborts == [] and collector.choices[0].stop_reason == "b"


def test_siblings_of_a_failed_choice_are_aborted() -> None:
    router = Router()
    collector = add(router, n=3, temperature=1.0)
    a, b, c = collector.request_ids
    router.dispatch(outputs({}, Delta(id=c, tokens=[97], finish="length")))
    done = router.dispatch(outputs({b: 97}, Delta(id=a, finish="error", error="broken")))
    assert done.aborts == [wire.Abort([b])]
    assert router.num_running == 0


def test_waiting_is_counted_in_sequences_until_their_first_output() -> None:
    router = Router()
    collector = add(router, n=2, temperature=1.0)
    a, b = collector.request_ids
    assert (router.num_waiting, router.num_waiting_tokens) == (2, 10)
    router.dispatch(outputs({}, Delta(id=a, tokens=[97])))
    assert (router.num_waiting, router.num_waiting_tokens, router.num_running) == (1, 5, 2)
    assert router.remove(collector) == [a, b]
    assert (router.num_waiting, router.num_running) == (0, 0)
    assert router.remove(collector) == []


def test_everything_fails_with_the_runtime() -> None:
    router = Router()
    collectors = [add(router), add(router, n=2, temperature=1.0)]
    assert router.fail_all("gone") == collectors
    assert all(c.is_done and c.error == "gone" for c in collectors) and router.num_running == 0
