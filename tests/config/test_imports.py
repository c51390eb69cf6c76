"""The room is light: no torch, and a class costs only its own module."""

from __future__ import annotations

import subprocess
import sys

HEAVY = "('torch', 'numpy', 'transformers', 'fastapi', 'zmq')"


def loaded(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_nothing_heavy_comes_along() -> None:
    code = "import headrace.cli.config, headrace.config.schema, headrace.log, headrace.env"
    assert loaded(f"import sys; {code}; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_one_class_does_not_load_all() -> None:
    code = "import sys; from headrace.config import KvCacheConfig; print('headrace.config.llm_args' in sys.modules)"
    assert loaded(code) == "False"
    assert loaded("import sys, headrace.log, headrace.env; print('pydantic' in sys.modules)") == "False"
