"""What is said before weights are loaded."""

from __future__ import annotations

import pytest
import torch

from headrace.engine import memory


def test_weights_that_do_not_fit_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5_000)
    memory.check_room(5_000, torch.device("cpu"))
    with pytest.raises(MemoryError, match=r"the weights take 5,001 bytes and 5,000 bytes are free: "):
        memory.check_room(5_001, torch.device("cpu"))
