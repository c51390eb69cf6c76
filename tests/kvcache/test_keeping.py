"""Priorities by range, their expiry, and pins."""

from __future__ import annotations

import pytest

from headrace.kvcache.manager import KvCache
from headrace.seam import HOST, GroupSpec
from headrace.types import Retention, RetentionRange
from tests.kvcache.cases import B, make, prompt, serve


def life(kv: KvCache, owner: int, tokens: list[int], retention: Retention | None, *, prompt_len: int = 0) -> None:
    claim = kv.claim(retention=retention, prompt_len=prompt_len or len(tokens))
    kv.admit(owner, tokens, claim=claim)
    assert kv.extend(owner, len(tokens))
    kv.commit(owner, tokens, len(tokens))
    kv.release(owner)
    kv.check()


def pressure(kv: KvCache, count: int, owner: int = 99) -> None:
    """Takes so many blocks and gives them back."""
    kv.admit(owner, [5000])
    assert kv.extend(owner, count * B)
    kv.release(owner)
    kv.check()


def priorities(kv: KvCache, tokens: list[int]) -> list[int]:
    nodes = kv.index.walk(kv.claim().space, tokens, len(tokens) // B)[0]
    return [kv.pools[0].priority[kv.index.blocks[0][node]] for node in nodes]


def test_ranges_of_the_prompt_and_generated_tokens() -> None:
    kv = make()
    tokens = prompt(5 * B)
    ranges = (RetentionRange(0, 2 * B, 80), RetentionRange(2 * B, 3 * B, 10))
    life(kv, 1, tokens, Retention(ranges=ranges, decode_priority=5), prompt_len=4 * B)
    assert priorities(kv, tokens) == [80, 80, 10, 35, 5]


def test_low_goes_first_and_high_stays() -> None:
    kv = make(13)
    low, plain, high = (prompt(4 * B, seed) for seed in range(3))
    life(kv, 1, high, Retention(ranges=(RetentionRange(0, None, 90),)))
    life(kv, 2, low, Retention(ranges=(RetentionRange(0, None, 1),)))
    life(kv, 3, plain, None)
    found = []
    for count in (4, 8):
        pressure(kv, count)
        found.append([kv.match([*tokens, 1]) for tokens in (low, plain, high)])
    assert found == [[0, 4 * B, 4 * B], [0, 0, 4 * B]]


def test_a_priority_ends() -> None:
    kv = make()
    tokens = prompt(3 * B)
    kv.advance(100.0)
    life(kv, 1, tokens, Retention(ranges=(RetentionRange(0, B, 90, 5.0), RetentionRange(B, None, 80))))
    kv.advance(104.9)
    assert priorities(kv, tokens) == [90, 80, 80]
    kv.advance(105.0)
    assert priorities(kv, tokens) == [35, 80, 80]
    kv.check()


def test_a_later_request_renews_what_it_finds() -> None:
    kv = make()
    tokens = prompt(3 * B)
    kv.advance(100.0)
    life(kv, 1, tokens, Retention(ranges=(RetentionRange(0, None, 90, 5.0),)))
    kv.advance(103.0)
    life(kv, 2, [*tokens, 1], Retention(ranges=(RetentionRange(0, None, 70, 5.0),)))
    kv.advance(106.0)
    assert priorities(kv, tokens) == [70] * 3
    life(kv, 3, [*tokens, 2], None)
    assert priorities(kv, tokens) == [70] * 3, "who asks for nothing changes nothing"
    kv.advance(108.0)
    assert priorities(kv, tokens) == [35] * 3


def test_a_block_of_another_life_does_not_expire() -> None:
    kv = make(5)
    kv.advance(100.0)
    life(kv, 1, prompt(4 * B), Retention(ranges=(RetentionRange(0, None, 20, 5.0),)))
    pressure(kv, 4)
    tokens = prompt(4 * B, 1)
    life(kv, 2, tokens, Retention(ranges=(RetentionRange(0, None, 90),)))
    kv.advance(106.0)
    assert priorities(kv, tokens) == [90] * 4


def test_a_block_that_takes_anothers_place_ends_as_that_would_have() -> None:
    kv = make()
    tokens = prompt(3 * B)
    kv.advance(100.0)
    life(kv, 1, tokens, Retention(ranges=(RetentionRange(0, None, 90, 5.0),)))
    kv.admit(2, tokens, reuse=False)
    assert kv.extend(2, len(tokens))
    kv.commit(2, tokens, len(tokens))
    kv.release(2)
    assert priorities(kv, tokens) == [90] * 3
    kv.advance(105.0)
    assert priorities(kv, tokens) == [35] * 3
    kv.check()


def test_a_name_taken_over_late_has_the_owners_priority() -> None:
    kv = make(9)
    tokens = prompt(2 * B)
    claim = kv.claim(retention=Retention(ranges=(RetentionRange(0, None, 90),)), prompt_len=len(tokens))
    kv.admit(1, tokens)
    kv.admit(2, tokens, claim=claim)
    for owner in (1, 2):
        assert kv.extend(owner, len(tokens))
        kv.commit(owner, tokens, len(tokens))
    kv.release(1)
    for node in kv.index.walk(claim.space, tokens, 2)[0]:  # as if the time of the first one's were over
        kv.pools[0].set_priority(kv.index.blocks[0][node], 0)
    pressure(kv, 6)
    kv.release(2)
    assert priorities(kv, tokens) == [90] * 2
    kv.check()


def test_a_block_taken_over_leaves_its_priority_behind() -> None:
    kv = make(partial_reuse=True, copy_on_partial_reuse=False)
    tokens = prompt(B)
    life(kv, 1, tokens, Retention(ranges=(RetentionRange(0, None, 90),)))
    other = [*tokens[: B - 1], 5000, 1]
    assert kv.admit(2, other) == B - 1
    assert kv.extend(2, len(other))
    kv.commit(2, other, B)
    kv.release(2)
    assert priorities(kv, other) == [35]
    kv.check()


def test_a_priority_ends_on_the_host_too() -> None:
    kv = make(4, host=(20,))
    tokens = prompt(3 * B)
    kv.advance(100.0)
    life(kv, 1, tokens, Retention(ranges=(RetentionRange(0, None, 90, 5.0),)))
    pressure(kv, 3)
    kv.finish_copies(kv.take_copies()[:, 0].tolist())
    (host,) = kv.store.tier(HOST)
    assert [host.priority[block] for block in host.eviction_order()] == [90] * 3
    kv.advance(105.0)
    assert [host.priority[block] for block in host.eviction_order()] == [35] * 3
    kv.check()


# ---- pins ----------------------------------------------------------------------------------------


def test_a_pinned_prompt_survives_pressure() -> None:
    kv = make(21)
    tokens, other = prompt(5 * B + 1), prompt(5 * B, 1)
    claim = kv.claim(prompt_len=len(tokens))
    life(kv, 1, tokens, None)
    life(kv, 2, other, None)
    assert kv.pin("system", tokens, claim) == ""
    kv.check()
    pressure(kv, 15)
    kv.check()
    assert kv.match(tokens) == 5 * B and kv.match([*other, 1]) == 0
    assert kv.stats.pinned_blocks == 5 == kv.stats.num_leased[0]
    (info,) = kv.pins.infos()
    assert (info.name, info.num_tokens, info.num_blocks) == ("system", 5 * B, 5)
    assert kv.unpin("system") and not kv.unpin("system")
    kv.check()
    assert kv.stats.num_leased == (0,) and kv.match(tokens) == 5 * B
    pressure(kv, 20)
    assert kv.match(tokens) == 0


def test_pins_have_a_cap_and_a_name() -> None:
    kv = make(11, max_pinned_share=0.5)
    first, second = prompt(4 * B), prompt(2 * B, 1)
    for owner, tokens in ((1, first), (2, second)):
        life(kv, owner, [*tokens, 1], None)
    pin = {name: kv.claim(prompt_len=len(tokens)) for name, tokens in (("a", first), ("b", second))}
    assert kv.pin("a", [*first, 1], pin["a"]) == ""
    assert "hold 4 blocks and may hold 5" in kv.pin("b", [*second, 1], pin["b"])
    assert kv.pin("a", [*first, 1], pin["a"]) == "", "the same once more"
    assert "fills no block of 4 tokens" in kv.pin("c", [9000, 1], kv.claim(prompt_len=1))
    kv.check()
    assert kv.pin("c", [*first, 1], pin["a"]) == "" and kv.stats.pinned_blocks == 4, "shared blocks count once"
    kv.unpin("a")
    assert kv.stats.pinned_blocks == 4
    kv.unpin("c")
    assert kv.pin("b", [*second, 1], pin["b"]) == ""
    kv.check()


def test_a_pin_of_the_same_name_is_replaced() -> None:
    kv = make(15, max_pinned_share=0.5)
    front, large = prompt(2 * B), prompt(8 * B, 1)
    first, second = [*front, *prompt(3 * B, 2)], [*front, *prompt(4 * B, 3)]
    for owner, tokens in enumerate((first, large, second), start=1):
        life(kv, owner, [*tokens, 1], None)

    def pin(tokens: list[int], name: str = "a") -> str:
        refusal = kv.pin(name, [*tokens, 1], kv.claim(prompt_len=len(tokens)))
        kv.check()
        return refusal

    life(kv, 4, [*first, 1], None)
    assert pin(first) == ""
    life(kv, 5, [*large, 1], None)
    assert "pins hold 0 blocks and may hold 7, it needs 8 more" in pin(large), "what it replaces counts as given back"
    assert [each.num_tokens for each in kv.pins.infos()] == [5 * B], "refused, the old one stays as it was"
    life(kv, 6, [*second, 1], None)
    assert pin(second) == "" and kv.stats.pinned_blocks == 6, "the old and the new together would pass the cap"
    assert [each.num_tokens for each in kv.pins.infos()] == [6 * B]
    pressure(kv, 8)
    assert kv.match([*second, 1]) == 6 * B and kv.match([*first, 1]) == 2 * B
    assert kv.unpin("a") and kv.stats.num_leased == (0,)


def test_replacing_a_pin_uses_what_it_gives_back() -> None:
    kv = make(13)
    first, second = prompt(3 * B), prompt(3 * B, 1)
    life(kv, 1, [*first, 1], None)
    life(kv, 2, [*second, 1], None)
    kv.pin("a", [*first, 1], kv.claim(prompt_len=len(first)))
    kv.admit(3, [1], limit=9 * B)  # all but the pin's three
    assert "promised" in kv.pin("b", [*second, 1], kv.claim(prompt_len=len(second)))
    assert kv.pin("a", [*second, 1], kv.claim(prompt_len=len(second))) == ""
    kv.check()
    assert kv.extend(3, 9 * B)


def test_pins_never_take_what_was_promised() -> None:
    kv = make(11)
    tokens = prompt(4 * B)
    life(kv, 1, [*tokens, 1], None)
    claim = kv.claim(prompt_len=len(tokens))
    assert kv.can_admit([1], num_tokens=8 * B)
    kv.admit(2, [1], limit=8 * B)
    assert "promised" in kv.pin("a", [*tokens, 1], claim)
    kv.release(2)
    assert "may need its blocks" in kv.pin("a", [*tokens, 1], claim, longest=7 * B)
    assert kv.pin("a", [*tokens, 1], claim, longest=6 * B) == ""
    assert kv.max_tokens() == 6 * B
    assert kv.can_admit([1], num_tokens=6 * B) and not kv.can_admit([1], num_tokens=6 * B + 1)


@pytest.mark.parametrize("window", [None, 6])
def test_what_a_pin_holds_of_a_window_group(window: int | None) -> None:
    specs = tuple([GroupSpec((at,), 1, 8, "float32", window=[None, window][at]) for at in range(2)])
    kv = make((31, 31), specs=specs)
    tokens = prompt(6 * B)
    serve(kv, 1, [*tokens, 1])
    assert kv.pin("a", [*tokens, 1], kv.claim(prompt_len=len(tokens))) == ""
    assert kv.stats.num_leased == (6, 6 if window is None else 2)
    pressure(kv, 24)
    assert kv.match([*tokens, 1]) == 6 * B
