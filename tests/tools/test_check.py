"""Each rule of tools/check.py catches a planted fault in a tiny tree, and leaves its legal twin alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import check
import pytest
import source_files

from headrace import plugins

ROOT = Path(__file__).parents[2]
PLUGIN = "\n__all__ = ['Thing']\nclass Thing: ...\n"


def findings(root: Path, files: dict[str, str] | None = None) -> list[str]:
    """`rule file:line` of what the checker finds; paths count from src/headrace, or from the root after a slash."""
    for name, text in (files or {}).items():
        path = root / name[1:] if name.startswith("/") else root / "src/headrace" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [f"{found.rule} {found.file.removeprefix('src/headrace/')}:{found.line}" for found in check.check(root)]


def for_types(statement: str) -> str:
    return f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {statement}\n"


CLEAN = {
    "__init__.py": for_types("from headrace.llm import LLM"),
    "__main__.py": "from headrace.cli.main import main\n",
    "cli/main.py": "from headrace import __version__, LLM\n",
    "engine/rank.py": "import torch\nfrom headrace.transfer.nixl import Thing\n",
    "kvcache/__init__.py": "from headrace.kvcache.pool import Pool\n",
    "kvcache/pool.py": "from headrace import types\nfrom . import radix\n",
    "kvcache/radix.py": "import headrace.types\n",
    "llm.py": "import torch\nfrom headrace.runtime.loop import run\n",
    "models/llama.py": f"import torch\n{PLUGIN}",
    "runtime/loop.py": "from headrace.scheduler.plan import plan\nimport headrace.engine.rank\n",
    "scheduler/plan.py": "from headrace.kvcache import Pool\n",
    "transfer/nixl.py": f"import torch\n{PLUGIN}",
    "transfer/port.py": "from headrace import types\n",
    "types.py": "import numpy\nfrom dataclasses import dataclass\n",
}


def test_a_clean_tree_has_no_findings(tmp_path: Path) -> None:
    assert findings(tmp_path, CLEAN) == []


@pytest.mark.parametrize(
    ("file", "line", "text"),
    [
        pytest.param("kvcache/pool.py", 1, "from headrace.scheduler.plan import plan", id="up the table"),
        pytest.param("kvcache/pool.py", 1, "from ..scheduler import plan", id="relative"),
        pytest.param("kvcache/pool.py", 2, "def f():\n    import headrace.scheduler.plan", id="inside a function"),
        pytest.param("kvcache/pool.py", 3, for_types("from headrace.scheduler.plan import P"), id="for types only"),
        pytest.param("kvcache/pool.py", 1, "import_module('headrace.scheduler.plan')", id="by a literal name"),
        pytest.param("wire.py", 1, "from headrace.kvcache import Pool", id="hall imports a room"),
        pytest.param("server/app.py", 2, "def f():\n    from headrace.engine import rank", id="server and device"),
        pytest.param("models/llama.py", 1, f"from headrace.attention import Port{PLUGIN}", id="models and attention"),
        pytest.param("runtime/loop.py", 1, "from headrace.llm import LLM", id="llm is imported by nothing"),
        pytest.param("runtime/loop.py", 1, "from headrace import LLM", id="nor through the package"),
        pytest.param("llm.py", 1, "import headrace.cli.main", id="cli is imported by nothing"),
        pytest.param("__init__.py", 1, "from headrace.types import X", id="the package is lazy"),
    ],
)
def test_room(tmp_path: Path, file: str, line: int, text: str) -> None:
    found = findings(tmp_path, CLEAN | {file: text})
    assert [entry for entry in found if not entry.startswith("cycle")] == [f"room {file}:{line}"]


def test_a_file_outside_the_table_has_no_room(tmp_path: Path) -> None:
    assert findings(tmp_path, {"stuff.py": "", "new/thing.py": ""}) == ["room new/thing.py:1", "room stuff.py:1"]


def test_hall_third_party(tmp_path: Path) -> None:
    text = "import json\nimport msgspec\nimport yaml\nfrom pydantic.fields import X\nimport fastapi\n"
    assert findings(tmp_path, {"config/load.py": text, "server/app.py": text}) == ["third-party config/load.py:5"]


def test_cycle(tmp_path: Path) -> None:
    files = {
        "kvcache/a.py": "import json\nfrom headrace.kvcache import b\n",
        "kvcache/b.py": "from headrace.kvcache.c import x\n",
        "kvcache/c.py": "from .a import y\n",
        "kvcache/d.py": "from .a import y\n",
    }
    assert findings(tmp_path, files) == ["cycle kvcache/a.py:2"]
    [found] = check.check(tmp_path)
    assert found.message.endswith("headrace.kvcache.a <-> headrace.kvcache.b <-> headrace.kvcache.c")
    for legal in ("def f():\n    from .a import y\n", for_types("from .a import y")):
        assert findings(tmp_path, {"kvcache/c.py": legal}) == []


def test_cycle_through_the_folder(tmp_path: Path) -> None:
    stop = "from headrace.text import other\n"
    files = {"text/__init__.py": "from headrace.text.stop import S\n", "text/stop.py": stop, "text/other.py": ""}
    assert findings(tmp_path, files) == []
    assert findings(tmp_path, {"text/stop.py": f"{stop}from headrace.text import S\n"}) == ["cycle text/__init__.py:1"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "from transformers import AutoTokenizer",
        "from safetensors import torch",
        "import safetensors.torch",
        "__import__('torch')",
    ],
)
@pytest.mark.parametrize("file", ["params.py", "server/parsers/qwen.py", "transfer/port.py", "transfer/_pending.py"])
def test_torch_direct(tmp_path: Path, file: str, text: str) -> None:
    found = findings(tmp_path, {file: f"def f():\n    {text}\n{PLUGIN}"})
    assert [entry for entry in found if not entry.startswith("third-party")] == [f"torch {file}:2"]


def test_torch_indirect(tmp_path: Path) -> None:
    files = {
        "transfer/__init__.py": "import json\nfrom headrace.transfer import middle\n",
        "transfer/middle.py": f"from headrace.transfer.nixl import Thing\n{PLUGIN}",
        "transfer/nixl.py": f"import torch\n{PLUGIN}",
    }
    assert findings(tmp_path, files) == ["torch transfer/__init__.py:2"]
    for legal in ("def f():\n    from headrace.transfer import middle\n", for_types("from . import middle")):
        assert findings(tmp_path, {"transfer/__init__.py": legal}) == []


def test_torch_through_a_folder_on_the_way(tmp_path: Path) -> None:
    """`import a.b.c` runs a/b/__init__.py, whoever asks."""
    files = {
        "transfer/__init__.py": "from headrace.engine.rank import Rank\n",
        "transfer/port.py": "",
        "transfer/_pending.py": "from headrace.transfer.port import Port\n",
        "engine/rank.py": "import torch\n",
    }
    assert "torch transfer/_pending.py:1" in findings(tmp_path, files)
    assert "torch transfer/_pending.py:1" not in findings(tmp_path, {"transfer/__init__.py": ""})


@pytest.mark.parametrize(
    ("file", "limit"),
    [("text/stop.py", 400), ("kernels/moe/_rows.py", 600), ("models/_rope.py", 600), ("/tests/text/test_x.py", 400)],
)
def test_size_of_files(tmp_path: Path, file: str, limit: int) -> None:
    assert findings(tmp_path, {file: "\n" * limit}) == []
    assert findings(tmp_path, {file: "\n" * (limit + 1)}) == [f"size-file {file.removeprefix('/')}:{limit + 1}"]


def test_size_of_functions(tmp_path: Path) -> None:
    legal = "class A:\n    @staticmethod\n    async def f():\n" + "        x = 1\n" * 59
    long = f"{legal}        x = 1\n"
    assert findings(tmp_path, {"text/stop.py": legal, "/tests/text/test_stop.py": long}) == []
    assert findings(tmp_path, {"text/stop.py": long}) == ["size-function text/stop.py:3"]


def test_size_of_classes(tmp_path: Path) -> None:
    fields = "".join(f"    f{i}: int = 0\n" for i in range(10))
    assigned = "".join(f"        self.f{i} = 0\n" for i in range(5, 15))
    methods = f"    def __init__(self):\n{assigned}    def g(self):\n        self.late = 1\n"
    legal = f"class A:\n    KIND: ClassVar[int] = 1\n{fields}{methods}"
    assert findings(tmp_path, {"text/stop.py": legal}) == []
    assert findings(tmp_path, {"text/stop.py": f"{legal}    more: int\n"}) == ["size-class text/stop.py:1"]


def test_size_of_pydantic_classes_is_free(tmp_path: Path) -> None:
    fields = "".join(f"    f{i}: int = 0\n" for i in range(16))
    files = {
        "config/args.py": f"class Args:\n{fields}",
        "server/base.py": "class Strict(pydantic.BaseModel): ...\n",
        "server/protocol.py": f"class Request(base.Strict):\n{fields}",
    }
    assert findings(tmp_path, files) == []
    assert findings(tmp_path, {"server/base.py": "class Strict: ...\n"}) == ["size-class server/protocol.py:1"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("class A: ...\n", 1),
        ("\n__all__ = []\n", 2),
        ("__all__ = ['A', 'B']\nclass A: ...\nclass B: ...\n", 1),
        ("__all__ = ['A']\nclass B: ...\n", 1),
        ("__all__ = names()\nclass A: ...\n", 1),
    ],
)
@pytest.mark.parametrize("room", ["models", "kernels/moe", "server/parsers"])
def test_plugin(tmp_path: Path, room: str, text: str, line: int) -> None:
    assert findings(tmp_path, {f"{room}/{name}.py": text for name in ("__init__", "port", "_shared")}) == []
    assert findings(tmp_path, {f"{room}/thing.py": text}) == [f"plugin {room}/thing.py:{line}"]
    for legal in ("__all__ = ['A']\nA: int = 1\n", "__all__ = ('A',)\ndef A(): ...\n"):
        assert findings(tmp_path, {f"{room}/thing.py": legal}) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "socket.recv_pyobj()",
        "eval('1')",
        "exec('1')",
        "torch.load('w.pt')",
        "torch.load('w.pt', weights_only=False)",
        "numpy.load('w.npy', allow_pickle=True)",
        "class FooMixin: ...",
        "class Foo(nn.FooMixin): ...",
    ],
)
@pytest.mark.parametrize("folder", ["/src/headrace/engine", "/tests/engine", "/benchmarks", "/tools"])
def test_forbidden(tmp_path: Path, folder: str, text: str) -> None:
    findings(tmp_path, {f"{folder}/thing.py": f"x = 1\n{text}\n"})
    assert [(found.rule, found.line) for found in check.check(tmp_path)] == [("forbidden", 2)]


def test_forbidden_leaves_lookalikes_alone(tmp_path: Path) -> None:
    text = "model.eval()\ntorch.load('w', weights_only=True)\n'import pickle'\nself.exec()\n"
    assert findings(tmp_path, {"engine/thing.py": text}) == []


def test_forbidden_file_name(tmp_path: Path) -> None:
    assert findings(tmp_path, {"engine/utils.py": ""}) == ["forbidden engine/utils.py:1"]


def test_exceptions(tmp_path: Path) -> None:
    both = ["torch text/more.py:1", "torch text/stop.py:1"]
    assert findings(tmp_path, {"text/stop.py": "import torch\n", "text/more.py": "import torch\n"}) == both

    def with_entry(entry: str) -> list[str]:
        table = f'EXCEPTIONS = {{\n    ("torch", "src/headrace/text/stop.py:torch"): "reason",\n{entry}}}\n'
        return findings(tmp_path, {"/tools/exceptions.py": table})

    assert with_entry("") == both[:1]
    assert with_entry('    ("torch", "src/headrace/text/more.py"): "whole file",\n') == []
    assert with_entry('    ("torch", "src/headrace/text/more.py"): " ",\n') == ["exception tools/exceptions.py:3"]
    stale = with_entry('    ("size-file", "src/headrace/text/more.py"): "reason",\n')
    assert stale == [both[0], "exception tools/exceptions.py:3"]


def test_command_line(tmp_path: Path) -> None:
    def run(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "src/headrace/text").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src/headrace/text/stop.py").write_text(text)
        command = [sys.executable, str(ROOT / "tools/check.py"), str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    clean = run("import json\n")
    assert (clean.returncode, clean.stdout) == (0, "")
    fault = run("import torch\n")
    line = "src/headrace/text/stop.py:1: torch: text is a room without torch, and torch brings it\n"
    assert (fault.returncode, fault.stdout, fault.stderr) == (1, line, "")
    broken = run("def f(:\n")
    assert broken.returncode == 1
    assert "stop.py:1: syntax:" in broken.stdout
    assert "Traceback" not in broken.stderr


def test_the_tables_agree_with_the_package() -> None:
    assert [room.replace(".", "/") for room in plugins.ROOMS] == list(check.PLUGIN_ROOMS)
    assert {f"{name}.py" for name in plugins.NOT_PLUGINS} == check.NOT_PLUGINS
    assert set().union(*source_files.MAY_IMPORT.values()) <= source_files.MAY_IMPORT.keys()
