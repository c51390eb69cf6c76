from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import headrace
import headrace.llmapi


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(headrace, name) is getattr(headrace.llmapi, name)
    assert name in dir(headrace)


@pytest.mark.parametrize("module", headrace._MODULES)
def test_every_public_name_is_its_modules_own_export(module: str) -> None:
    exported = importlib.import_module(f"headrace.{module}").__all__
    assert set(headrace._MODULES[module]) <= set(exported)


def test_a_script_written_for_the_other_package_finds_its_configs() -> None:
    done = run("from headrace.llmapi import CudaGraphConfig, KvCacheConfig; print(KvCacheConfig().tokens_per_block)")
    assert (done.stdout.strip(), done.stderr) == ("32", "")


def test_the_package_brings_nothing_along() -> None:
    heavy = "('torch', 'numpy', 'pydantic', 'transformers', 'zmq')"
    done = run(f"import sys, headrace, headrace.llmapi; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_ordinary_error() -> None:
    done = run("from headrace import Nonsense")
    assert "ImportError: cannot import name 'Nonsense' from 'headrace'" in done.stderr
    with pytest.raises(AttributeError, match="'headrace' has no attribute 'nonsense'"):
        _ = headrace.nonsense


def test_rooms_are_not_hidden_by_names() -> None:
    done = run("import headrace.plugins; print(headrace.plugins.__name__)")
    assert done.stdout.strip() == "headrace.plugins"
