"""Blocks that a window has left may hold anything, be block 0, or be somebody else's: nobody reads them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.engine.rank import Rank
from headrace.seam import DUMMY_BLOCK
from tests.engine.driver import BLOCK, Driver, open_rank, straight
from tests.twin.harness import VOCAB, tiny_gemma3

COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["TRTLLM", "VANILLA"])
def rank(request: pytest.FixtureRequest, folder: Path) -> Iterator[Rank]:
    """With the compiled kernels, and with their twins."""
    opened = open_rank(folder, attn_backend=request.param)
    yield opened
    opened.close()


def prompt(length: int) -> list[int]:
    return [random.Random(f"window {at}").randrange(VOCAB) for at in range(length)]


def poison(rank: Rank, group: int, block: int) -> None:
    for layer in rank.groups[group].layers:
        cache = rank.memory.pools.layer(layer)
        cache.k[block] = float("nan")
        cache.v[block] = float("nan")


class Freeing:
    """Gives back what the window has left after every step, poisoned, as block 0 or dealt to the next who asks."""

    def __init__(self, driver: Driver, *, as_dummy: bool) -> None:
        self.driver = driver
        self.as_dummy = as_dummy
        self.num_freed = 0

    def after(self, slot: int) -> None:
        for group, spec in enumerate(self.driver.rank.groups):
            if spec.window is None:
                continue
            poison(self.driver.rank, group, DUMMY_BLOCK)
            first = self.driver.lengths[slot] - spec.window + 1
            for index, block in enumerate(self.driver.tables[slot][group]):
                if (index + 1) * BLOCK <= first and block:
                    self.num_freed += 1
                    poison(self.driver.rank, group, block)
                    self.driver.free[group].append(block)
                    if self.as_dummy:
                        self.driver.change_table(slot, group, index, DUMMY_BLOCK)
                    else:
                        self.driver.tables[slot][group][index] = 0  # the device's table still names it


@pytest.mark.parametrize("as_dummy", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, BLOCK, 7, 40])
def test_freed_blocks_are_never_read(rank: Rank, chunk: int, as_dummy: bool) -> None:
    driver, ids = Driver(rank), prompt(26)
    expected = straight(driver, ids, COUNT)
    freeing = Freeing(driver, as_dummy=as_dummy)
    driver.begin(1)
    tokens: Sequence[int] = ()
    for at in range(0, len(ids), chunk):
        tokens = driver.rows({1: ids[at : at + chunk]}).tokens.tolist()
        freeing.after(1)
    tokens = list(tokens)
    while len(tokens) < COUNT:
        tokens += driver.generate(1, 1)
        freeing.after(1)
    assert tokens == expected
    assert freeing.num_freed >= 8


def test_blocks_of_one_are_reused_by_another(rank: Rank) -> None:
    """Two sequences over so few blocks of the window group that each lives in what the other has left."""
    driver = Driver(rank)
    texts = {1: prompt(30), 2: prompt(40)[10:]}
    expected = {slot: straight(driver, ids, COUNT) for slot, ids in texts.items()}
    (windowed,) = [group for group, spec in enumerate(rank.groups) if spec.window is not None]
    driver.free[windowed] = driver.free[windowed][-10:]
    freeing = Freeing(driver, as_dummy=False)
    got: dict[int, list[int]] = {1: [], 2: []}
    for slot, ids in texts.items():
        driver.begin(slot)
        for at in range(0, len(ids), BLOCK):
            got[slot] = driver.rows({slot: ids[at : at + BLOCK]}).tokens.tolist()
            freeing.after(slot)
    while len(got[1]) < COUNT:
        tokens = driver.rows({1: None, 2: None}).tokens.tolist()
        for slot, token in zip((1, 2), tokens):
            got[slot].append(token)
            freeing.after(slot)
    assert got == expected
