"""H4 of the targets: tokens a second through server, pump and sockets, with an engine that answers at once.

    python benchmarks/server_load.py [--streams 256] [--output_len 200] [--step_ms 0]

Three processes, as in real life: the runtime (scheduler, KV bookkeeping, loop) over `InstantEngine`, the HTTP server
with a tokenizer of one token a byte, and this client. With `--step_ms` the engine takes that long for a step, so that
the rate is streams / step and what is seen is whether the server keeps up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from server_process import environment, free_port, running_server
from stream_client import Stream, completion_body, stream_together, tokens_per_s

MODEL = "instant"
VOCAB_SIZE = 128
"""Every id is a character, so that every token is a piece of text."""
PROMPT_LEN = 128
MAX_BATCH_SIZE = 512
MAX_POOL_TOKENS = 1 << 20


def run_runtime(address: str, step_ms: float) -> None:
    """The child that the server starts; as `headrace.runtime.process`, but over another engine."""
    from headrace.config.resolution import resolve
    from headrace.engine.instant import InstantEngine
    from headrace.hub.source import ModelSource
    from headrace.runtime.children import end_with_parent
    from headrace.runtime.core import model_info, open_core
    from headrace.runtime.links import ZmqLink
    from headrace.seam import StepResult
    from headrace.wire import Ready

    class PacedEngine(InstantEngine):
        """A step takes `step_ms`, from one result to the next."""

        _next_s = 0.0

        def collect(self) -> StepResult:
            now_s = time.monotonic()
            if self._next_s > now_s:
                time.sleep(self._next_s - now_s)
            self._next_s = max(self._next_s, now_s) + step_ms / 1000
            return super().collect()

    end_with_parent()
    arguments = {
        "model": MODEL,
        "skip_tokenizer_init": True,
        "max_batch_size": MAX_BATCH_SIZE,
        "max_seq_len": 8192,
        "kv_cache_config": {"max_tokens": MAX_POOL_TOKENS},
    }
    args = resolve(arguments=arguments).args
    core = open_core(args, PacedEngine(vocab_size=VOCAB_SIZE))
    link = ZmqLink(address)
    link.greet(Ready(model_info(args, ModelSource("hf", Path(), MODEL), core, started_s=time.monotonic())))
    core.loop(args, link).run()


class InstantRuntime:
    """What the server takes for its runtime (`front.socket_link.ChildRuntime`)."""

    stderr_tail = ""

    def __init__(self, step_ms: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-")
        self._step_ms = step_ms
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"ipc://{self._folder.name}/runtime"

    @property
    def returncode(self) -> int | None:
        return self._process.poll() if self._process else None

    def start(self) -> None:
        command = [sys.executable, __file__, "--role", "runtime", "--address", self.address]
        command += ["--step_ms", str(self._step_ms)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment())

    def close(self, timeout_s: float) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def run_server(port: int, step_ms: float) -> int:
    from headrace import log
    from headrace.front.text_side import TextSide
    from headrace.hub.source import ModelSource
    from headrace.server.run import bind, serve
    from headrace.server.service import ServiceOptions
    from headrace.text.tokenizer import ByteTokenizer

    class AsciiTokenizer(ByteTokenizer):
        vocab_size = VOCAB_SIZE
        bos_id = None
        eos_ids = frozenset()
        special_ids = frozenset()

    log.setup("warning")
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": MODEL, "vocab_size": VOCAB_SIZE}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        text = TextSide(source=ModelSource("hf", Path(folder), MODEL), tokenizer=AsciiTokenizer(), template=None)
        options = ServiceOptions(model_name=MODEL)
        outcome = serve(bind("127.0.0.1", port), InstantRuntime(step_ms), lambda: text, options, version="bench")
    print(outcome.message, file=sys.stderr)
    return outcome.exit_code


def load(port: int, *, streams: int, output_len: int, seed: int) -> list[Stream]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)] for _ in range(streams)]
    bodies = [completion_body(MODEL, prompt, num_output=output_len) for prompt in prompts]
    found = asyncio.run(stream_together(port, bodies))
    assert all(stream.num_tokens == output_len for stream in found), "an answer ended early"
    return found


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_client(options: argparse.Namespace) -> None:
    port = free_port()
    command = [sys.executable, __file__, "--role", "server", "--port", str(port), "--step_ms", str(options.step_ms)]
    print(f"load average {os.getloadavg()[0]:.2f} at the start, {len(os.sched_getaffinity(0))} cores")
    print(f"{'tokens/s':>10} {'events/s':>10} {'TTFT p50 ms':>12} {'p99':>8} {'server CPU s':>13} {'client CPU s':>13}")
    rates: list[float] = []
    with running_server(command, port) as server:
        load(port, streams=16, output_len=16, seed=-1)
        for repeat in range(options.repeats):
            before_s, client_s = cpu_s(server.pid), time.process_time()
            found = load(port, streams=options.streams, output_len=options.output_len, seed=repeat)
            rate = tokens_per_s(found)
            share = sum(stream.num_events for stream in found) / sum(stream.num_tokens for stream in found)
            firsts = sorted((stream.first_s - stream.start_s) * 1000 for stream in found)
            p50, p99 = firsts[len(firsts) // 2], firsts[int(len(firsts) * 0.99)]
            rates.append(rate)
            print(
                f"{rate:>10,.0f} {rate * share:>10,.0f} {p50:>12,.0f} {p99:>8,.0f}"
                f" {cpu_s(server.pid) - before_s:>13.2f} {time.process_time() - client_s:>13.2f}"
            )
    print(f"median of {len(rates)}: {statistics.median(rates):,.0f} tokens/s in {options.streams} streams")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--output_len", type=int, default=200, help="tokens of each")
    parser.add_argument("--step_ms", type=float, default=0.0, help="time of the engine's step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--role", choices=("client", "server", "runtime"), default="client", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "runtime":
        run_runtime(options.address, options.step_ms)
    elif options.role == "server":
        return run_server(options.port, options.step_ms)
    else:
        run_client(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
