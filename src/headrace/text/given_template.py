"""A chat template that somebody else has written, rendered in a process of its own with limits on time and memory.

The sandbox keeps a template from reaching the program, but not from filling the memory (`x * 10**9`) or from looping
without writing anything, and no thread can be stopped. A process can. It costs a start of Python for each chat.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.template import MAX_RENDER_S, ChatTemplate, TemplateError

__all__ = ["MAX_GIVEN_BYTES", "GivenTemplate"]

MAX_GIVEN_BYTES = 256 << 10
MAX_MEMORY_BYTES = 1 << 30
MAX_PROMPT_CHARS = 64 << 20
PAST_LIMITS = f"the chat template went past its limits ({MAX_RENDER_S:g} s, {MAX_MEMORY_BYTES >> 20} MiB): simplify it"
GRACE_S = 5.0
"""For the process to start."""
COMMAND = (sys.executable, "-I", "-c", "import sys; sys.path[:0] = {path!r}; from headrace.text import given_template;"
           " given_template.main()")  # fmt: skip


class GivenTemplate:
    """What of `ChatTemplate` a request needs."""

    arguments_as_text = False
    """Arguments of past calls are objects for it."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """As `ChatTemplate.render`. Raises TemplateError: it is broken, refuses the messages, or goes past a limit."""
        job = {
            "source": self.source,
            "special_tokens": self._special_tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "extra": dict(extra or {}),
        }
        command = [part.format(path=[path for path in sys.path if path]) for part in COMMAND]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(job).encode(),
                capture_output=True,
                timeout=MAX_RENDER_S + GRACE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TemplateError(f"the chat template took longer than {MAX_RENDER_S:g} s: simplify it") from None
        if done.returncode != 0:
            raise TemplateError(PAST_LIMITS)
        said = json.loads(done.stdout)
        if said["error"]:
            raise TemplateError(said["error"])
        return said["text"]


def main() -> None:
    """The process: a job on standard input, its outcome on standard output."""
    import resource

    seconds = int(MAX_RENDER_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.load(sys.stdin)
    template = ChatTemplate({"default": job["source"]}, special_tokens=job["special_tokens"])
    said = {"text": "", "error": ""}
    try:
        said["text"] = template.render(
            job["messages"], tools=job["tools"], add_generation_prompt=job["add_generation_prompt"], extra=job["extra"]
        )
    except TemplateError as error:
        said["error"] = PAST_LIMITS if isinstance(error.__cause__, MemoryError) else str(error)
    if len(said["text"]) > MAX_PROMPT_CHARS:
        said = {"text": "", "error": PAST_LIMITS}
    json.dump(said, sys.stdout)
