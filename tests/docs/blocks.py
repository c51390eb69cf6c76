"""The code blocks of a page, and what is said of them in comments.

A block of commands is one that is indented by four spaces, or fenced as `sh`, `bash` or `python`; what a block is not
to be run as is fenced with another language, such as `text` or `json`. Of a block of commands, comments in the lines
before it say what a test can't see:

    <!-- slow -->                   run with -m slow
    <!-- needs: gpu -->             not run: there is no such thing where tests run; NEEDS are all that there are
    <!-- with: promtool -->         run where there is this program
    <!-- run by: tests/a/test_b.py -->   another test runs it, which names the page or the command
    <!-- answers: an error -->      a command that ends in one, to show it
    <!-- shows: Paris -->           what its output has to have

`<!-- every block: slow -->`, in a line of its own, is said of each of the page's blocks that has no comment of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NEEDS = frozenset({
    "gpu", "docker", "kubernetes", "root", "network", "a model of yours", "a collector", "a browser", "hours",
})  # fmt: skip
KINDS = frozenset({"slow", "needs", "with", "run by", "answers", "shows"})
SHELL = frozenset({"sh", "bash"})
COMMANDS = SHELL | {"python"}

_COMMENT = re.compile(r"<!-- *(.+?) *-->")
_EVERY = re.compile(r"^<!-- *every block: *(.+?) *-->$", re.MULTILINE)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,}) *([\w+-]*)")
_LIST_ITEM = re.compile(r" {0,3}([-*+]|\d+[.)]) ")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    """`sh` and `python` for what is run; empty for a fence that names none."""
    text: str
    marks: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def is_command(self) -> bool:
        return self.language in COMMANDS

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """All code blocks of a page in Markdown, in order."""
    said = _EVERY.search(text)
    default = dict([_mark(said[1])]) if said else {}
    return [
        Block(page, line, language, code, dict(map(_mark, comments)) or default)
        for line, language, code, comments in _blocks(text)
    ]


def read_page(path: Path) -> list[Block]:
    return blocks_of(path.name, path.read_text(encoding="utf-8"))


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, each with the lines that it goes on over."""
    found: list[str] = []
    lines: list[str] = []
    for line in block.text.splitlines():
        lines.append(line)
        text = "\n".join(lines)
        if not line.endswith("\\") and _is_whole(text):
            found += [text] if text.strip() else []
            lines = []
    return found + (["\n".join(lines)] if lines else [])


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _mark(comment: str) -> tuple[str, str]:
    kind, _, rest = comment.partition(":")
    return kind.strip(), rest.strip()


def _blocks(text: str) -> Iterator[tuple[int, str, str, list[str]]]:
    """Line (from 1), language, code, and what the comments behind the last text say, for each block."""
    lines = text.splitlines()
    comments: list[str] = []
    in_list = False
    at = 0
    while at < len(lines):
        line = lines[at]
        fence, comment = _FENCE.match(line), _COMMENT.fullmatch(line)
        if fence:
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[1]), len(lines))
            yield at + 1, fence[2], "\n".join(lines[at + 1 : end]), comments
            comments, at = [], end + 1
        elif line.startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            code = "\n".join(part[4:] for part in lines[at:end]).rstrip()
            yield at + 1, "" if in_list else _indented(code), code, comments
            comments, at = [], end
        else:
            if _EVERY.fullmatch(line):
                pass
            elif comment:
                comments.append(comment[1])
            elif line.strip():
                comments = []
                in_list = bool(_LIST_ITEM.match(line)) or (in_list and line.startswith(" "))
            at += 1


def _indented(code: str) -> str:
    return "python" if code.startswith(("from ", "import ")) else "sh"
