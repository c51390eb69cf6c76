from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace import env


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_dir() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", "~/own")
    assert env.cache_dir() == tmp_path / "own"
    monkeypatch.setenv("HEADRACE_CACHE", " ")
    assert env.cache_dir() == tmp_path / "xdg" / "headrace"


def test_log_level_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_LOG_LEVEL", raising=False)
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    assert env.log_level() == "info"
    assert env.api_keys() == []
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "Debug")
    monkeypatch.setenv("HEADRACE_API_KEY", "a, b,,")
    assert env.log_level() == "debug"
    assert env.api_keys() == ["a", "b"]


def test_overrides_reach_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST_VALUE", "old")
    env.apply_overrides({"HEADRACE_TEST_VALUE": "new"})
    env.apply_overrides(None)
    assert os.environ["HEADRACE_TEST_VALUE"] == "new"


def test_the_registry_is_complete_and_explained() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(names) == len(set(names))
    assert all(variable.meaning.endswith(".") for variable in env.VARIABLES)
