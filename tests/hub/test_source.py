from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.hub import source as source_module
from headrace.hub.errors import ModelError
from headrace.hub.source import ModelSource, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hf_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def gguf_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


def refused(name: str | Path) -> str:
    with pytest.raises(ModelError) as error:
        resolve_model(str(name))
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)
    return str(error.value)


def test_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folder(tmp_path / "model")
    file = gguf_file(tmp_path / "quantised" / "m.gguf")
    odd = gguf_file(tmp_path / "blob-without-suffix")
    assert resolve_model(str(folder)) == ModelSource(kind="hf", path=folder, name=str(folder))
    assert resolve_model(str(file)) == ModelSource(kind="gguf", path=file, name=str(file))
    assert resolve_model(str(file.parent)).path == file
    assert resolve_model(str(odd)).kind == "gguf"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model").path == folder
    assert resolve_model("./quantised/m.gguf").path == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model").path == folder


def test_an_alias_is_pulled_even_beside_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf_file(tmp_path / "cached.gguf")
    monkeypatch.setattr(source_module, "pull", lambda name: file)
    monkeypatch.chdir(tmp_path)
    hf_folder(tmp_path / "smollm2")
    assert resolve_model("smollm2") == ModelSource(kind="gguf", path=file, name="smollm2", alias="smollm2")
    assert resolve_model("./smollm2").kind == "hf"


def test_misspelt_names_get_the_closest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hf_folder(tmp_path / "models" / "Llama-3.2-1B")
    gguf_file(tmp_path / "models" / "llama.Q4_K_M.gguf")
    assert "did you mean the alias 'smollm2'?" in refused("smolm2")
    assert "did you mean the alias 'gemma3-270m'?" in refused("gemma-3-270m")
    assert f"did you mean '{tmp_path}/models/Llama-3.2-1B'?" in refused(f"{tmp_path}/models/Llama-3.2-1b")
    assert "llama.Q4_K_M.gguf" in refused("models/llama.Q4_0.gguf")
    assert "/none doesn't exist" in refused(tmp_path / "none" / "below" / "model")
    assert "an alias (gemma3-270m, smollm2)" in refused("xyz")


def test_folders_that_hold_no_single_model(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has neither config.json nor a .gguf file" in refused(empty)
    hf_folder(tmp_path / "outer" / "inner")
    assert f"did you mean {tmp_path / 'outer' / 'inner'}?" in refused(tmp_path / "outer")
    gguf_file(tmp_path / "two" / "a.gguf")
    gguf_file(tmp_path / "two" / "b.gguf")
    assert "holds 2 .gguf files" in refused(tmp_path / "two")


def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<html>not found</html>")
    assert "not a GGUF file" in refused(tmp_path / "m.gguf")
    (tmp_path / "weights.safetensors").write_bytes(b"12345678")
    assert "the folder that holds config.json" in refused(tmp_path / "weights.safetensors")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached_snapshot(hub_cache: Path, *files: str) -> Path:
    repo = hub_cache / "models--org--name"
    snapshot = hf_folder(repo / "snapshots" / COMMIT)
    for file in files:
        (snapshot / file).write_bytes(b"GGUF")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_hub_id_is_found_in_the_local_cache(hub_cache: Path) -> None:
    snapshot = cached_snapshot(hub_cache, "model.safetensors")
    assert resolve_model("org/name") == ModelSource(kind="hf", path=snapshot, name="org/name", revision=COMMIT)


def test_a_cached_snapshot_without_weights_is_not_a_model(hub_cache: Path) -> None:
    cached_snapshot(hub_cache)
    assert "can't be fetched (HF_HUB_OFFLINE is set)" in refused("org/name")


def test_a_hub_id_that_is_nowhere_names_the_remedy(hub_cache: Path) -> None:
    message = refused("org/name")
    assert "'org/name' is not in" in message and "hf download org/name" in message and "smollm2" in message


def test_without_network_a_hub_id_fails_with_one_line(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = sys.modules["huggingface_hub"]
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)

    class NoNetwork:
        def model_info(self, *_: object, timeout: float, **__: object) -> None:
            assert 0 < timeout <= 10
            raise ConnectionError("[Errno -2] name not known\nand a long story")

    monkeypatch.setattr(hub, "HfApi", NoNetwork)
    assert "[Errno -2] name not known): run" in refused("org/name")


def test_a_reachable_hub_is_asked_for_safe_files_only(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = sys.modules["huggingface_hub"]
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)

    class Api:
        def model_info(self, *_: object, **__: object) -> None: ...

    def download(name: str, **options: object) -> str:
        if options.get("local_files_only"):
            raise FileNotFoundError
        patterns = options["allow_patterns"]
        assert isinstance(patterns, list) and not any(p.endswith((".py", ".bin", ".pt", "*")) for p in patterns)
        return str(cached_snapshot(hub_cache, "model.safetensors"))

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_model("org/name", revision="main").revision == COMMIT


def test_hub_ids_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refused("org/name")
