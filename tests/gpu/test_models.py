"""The contract of the models room on a GPU: every file under each of its types and forms, over the backends of a GPU.

Held to transformers on the host, in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.captured import check_engine
from tests.kits.latent import pretend_it_pays
from tests.kits.model import check_all, make_case
from tests.kits.sequences import Place
from tests.models.test_contract import FORMS, MODEL_TYPES, skip_unless_known
from tests.models.test_transformers import HOSTED

pytestmark = pytest.mark.gpu

GPU = Place("cuda", "triton")
ROWS = [*(model_type for _, model_type in MODEL_TYPES), *FORMS]


@pytest.mark.parametrize("row", ROWS)
def test_like_transformers(row: str, tmp_path: Path) -> None:
    """Prefill, chunks, decode, a batch of mixed rows, a prefix hit and snapshots."""
    skip_unless_known(row)
    check_all(make_case(tmp_path, row, place=GPU))


@pytest.mark.parametrize("row", ROWS)
def test_captured_steps(row: str, tmp_path: Path) -> None:
    """Steps that replay CUDA graphs, where the file says that its may, and steps that don't."""
    skip_unless_known(row)
    check_engine(make_case(tmp_path, row))


@pytest.mark.parametrize("row", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear"])
def test_unfolded_prompts(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that latent attention has for long prompts, and doesn't where queries see chosen tokens."""
    pretend_it_pays(monkeypatch)
    check_all(make_case(tmp_path, row, place=GPU))
    check_engine(make_case(tmp_path, row))


@pytest.mark.parametrize("model_type", HOSTED)
def test_hosted_by_transformers(model_type: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, model_type, place=GPU, **HOSTED[model_type])
    check_all(case)
    check_engine(case)
