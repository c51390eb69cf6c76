"""Every command of the README and of the documentation works as it is pasted, or says why no test can try it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .blocks import KINDS, NEEDS, SHELL, Block, commands_of, read_page
from .names import operations
from .terminal import ROOT, Servers, Terminal, is_server

PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = {name: read_page(path) for name, path in PAGES.items()}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
LOADS_A_MODEL = re.compile(r"\bLLM\(|headrace (chat|generate|tune|eval|bench (throughput|latency))\b")
FAST_TIMEOUT_S = 120
SLOW_TIMEOUT_S = 1200

with_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the pages' commands want curl")


def has_servers(page: str) -> bool:
    """Pages without a server first: some of them want its port to be free."""
    return any(
        is_server(command) for block in BLOCKS[page] if block.language in SHELL for command in commands_of(block)
    )


def is_run(block: Block) -> bool:
    is_here = shutil.which(block.marks.get("with", "sh")) is not None
    return block.is_command and is_here and not {"needs", "run by"} & block.marks.keys()


def is_slow(block: Block) -> bool:
    return "slow" in block.marks


PAGES_IN_ORDER = sorted(BLOCKS, key=has_servers)
FAST = [page for page in PAGES_IN_ORDER if any(is_run(block) and not is_slow(block) for block in BLOCKS[page])]
SLOW = [page for page in PAGES_IN_ORDER if any(is_run(block) and is_slow(block) for block in BLOCKS[page])]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path_factory.mktemp("servers"))
    yield found
    found.close()


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.place)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language, (
        f"{block.place}: a fence names its language (sh or python for commands, else text), and what is indented behind"
        " a list is part of the list: put a line of text between"
    )
    if not block.is_command:
        return
    assert block.marks.keys() <= KINDS, f"{block.place}: a mark is one of {sorted(KINDS)}"
    if "needs" in block.marks:
        assert block.marks["needs"] in NEEDS, f"{block.place}: what may be needed is one of {sorted(NEEDS)}"
    if is_run(block) and LOADS_A_MODEL.search(block.text):
        assert is_slow(block), f"{block.place}: what loads a model is marked <!-- slow -->"
    if "run by" in block.marks:
        text = (ROOT / block.marks["run by"]).read_text()
        known = block.page in text or block.text.splitlines()[0] in text
        assert known, f"{block.place}: {block.marks['run by']} names neither this page nor the command"


@with_curl
@pytest.mark.parametrize("page", FAST)
def test_the_commands_of(page: str, servers: Servers, tmp_path: Path) -> None:
    run(page, servers, tmp_path, slow=False)


@with_curl
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", SLOW)
def test_all_commands_of(page: str, servers: Servers, tmp_path: Path) -> None:
    run(page, servers, tmp_path, slow=True)


def run(page: str, servers: Servers, folder: Path, *, slow: bool) -> None:
    terminal = Terminal(servers, folder)
    for block in BLOCKS[page]:
        if not block.is_command:
            continue
        if not is_run(block) or (is_slow(block) and not slow):
            terminal.pass_over(block, with_its_clients=is_run(block))
        elif not terminal.is_passed_over(block):
            said = terminal.run(block, timeout_s=SLOW_TIMEOUT_S if is_slow(block) else FAST_TIMEOUT_S)
            assert block.marks.get("shows", "") in said, f"{block.place} shows\n{said}"
            servers.check()


def test_each_route_is_shown() -> None:
    """In docs/serving.md, by a command that a test runs."""
    commands = [
        command
        for block in BLOCKS["serving.md"]
        if is_run(block) and block.language in SHELL
        for command in commands_of(block)
    ]
    missing = [operation for operation in sorted(operations()) if not any(calls(each, operation) for each in commands)]
    assert not missing, f"docs/serving.md has no curl command with {missing}"


def calls(command: str, operation: str) -> bool:
    method, path = operation.split()
    pattern = r"[^/\s?]+".join(re.escape(part) for part in re.split(r"{[^}]+}", path))
    return bool(re.search(rf"localhost:\d+{pattern}(?=[\s'\"?]|$)", command)) and method == method_of(command)


def method_of(command: str) -> str:
    named = re.search(r"-X (\w+)", command)
    return named[1] if named else "POST" if " -d " in command else "GET"
