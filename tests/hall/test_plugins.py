from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import plugins

SYMBOL = "__all__ = ['Thing']\nclass Thing:\n    origin = __name__\n"
TREE = "plugin_test_tree"


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """plugins.py itself, in a package of its own: its rooms hold what the test writes."""
    write(tmp_path / TREE / "plugins.py", Path(plugins.__file__).read_text(encoding="utf-8"))
    write(tmp_path / TREE / "models" / "llama.py", SYMBOL)
    write(tmp_path / TREE / "models" / "qwen3.py", SYMBOL)
    write(tmp_path / TREE / "models" / "__init__.py", "raise AssertionError('listing must not import the room')")
    write(tmp_path / TREE / "models" / "_rope.py", "")
    write(tmp_path / TREE / "models" / "port.py", "")
    write(tmp_path / TREE / "kernels" / "moe" / "__init__.py", "")
    write(tmp_path / TREE / "kernels" / "moe" / "grouped.py", SYMBOL)
    write(tmp_path / TREE / "kernels" / "rope.py", SYMBOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(f"{TREE}.plugins")
    for name in [name for name in sys.modules if name.startswith((TREE, "outside_"))]:
        del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(site: Path, name: str, entries: dict[str, str]) -> None:
    """A package `name` with one module, as an installer would leave it in `site`."""
    write(site / f"outside_{name}.py", SYMBOL + "other = 1\n")
    write(site / f"outside_{name}-1.0.dist-info" / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entries.items()]
    write(site / f"outside_{name}-1.0.dist-info" / "entry_points.txt", "\n".join(["[headrace.plugins]", *lines]))


def test_names_are_files_and_are_not_imported(rooms: Any) -> None:
    assert rooms.names("models") == ["llama", "qwen3"]
    assert rooms.names("kernels") == ["rope"]
    assert rooms.names("kernels.moe") == ["grouped"]
    assert rooms.names("quant") == []
    assert f"{TREE}.models" not in sys.modules


def test_load_gives_the_one_symbol(rooms: Any) -> None:
    assert rooms.load("kernels", "rope").origin == f"{TREE}.kernels.rope"
    assert rooms.load("kernels.moe", "grouped").origin == f"{TREE}.kernels.moe.grouped"


def test_a_file_with_two_symbols_is_no_plugin(rooms: Any, tmp_path: Path) -> None:
    write(tmp_path / TREE / "quant" / "fp8.py", "__all__ = ['A', 'B']\nA = B = 1\n")
    with pytest.raises(TypeError, match=r"quant\.fp8 must export exactly one name"):
        rooms.load("quant", "fp8")


def test_unknown_names_get_the_closest_valid_ones(rooms: Any) -> None:
    with pytest.raises(ValueError, match=r"^unknown models plug-in 'Lama': did you mean 'llama'\?$"):
        rooms.load("models", "Lama")
    with pytest.raises(ValueError, match="^unknown models plug-in 'zzz': it is one of llama, qwen3$"):
        rooms.load("models", "zzz")
    with pytest.raises(ValueError, match="the room has none installed"):
        rooms.load("quant", "fp8")
    with pytest.raises(ValueError, match="unknown plug-in room 'modles'"):
        rooms.names("modles")


@pytest.mark.parametrize("name", ["_rope", "port", "__init__", "../plugins", ""])
def test_support_files_and_paths_are_not_loaded(rooms: Any, name: str) -> None:
    with pytest.raises(ValueError, match="unknown models plug-in"):
        rooms.load("models", name)


def test_a_package_outside_joins_a_room(rooms: Any, tmp_path: Path) -> None:
    install(
        tmp_path,
        "pack",
        {
            "models:mine": "outside_pack",
            "models:direct": "outside_pack:other",
            "quant:mine": "outside_pack:Thing",
            "unheard:of": "outside_pack",
        },
    )
    assert rooms.names("models") == ["direct", "llama", "mine", "qwen3"]
    assert rooms.names("quant") == ["mine"]
    assert rooms.names("kernels") == ["rope"]
    assert "outside_pack" not in sys.modules
    assert rooms.load("models", "mine").origin == "outside_pack"
    assert rooms.load("models", "direct") == 1
    assert rooms.load("quant", "mine") is rooms.load("models", "mine")


def test_two_packages_may_not_offer_one_name(rooms: Any, tmp_path: Path) -> None:
    install(tmp_path, "one", {"models:qwen3": "outside_one", "models:new": "outside_one"})
    install(tmp_path, "two", {"models:new": "outside_two"})
    assert rooms.names("models") == ["llama", "new", "qwen3"]
    with pytest.raises(ValueError, match=r"'qwen3' is offered by more than one package \(headrace, one\)"):
        rooms.load("models", "qwen3")
    with pytest.raises(ValueError, match=r"'new' is offered by more than one package \((one, two|two, one)\)"):
        rooms.load("models", "new")


def test_a_broken_package_is_named(rooms: Any, tmp_path: Path) -> None:
    install(tmp_path, "bad", {"models:bad": "outside_missing", "models:none": "outside_bad:Nothing"})
    with pytest.raises(ValueError, match=r"plug-in models:bad of package bad can't be loaded \(ModuleNotFoundError"):
        rooms.load("models", "bad")
    with pytest.raises(ValueError, match=r"models:none of package bad can't be loaded \(AttributeError"):
        rooms.load("models", "none")


def test_every_own_plugin_is_listed() -> None:
    source = Path(plugins.__file__).parent
    for room in plugins.ROOMS:
        files = {path.stem for path in source.joinpath(*room.split(".")).glob("[!_]*.py")} - {"port"}
        assert files == set(plugins.names(room))
