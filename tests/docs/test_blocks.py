"""What counts as a block of commands, what is said of it, and that a command which fails is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .blocks import Block, blocks_of, commands_of
from .terminal import Servers, Terminal, is_server, ports_of

PAGE = """# A page

    echo one
    echo two \\
        three

<!-- needs: gpu -->

    nvidia-smi

Text takes a comment's effect away.

<!-- slow -->
<!-- shows: Paris -->

```python
print("Paris")
```

```json
{}
```

```
what
```

- a list

    goes on

Text.

    from headrace import LLM
"""


def test_blocks_and_their_marks() -> None:
    blocks = blocks_of("page.md", PAGE)
    assert [(block.line, block.language, block.marks) for block in blocks] == [
        (3, "sh", {}),
        (9, "sh", {"needs": "gpu"}),
        (16, "python", {"slow": "", "shows": "Paris"}),
        (20, "json", {}),
        (24, "", {}),
        (30, "", {}),
        (34, "python", {}),
    ]
    assert [block.is_command for block in blocks] == [True, True, True, False, False, False, True]
    assert commands_of(blocks[0]) == ["echo one", "echo two \\\n    three"]


def test_what_is_said_of_a_whole_page() -> None:
    page = "<!-- every block: slow -->\n\n    one\n\n<!-- needs: gpu -->\n\n    two\n"
    assert [block.marks for block in blocks_of("page.md", page)] == [{"slow": ""}, {"needs": "gpu"}]


def test_commands_go_on_to_the_end_of_their_quotes() -> None:
    block = Block(
        "page.md", 1, "sh", "curl -d '{\n  \"a\": 1}' x  # don't\n\nheadrace serve m --port 8001  # it's here"
    )
    found = commands_of(block)
    assert [is_server(command) for command in found] == [False, True]
    assert ports_of(["headrace", "serve", "m", "--grpc", "--port", "50051", "--http_port", "8005"]) == [50051, 8005]
    assert ports_of(["headrace", "serve", "m"]) == [8000]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    for name in ("servers", "page"):
        (tmp_path / name).mkdir()
    servers = Servers(tmp_path / "servers")
    yield Terminal(servers, tmp_path / "page")
    servers.close()


def block(text: str, **marks: str) -> Block:
    return Block("page.md", 1, "sh", text, marks)


def test_files_of_a_page_stay_for_its_next_block(terminal: Terminal) -> None:
    terminal.run(block("echo it > file.txt"), timeout_s=10)
    assert terminal.run(block("cat file.txt"), timeout_s=10) == "it\n"
    python = Block("page.md", 1, "python", 'print(open("file.txt").read())')
    assert "it" in terminal.run(python, timeout_s=20)


@pytest.mark.parametrize("text", ["false", "false | cat", "false\ntrue", "headrace no-such-command"])
def test_what_fails_is_noticed(terminal: Terminal, text: str) -> None:
    with pytest.raises(AssertionError, match=r"page.md:1: exit code [12] of"):
        terminal.run(block(text), timeout_s=20)
    terminal.run(block(text, answers="an error"), timeout_s=20)


def test_what_should_fail_and_does_not(terminal: Terminal) -> None:
    with pytest.raises(AssertionError, match="exit code 0"):
        terminal.run(block("true", answers="an error"), timeout_s=10)


def test_a_server_is_started_on_the_page_that_asks_it(terminal: Terminal) -> None:
    with pytest.raises(AssertionError, match="no block before it on this page starts a server at port 8000"):
        terminal.run(block("curl -s localhost:8000/health"), timeout_s=10)
    slow = block("headrace serve m --port 8001", slow="")
    terminal.pass_over(slow, with_its_clients=True)
    assert terminal.is_passed_over(block("curl -s localhost:8001/health"))
    terminal.pass_over(slow, with_its_clients=False)
    assert not terminal.is_passed_over(block("curl -s localhost:8001/health"))
