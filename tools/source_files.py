"""What tools/check.py knows of a source file: its room, its syntax tree and its imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

PACKAGE = "headrace"
SOURCE = f"src/{PACKAGE}"
OTHER_FOLDERS = ("tools", "tests", "benchmarks", "scripts", "examples", "docs")

HALL_FILES = frozenset({"types", "params", "seam", "seeds", "env", "plugins", "wire", "log"})
ENTRY_FILES = frozenset({"llm", "llmapi"})

# Room -> the rooms it may import besides itself. "init" is headrace/__init__.py, "entry" is llm.py and its like.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "hall": frozenset(),
    "hub": frozenset({"hall"}),
    "text": frozenset({"hall", "hub"}),
    "front": frozenset({"hall", "hub", "text"}),
    "bench": frozenset({"hall", "hub", "text"}),
    "eval": frozenset({"hall", "hub", "text"}),
    "kvcache": frozenset({"hall"}),
    "scheduler": frozenset({"hall", "kvcache", "transfer"}),
    "transfer": frozenset({"hall"}),
    "server": frozenset({"hall", "hub", "text", "front"}),
    "kernels": frozenset({"hall"}),
    "quant": frozenset({"hall", "kernels"}),
    "attention": frozenset({"hall", "kernels"}),
    "layers": frozenset({"hall", "kernels", "quant", "attention"}),
    "models": frozenset({"hall", "layers"}),
    "sampling": frozenset({"hall", "kernels"}),
    "speculative": frozenset({"hall", "sampling"}),
    "engine": frozenset(
        {"hall", "hub", "transfer", "kernels", "quant", "attention", "layers", "models", "sampling", "speculative"}
    ),
    "runtime": frozenset({"hall", "hub", "text", "kvcache", "scheduler", "transfer", "engine"}),
    "doctor": frozenset({"hall", "hub", "text", "kernels", "quant", "layers", "engine", "runtime"}),
    "simulate": frozenset({"hall", "hub", "text", "bench", "kvcache", "scheduler", "runtime"}),
    "tune": frozenset({"hall", "hub", "text", "bench", "simulate", "runtime"}),
}
IMPORT_ANYTHING = frozenset({"cli", "entry", "init"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module, absolute. `names` are what `from module import names` asks for."""

    module: str
    names: tuple[str, ...]
    line: int
    at_top: bool
    typing_only: bool


@dataclass
class SourceFile:
    file: str  # relative to the root, with slashes
    tree: ast.Module
    num_lines: int
    module: str = ""  # dotted name; empty outside the package
    room: str = ""
    imports: list[Import] = field(default_factory=list)

    @property
    def is_package(self) -> bool:
        return self.file.endswith("/__init__.py")

    @property
    def in_room(self) -> PurePosixPath:
        return PurePosixPath(self.file).relative_to(SOURCE)


def read_tree(root: Path) -> list[SourceFile]:
    files: list[SourceFile] = []
    for folder in (SOURCE, *OTHER_FOLDERS):
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            source = SourceFile(path.relative_to(root).as_posix(), ast.parse(text, str(path)), len(text.splitlines()))
            if folder == SOURCE:
                parts = [PACKAGE, *source.in_room.with_suffix("").parts]
                source.module = ".".join(parts[:-1] if source.is_package else parts)
                source.room = room_of(source.module)
            source.imports = list(find_imports(source))
            files.append(source)
    return files


def room_of(module: str) -> str:
    """The room of a dotted module name inside the package; "" when the table has none for it."""
    if module == PACKAGE:
        return "init"
    top = module.split(".")[1]
    if top in HALL_FILES or top == "config":
        return "hall"
    if top in ENTRY_FILES:
        return "entry"
    if top == "__main__":
        return "cli"
    return top if top in MAY_IMPORT or top in IMPORT_ANYTHING else ""


def find_imports(source: SourceFile) -> Iterator[Import]:
    def walk(node: ast.AST, at_top: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, (), child.lineno, at_top, typing_only)
            elif isinstance(child, ast.ImportFrom):
                names = tuple(alias.name for alias in child.names)
                yield Import(absolute(source, child), names, child.lineno, at_top, typing_only)
            elif isinstance(child, ast.Call) and (literal := literal_import(child)):
                yield Import(literal, (), child.lineno, at_top, typing_only)
            elif isinstance(child, ast.If) and is_type_checking(child.test):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), at_top, True)
                for statement in child.orelse:
                    yield from walk(ast.Module([statement], []), at_top, typing_only)
                continue
            yield from walk(child, at_top and not isinstance(child, Function | ast.Lambda), typing_only)

    return walk(source.tree, True, False)


def absolute(source: SourceFile, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    keep = len(parts) - node.level + (1 if source.is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def literal_import(call: ast.Call) -> str:
    """The module of `importlib.import_module("x")` or `__import__("x")`, if the name is written out."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in ("import_module", "__import__") or not call.args:
        return ""
    first = call.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).split(".")[-1] == "TYPE_CHECKING"


def targets(item: Import, modules: dict[str, SourceFile]) -> list[str]:
    """The package's modules that an import names: a submodule where one has that name, else the module itself."""
    if item.module.split(".")[0] != PACKAGE:
        return []
    found = [f"{item.module}.{name}" for name in item.names if f"{item.module}.{name}" in modules]
    if len(found) < len(item.names) or not item.names:
        found.append(item.module)
    return found
