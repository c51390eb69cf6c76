"""Kimi-K3 on a GPU, over its backends and with captured steps, against the reference on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.hub.source import resolve_model
from tests.kits.captured import check_engine
from tests.kits.model import check_all, load_case
from tests.kits.sequences import Place
from tests.kits.tiny_kimi_k3 import save_kimi_k3

pytestmark = pytest.mark.gpu

GPU = Place("cuda", "triton")


def test_like_the_reference(tmp_path: Path) -> None:
    oracle = save_kimi_k3(tmp_path)
    check_all(load_case(resolve_model(str(tmp_path)), oracle, place=GPU))


def test_captured_steps(tmp_path: Path) -> None:
    oracle = save_kimi_k3(tmp_path)
    check_engine(load_case(resolve_model(str(tmp_path)), oracle))
