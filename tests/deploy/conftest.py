from __future__ import annotations

import pytest

from .exporter import exported


@pytest.fixture(scope="session")
def metrics_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return exported(tmp_path_factory.mktemp("model"))
