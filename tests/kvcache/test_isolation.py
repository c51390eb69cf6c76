"""Who may share blocks: salt, adapter, media, conversations."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.kvcache.claim import Claim
from headrace.kvcache.manager import KvCache
from headrace.kvcache.radix import media_key
from headrace.types import MediaSpan, Request, Sampling
from tests.kvcache.cases import B, make, prompt

CAT, DOG = b"c" * 16, b"d" * 16


def life(kv: KvCache, owner: int, tokens: list[int], claim: Claim, *, final: bool = True) -> int:
    found = kv.admit(owner, tokens, claim=claim)
    assert kv.extend(owner, len(tokens))
    kv.commit(owner, tokens, len(tokens))
    kv.release(owner, tokens=tokens, num_computed=len(tokens), final=final)
    kv.check()
    return found


def request(number: int, tokens: list[int], **fields: Any) -> Request:
    return Request(id=number, prompt=tokens, sampling=Sampling(), max_tokens=1, **fields)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "a"}, {}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"adapter": 1}, {}),
        ({"adapter": 1}, {"adapter": 2}),
        ({"cache_salt": "1"}, {"adapter": 1}),
        ({"cache_salt": "a", "adapter": 1}, {"cache_salt": "a", "adapter": 2}),
    ],
)
def test_namespaces_never_share(first: dict[str, Any], second: dict[str, Any]) -> None:
    kv = make(partial_reuse=True)
    tokens = prompt(3 * B)
    one, two = kv.claim_of(request(1, tokens, **first)), kv.claim_of(request(2, tokens, **second))
    assert life(kv, 1, tokens, one) == life(kv, 2, tokens, two) == 0
    assert life(kv, 3, tokens, one) == life(kv, 4, tokens, two) == 3 * B - 1


def test_other_weights_or_dtypes_are_another_namespace() -> None:
    spaces = {make(fingerprint=name).claim().space for name in ("", "a", "b")}
    assert len(spaces) == 3


def media(start: int, length: int, digest: bytes) -> tuple[MediaSpan, ...]:
    return (MediaSpan(start, length, digest),)


@pytest.mark.parametrize("start", [0, 1, B - 1, B, B + 2])
@pytest.mark.parametrize("length", [1, B, 2 * B])
def test_another_picture_under_the_same_tokens_is_not_found(start: int, length: int) -> None:
    kv = make(80, partial_reuse=True)
    tokens = prompt(5 * B)
    cat, dog = (kv.claim(media=media(start, length, digest)) for digest in (CAT, DOG))
    assert life(kv, 1, tokens, cat) == 0
    assert life(kv, 2, tokens, dog) == start, "the text before the picture is the same"
    assert life(kv, 3, tokens, cat) == life(kv, 4, tokens, dog) == 5 * B - 1
    assert life(kv, 5, tokens, kv.claim()) == start


def test_the_same_picture_somewhere_else_is_another_one() -> None:
    kv = make(80, partial_reuse=True)
    tokens = [7] * (4 * B)
    life(kv, 1, tokens, kv.claim(media=media(1, 2 * B, CAT)))
    assert life(kv, 2, tokens, kv.claim(media=media(2, 2 * B, CAT))) == 1
    assert life(kv, 3, tokens, kv.claim(media=media(1, 2 * B - 1, CAT))) == 2 * B, "its front is the same"


def test_a_digest_can_not_run_into_its_neighbour() -> None:
    one = (MediaSpan(0, 1, b"ab"), MediaSpan(1, 1, b"c"))
    two = (MediaSpan(0, 1, b"a"), MediaSpan(1, 1, b"bc"))
    assert media_key(one, 0, B) != media_key(two, 0, B)
    assert media_key(one, B, 2 * B) == b""


def test_per_request_keeps_what_is_preempted_and_forgets_what_has_ended() -> None:
    kv = make(reuse_policy="per_request", partial_reuse=True)
    tokens = prompt(3 * B)
    mine, other = (kv.claim_of(request(number, tokens)) for number in (1, 2))
    life(kv, 1, tokens, mine, final=False)
    assert life(kv, 2, tokens, other) == 0
    assert life(kv, 1, tokens, mine) == 3 * B - 1
    assert kv.match(tokens, claim=mine) == 0
    assert kv.stats.num_cached == (0,) and kv.index.num_nodes == 0


def test_per_conversation_shares_among_its_turns_only() -> None:
    kv = make(80, reuse_policy="per_conversation", partial_reuse=True)
    tokens = prompt(3 * B)
    x, y, alone = (kv.claim_of(request(1, tokens, conversation=name)) for name in ("x", "y", ""))
    assert life(kv, 1, tokens, x) == life(kv, 2, tokens, y) == life(kv, 3, tokens, alone) == 0
    assert life(kv, 4, tokens, x) == 3 * B - 1
    assert kv.match(tokens, claim=alone) == 0, "nobody comes after it"


@pytest.mark.parametrize("num_turns", [1, 2])
def test_a_conversation_keeps_its_last_turns(num_turns: int) -> None:
    kv = make(80, reuse_policy="per_conversation", max_num_turns=num_turns, partial_reuse=True)
    claim = kv.claim_of(request(1, [], conversation="x"))
    stem = prompt(2 * B)
    turns = [[*stem, *prompt(2 * B + 1, seed)] for seed in (1, 2, 3)]
    for owner, tokens in enumerate(turns):
        life(kv, owner, tokens, claim)
    found = [kv.match(tokens, claim=claim) for tokens in turns]
    kept = [4 * B] * num_turns
    assert found == [2 * B] * (3 - num_turns) + kept, "the stem belongs to the last turn as well"
    kv.check()


def test_quiet_conversations_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kvcache.turns.MAX_CONVERSATIONS", 2)
    kv = make(reuse_policy="per_conversation")
    tokens = prompt(2 * B + 1)
    for owner in range(5):
        life(kv, owner, tokens, kv.claim_of(request(owner, tokens, conversation=str(owner))))
    assert len(kv.store.num_pins) == 2
    kv.check()
