"""The structure of the code, checked with plain `ast`: nothing of the package is imported, and it takes seconds.

    python tools/check.py [ROOT]

Rules: `room` and `third-party` (the import table of docs/architecture.md), `cycle`, `torch` (rooms that must not bring
torch along), `size-file`, `size-function`, `size-class`, `plugin` (one file, one exported symbol) and `forbidden`.
A finding is one line, `file:line: rule: message`, and makes the exit status 1.

What may break a rule stands in tools/exceptions.py with its reason, under (rule, "file") or (rule, "file:symbol");
an entry that nothing needs any more is a finding too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from source_files import (
    IMPORT_ANYTHING,
    MAY_IMPORT,
    PACKAGE,
    SOURCE,
    Function,
    Import,
    SourceFile,
    read_tree,
    room_of,
    targets,
)

TORCH_FREE = frozenset({"hall", "hub", "text", "front", "bench", "kvcache", "scheduler", "transfer", "server", "init"})
BRINGS_TORCH = ("torch", "torchvision", "torchaudio", "triton", "transformers", "accelerate", "safetensors.torch")
HALL_THIRD_PARTY = frozenset({"annotated_types", "msgspec", "numpy", "pydantic", "typing_extensions", "yaml"})

PLUGIN_ROOMS = ("attention", "kernels", "kernels/moe", "models", "quant", "server/parsers", "speculative", "transfer")
NOT_PLUGINS = frozenset({"port.py"})  # as in headrace/plugins.py; so are names that begin with an underscore

MAX_FILE_LINES = 400
MAX_FILE_LINES_IN = {"kernels": 600, "models": 600}
MAX_FUNCTION_LINES = 60
MAX_CLASS_ATTRIBUTES = 15

FORBIDDEN_MODULES = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill")
FORBIDDEN_METHODS = frozenset({"recv_pyobj", "send_pyobj"})
FORBIDDEN_FILES = frozenset({"utils.py", "util.py", "helpers.py", "misc.py"})


@dataclass(frozen=True)
class Finding:
    file: str
    line: int
    rule: str
    message: str
    symbol: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


def check_rooms(files: list[SourceFile], modules: dict[str, SourceFile]) -> Iterator[Finding]:
    for source in files:
        if not source.module:
            continue
        if not source.room:
            yield Finding(source.file, 1, "room", f"{source.module} is in no room of the import table", source.module)
            continue
        for item in source.imports:
            for target in targets(item, modules):
                if not is_import_allowed(source.room, room_of(target), item):
                    message = f"{source.room} may not import {target} ({room_of(target) or 'no room'})"
                    yield Finding(source.file, item.line, "room", message, target)
            if source.room == "hall" and not is_hall_third_party(item.module):
                message = f"hall may import the standard library, pydantic and msgspec, not {item.module}"
                yield Finding(source.file, item.line, "third-party", message, item.module)


def is_import_allowed(room: str, target_room: str, item: Import) -> bool:
    if target_room == "init":
        return item.names == ("__version__",) or room in ("entry", "cli")
    if room == "init":
        return item.typing_only
    if room in IMPORT_ANYTHING:
        return target_room != "cli" or room == "cli"
    return target_room == room or target_room in MAY_IMPORT[room]


def is_hall_third_party(module: str) -> bool:
    top = module.split(".")[0]
    return top == PACKAGE or top in sys.stdlib_module_names or top in HALL_THIRD_PARTY


def check_cycles(files: list[SourceFile], modules: dict[str, SourceFile]) -> Iterator[Finding]:
    """Cycles of top-level imports: one inside a function breaks a cycle on purpose, one for types costs nothing."""
    graph = {source.module: sorted(import_edges(source, modules)) for source in files if source.module}
    for group in strongly_connected(graph):
        first = modules[min(group)]
        line = next(i.line for i in first.imports if is_loaded(i) and not {*targets(i, modules)}.isdisjoint(group))
        yield Finding(first.file, line, "cycle", f"import cycle: {' <-> '.join(sorted(group))}", min(group))


def import_edges(source: SourceFile, modules: dict[str, SourceFile]) -> set[str]:
    found = {target for item in source.imports if is_loaded(item) for target in targets(item, modules)}
    return {target for target in found if target in modules and target != source.module}


def is_loaded(item: Import) -> bool:
    """Whether importing the file runs this import."""
    return item.at_top and not item.typing_only


def strongly_connected(graph: dict[str, list[str]]) -> Iterator[set[str]]:
    """Groups of two and more modules that reach each other."""
    reach = {node: reachable(graph, node) for node in graph}
    seen: set[str] = set()
    for node in graph:
        group = {other for other in reach[node] if node in reach[other]}
        if group - {node} and node not in seen:
            seen |= group
            yield group | {node}


def reachable(graph: dict[str, list[str]], start: str) -> set[str]:
    found: set[str] = set()
    queue = list(graph[start])
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue.extend(graph[node])
    return found


def check_torch(files: list[SourceFile], modules: dict[str, SourceFile]) -> Iterator[Finding]:
    """No torch, directly at any level, nor through top-level imports of the package's own modules."""
    graph = {source.module: sorted(loads(source, modules)) for source in files if source.module}
    brings = {module for module, source in modules.items() if any(is_loaded(i) for i in torch_imports(source))}
    for source in files:
        if not is_torch_free(source):
            continue
        for item in torch_imports(source):
            message = f"{source.room} is a room without torch, and {item.module} brings it"
            yield Finding(source.file, item.line, "torch", message, item.module)
        for item in source.imports:
            via = {t for t in targets(item, modules) if t in modules and is_loaded(item)}
            loaded = via.union(*(reachable(graph, target) for target in via))
            if guilty := sorted(name for name in loaded & brings if not is_torch_free(modules[name])):
                message = f"{source.room} is a room without torch, and {item.module} brings it through {guilty[0]}"
                yield Finding(source.file, item.line, "torch", message, item.module)


def is_torch_free(source: SourceFile) -> bool:
    return source.room in TORCH_FREE and not (source.room == "transfer" and is_plugin(source))


def torch_imports(source: SourceFile) -> list[Import]:
    def brings(module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in BRINGS_TORCH)

    return [i for i in source.imports if brings(i.module) or any(brings(f"{i.module}.{name}") for name in i.names)]


def loads(source: SourceFile, modules: dict[str, SourceFile]) -> set[str]:
    """What importing a module loads: its imports, and the `__init__` of each folder on the way to them."""
    found = import_edges(source, modules)
    for name in (source.module, *found.copy()):
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts))} & modules.keys()
    return found - {source.module}


def check_sizes(files: list[SourceFile], modules: dict[str, SourceFile]) -> Iterator[Finding]:
    pydantic = pydantic_classes(files)
    for source in files:
        limit = MAX_FILE_LINES_IN.get(source.room, MAX_FILE_LINES)
        if source.num_lines > limit:
            message = f"{source.num_lines} lines, at most {limit}"
            yield Finding(source.file, source.num_lines, "size-file", message)
        for symbol, node in definitions(source.tree):
            if isinstance(node, Function) and not source.file.startswith("tests/"):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    message = f"function {symbol} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
                    yield Finding(source.file, node.lineno, "size-function", message, symbol)
            elif isinstance(node, ast.ClassDef) and node.name not in pydantic and not is_config(source):
                num_attributes = len(attributes(node))
                if num_attributes > MAX_CLASS_ATTRIBUTES:
                    message = f"class {symbol} has {num_attributes} attributes, at most {MAX_CLASS_ATTRIBUTES}"
                    yield Finding(source.file, node.lineno, "size-class", message, symbol)


def is_config(source: SourceFile) -> bool:
    return source.file.startswith(f"{SOURCE}/config/")


def pydantic_classes(files: list[SourceFile]) -> set[str]:
    """Names of classes that descend from BaseModel: their fields are a file format, not state."""
    bases: dict[str, set[str]] = {}
    for source in files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    found = {"BaseModel"}
    while grown := {name for name, parents in bases.items() if parents & found} - found:
        found |= grown
    return found


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
            yield name, child
        yield from definitions(child, name)


def attributes(node: ast.ClassDef) -> set[str]:
    """Annotated fields of the class body and `self.x` that `__init__` or `__post_init__` assigns."""
    found: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if "ClassVar" not in ast.unparse(child.annotation):
                found.add(child.target.id)
        elif isinstance(child, Function) and child.name in ("__init__", "__post_init__"):
            found |= {
                inner.attr
                for inner in ast.walk(child)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            }
    return found


def check_plugins(files: list[SourceFile], modules: dict[str, SourceFile]) -> Iterator[Finding]:
    for source in files:
        if not is_plugin(source):
            continue
        exported, line = exported_names(source.tree)
        if len(exported) != 1:
            message = f"a plug-in exports exactly one name in __all__, not {exported or 'none'}"
            yield Finding(source.file, line, "plugin", message)
        elif exported[0] not in defined_names(source.tree):
            yield Finding(source.file, line, "plugin", f"__all__ names {exported[0]}, which the file doesn't define")


def is_plugin(source: SourceFile) -> bool:
    path = source.in_room if source.module else PurePosixPath()
    is_support = path.name.startswith("_") or path.name in NOT_PLUGINS
    return path.parent.as_posix() in PLUGIN_ROOMS and not is_support


def exported_names(tree: ast.Module) -> tuple[list[str], int]:
    """The names of a written-out `__all__`, and its line."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            items = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else []
            return [str(item.value) for item in items if isinstance(item, ast.Constant)], node.lineno
    return [], 1


def defined_names(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
    return found


def check_forbidden(files: list[SourceFile], modules: dict[str, SourceFile]) -> Iterator[Finding]:
    for source in files:
        if PurePosixPath(source.file).name in FORBIDDEN_FILES:
            yield Finding(source.file, 1, "forbidden", "name a file after what it does")
        for item in source.imports:
            if item.module.split(".")[0] in FORBIDDEN_MODULES:
                message = f"{item.module} runs code from what it reads: use msgpack, JSON or safetensors"
                yield Finding(source.file, item.line, "forbidden", message, item.module)
        for node in ast.walk(source.tree):
            yield from forbidden_node(source.file, node)


def forbidden_node(file: str, node: ast.AST) -> Iterator[Finding]:
    if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_METHODS:
        yield Finding(file, node.lineno, "forbidden", f"{node.attr} is pickle: send msgpack", node.attr)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
        yield Finding(file, node.lineno, "forbidden", f"{node.func.id}() runs text as code", node.func.id)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
        if not has_true(node, "weights_only"):
            yield Finding(file, node.lineno, "forbidden", "torch.load without weights_only=True is pickle", "load")
    elif isinstance(node, ast.Call) and has_true(node, "allow_pickle"):
        yield Finding(file, node.lineno, "forbidden", "allow_pickle=True runs code from what it reads", "allow_pickle")
    elif isinstance(node, ast.ClassDef):
        mixins = [name for name in (node.name, *map(ast.unparse, node.bases)) if name.lower().endswith("mixin")]
        if mixins:
            yield Finding(file, node.lineno, "forbidden", f"{mixins[0]}: compose, no mixins", node.name)


def has_true(call: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword and ast.unparse(k.value) == "True" for k in call.keywords)


def read_exceptions(root: Path) -> dict[tuple[str, str], tuple[int, str]]:
    """(rule, place) -> (line in tools/exceptions.py, reason)."""
    path = root / "tools/exceptions.py"
    if not path.exists():
        return {}
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for key, reason in zip(value.keys, value.values, strict=True):
                assert key is not None, "tools/exceptions.py: no ** in the table"
                found[ast.literal_eval(key)] = (key.lineno, ast.literal_eval(reason))
    return found


def apply_exceptions(findings: Iterable[Finding], excused: dict[tuple[str, str], tuple[int, str]]) -> Iterator[Finding]:
    used: set[tuple[str, str]] = set()
    for finding in findings:
        keys = {(finding.rule, finding.file), (finding.rule, f"{finding.file}:{finding.symbol}")} & excused.keys()
        used |= keys
        if not keys:
            yield finding
    for (rule, place), (line, reason) in excused.items():
        if (rule, place) not in used:
            yield Finding("tools/exceptions.py", line, "exception", f"{rule} {place} is not needed any more: remove it")
        elif not reason.strip():
            yield Finding("tools/exceptions.py", line, "exception", f"{rule} {place} gives no reason")


RULES = (check_rooms, check_cycles, check_torch, check_sizes, check_plugins, check_forbidden)


def check(root: Path) -> list[Finding]:
    files = read_tree(root)
    modules = {source.module: source for source in files if source.module}
    findings = {finding for rule in RULES for finding in rule(files, modules)}
    ordered = sorted(findings, key=lambda f: (f.file, f.line, f.rule, f.message))
    return list(apply_exceptions(ordered, read_exceptions(root)))


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    try:
        findings = check(root)
    except SyntaxError as error:
        print(f"{error.filename}:{error.lineno}: syntax: {error.msg}")
        return 1
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
