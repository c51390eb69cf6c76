"""What several twins need: cores that are closed at the end, and a count of preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.runtime.core import Core
from headrace.scheduler.section import SectionScheduler


@pytest.fixture
def opened() -> Iterator[list[Core]]:
    """A test appends what is to be closed behind it."""
    cores: list[Core] = []
    yield cores
    for core in cores:
        core.close()


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by each preemption."""
    found: list[Any] = []
    take = SectionScheduler.take_preempted

    def counted(self: SectionScheduler) -> list[Any]:
        taken = list(take(self))
        found.extend(taken)
        return taken

    monkeypatch.setattr(SectionScheduler, "take_preempted", counted)
    return found
