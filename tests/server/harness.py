"""A server over the fake runtime: on a thread of this process, or as a process of its own for signals.

python -m tests.server.harness '{"port": 0, "step_s": 0.01}'
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from headrace.front.fake import FakeLoop, FakeRuntimeProcess, fake_info
from headrace.front.text_side import TextSide
from headrace.hub.source import ModelSource
from headrace.server.app import make_app
from headrace.server.protocol import Connection
from headrace.server.run import bind, serve, url_of
from headrace.server.service import Service, ServiceOptions
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    import openai

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}{{ suffix or '' }}"
)
TOOL_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}] "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}#{{ c.id }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""One that shows reasoning, calls and their results."""
MODEL = "fake:1"


def text_side(folder: Path, *, has_template: bool = True, template: str = TEMPLATE) -> TextSide:
    """The byte tokenizer's, for a model folder that names its EOS."""
    (folder / "config.json").write_text(json.dumps({"model_type": "fake", "eos_token_id": 257}))
    tokenizer = ByteTokenizer()
    chat_template = ChatTemplate(
        {"default": template} if has_template else {}, special_tokens=tokenizer.special_tokens, name=MODEL
    )
    source = ModelSource(kind="hf", path=folder, name=MODEL)
    return TextSide(source=source, tokenizer=tokenizer, template=chat_template)


@dataclass
class Server:
    url: str
    service: Service
    runtime: FakeRuntimeProcess
    loop: asyncio.AbstractEventLoop

    @property
    def client(self) -> openai.OpenAI:
        import openai  # takes a second, which the server processes of the tests don't need

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run something on the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)


@contextmanager
def running(
    folder: Path,
    *,
    loop: FakeLoop | None = None,
    step_s: float = 0.0,
    ready_after: threading.Event | None = None,
    runtime: Any = None,
    load_text: Callable[[], TextSide] | None = None,
    wait: bool = True,
    **options: Any,
) -> Iterator[Server]:
    """A server on a thread; over a fake runtime unless one is given."""
    runtime = runtime or FakeRuntimeProcess(loop=loop, step_s=step_s, ready_after=ready_after)
    runtime.start()
    listener = bind("127.0.0.1", 0)
    started: list[Server] = []
    up = threading.Event()
    stop = threading.Event()

    async def run() -> None:
        service = Service(ServiceOptions(model_name=MODEL, **options), load_text or (lambda: text_side(folder)))
        config = uvicorn.Config(
            make_app(service, version="0"),
            http=Connection,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        service.start(runtime.address)
        serving = asyncio.create_task(server._serve([listener]))  # pyright: ignore[reportPrivateUsage]
        while wait and service.state == "loading":
            await asyncio.sleep(0.005)
        started.append(Server(url_of(listener), service, runtime, asyncio.get_running_loop()))
        up.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
        await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert up.wait(20)
    try:
        yield started[0]
    finally:
        stop.set()
        thread.join(10)
        runtime.close()
        assert not thread.is_alive()


def events_of(body: str) -> list[Any]:
    """The events of a stream; the end marker as text."""
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    return [data if (data := line[6:]) == "[DONE]" else json.loads(data) for line in lines]


def main() -> int:
    """A whole server process, as `headrace serve` runs it, with the fake behind it."""
    import tempfile

    from headrace import log

    log.setup("info")
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    ready = threading.Event()
    if not wanted.get("never_ready"):
        ready.set()
    runtime = FakeRuntimeProcess(loop=FakeLoop(fake_info()), step_s=wanted.get("step_s", 0.01), ready_after=ready)
    signal.signal(signal.SIGUSR1, lambda *_: runtime.kill(-9, "OSError: the disk is on fire"))
    with tempfile.TemporaryDirectory() as folder:
        listener = bind("127.0.0.1", wanted.get("port", 0))
        print(url_of(listener), flush=True)
        outcome = serve(
            listener,
            runtime,
            lambda: text_side(Path(folder)),
            ServiceOptions(model_name=MODEL, shutdown_timeout_s=wanted.get("shutdown_timeout_s", 30.0)),
            version="0",
        )
    if outcome.message:
        print(f"headrace: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
