"""A runtime without a model: answers wire messages with scripted tokens, in this process or over a socket.

It is what the tests of front ends run against, and what their cost is measured with. Each step gives every running
request one token of its script, so many requests advance together as they do in the real loop.
"""

from __future__ import annotations

import itertools
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace import wire
from headrace.types import Beam, Delta, FinishReason, Logprobs, PinInfo, Request, RequestTimes

__all__ = ["FakeLoop", "FakeRuntime", "FakeRuntimeProcess", "Script", "echo", "fake_embedding", "fake_info", "says"]

Script = Callable[[Request], Iterator[int]]
"""The tokens that a request will get; it ends in stop (id 256 is the byte tokenizer's EOS) or at max_tokens."""


def echo(request: Request) -> Iterator[int]:
    """The prompt, again and again."""
    return itertools.cycle(request.prompt)


def says(tokens: Sequence[int], *, then: int | None = None) -> Script:
    """These tokens for every request, then `then` for ever; without it, the last one repeats."""

    def script(request: Request) -> Iterator[int]:
        return itertools.chain(tokens, itertools.repeat(tokens[-1] if then is None else then))

    return script


def fake_embedding(request: Request) -> NDArray[np.float32]:
    """[4]: the length of the prompt, its first and last ids, and how it is pooled."""
    prompt = request.prompt
    return np.asarray([len(prompt), prompt[0], prompt[-1], 1 + (request.pooling == "mean")], np.float32)


def fake_info(
    *,
    model: str = "fake",
    vocab_size: int = 258,
    max_seq_len: int = 4096,
    max_batch_size: int = 256,
    kv_num_blocks: int = 4096,
    max_beam_width: int = 4,
    block_reuse: bool = True,
    kv_event_buffer: int = 100,
) -> wire.ModelInfo:
    return wire.ModelInfo(
        model=model,
        model_type="fake",
        vocab_size=vocab_size,
        num_valid_ids=vocab_size,
        hidden_size=4,
        max_seq_len=max_seq_len,
        max_num_tokens=max_seq_len,
        max_batch_size=max_batch_size,
        max_beam_width=max_beam_width,
        enable_chunked_prefill=True,
        kv_num_blocks=kv_num_blocks,
        tokens_per_block=32,
        reuse=wire.ReuseInfo(granularity=int(block_reuse), event_buffer=kv_event_buffer if block_reuse else 0),
    )


@dataclass(slots=True)
class _Running:
    request: Request
    script: Iterator[int]
    num_tokens: int = 0
    first_s: float = 0.0


@dataclass(slots=True)
class FakeLoop:
    """The state of the fake: pure, stepped by whoever owns it."""

    info: wire.ModelInfo
    script: Script = echo
    waiting: list[Request] = field(default_factory=list[Request])
    running: dict[int, _Running] = field(default_factory=dict[int, _Running])
    aborted: list[tuple[int, FinishReason]] = field(default_factory=list[tuple[int, FinishReason]])
    """Every abort that ended something, for tests to look at."""
    fault: str = ""
    """Once set, the next step fails every request of the batch with it."""
    max_pinned_tokens: int = 1 << 30
    pins: dict[str, PinInfo] = field(default_factory=dict[str, PinInfo])
    kv_events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """What the next reader gets."""
    num_steps: int = 0
    _out: list[Delta] = field(default_factory=list[Delta])

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self._out)

    def receive(self, message: wire.Up) -> wire.Down | None:
        """Take a message; what it returns goes back to its sender."""
        if isinstance(message, wire.Submit):
            self.waiting.extend(message.requests)
        elif isinstance(message, wire.Abort):
            for request_id in message.ids:
                self._abort(request_id, message.reason)
        elif isinstance(message, wire.Hello):
            return wire.Ready(self.info)
        elif isinstance(message, wire.GetStats):
            return wire.Stats([{"iter": self.num_steps, "numActiveRequests": len(self.running)}])
        elif isinstance(message, wire.Profile):
            return wire.Profiled("tracing") if message.start else wire.Profiled("written", ["trace-0.json"])
        elif isinstance(message, wire.GetMetrics):
            gauges = [wire.Sample("num_requests_running", len(self.running))]
            gauges.append(wire.Sample("num_requests_waiting", len(self.waiting)))
            sizes = wire.Distribution("prefill_batch_tokens", [64.0, 128.0], [1, 2, 3], 1000.0)
            return wire.Metrics(gauges, [wire.Sample("steps", self.num_steps)], [sizes])
        elif isinstance(message, wire.GetCacheMap):
            return wire.CacheMap(pools=[])
        elif isinstance(message, wire.GetKvEvents):
            events, self.kv_events = self.kv_events, []
            return wire.KvEvents(events)
        elif isinstance(message, wire.Unpin):
            found = self.pins.pop(message.name, None)
            return wire.Pins(message.call, list(self.pins.values()), found is not None)
        elif isinstance(message, wire.GetPins):
            return wire.Pins(message.call, list(self.pins.values()))
        return None

    def step(self) -> dict[int, wire.Outputs]:
        """One token for each running request; the outputs by front end."""
        self.num_steps += 1
        while self.waiting and len(self.running) < self.info.max_batch_size:
            request = self.waiting.pop(0)
            self.running[request.id] = _Running(request, self.script(request))
        plain: list[tuple[int, int]] = []
        for entry in list(self.running.values()):
            self._advance(entry, plain)
        fronts = {wire.front_of(request_id) for request_id, _ in plain} | {wire.front_of(d.id) for d in self._out}
        deltas, self._out = self._out, []
        outputs: dict[int, wire.Outputs] = {}
        for front in fronts:
            mine = [pair for pair in plain if wire.front_of(pair[0]) == front]
            outputs[front] = wire.Outputs(
                step=self.num_steps,
                ids=np.asarray([request_id for request_id, _ in mine], np.int64).tobytes(),
                tokens=np.asarray([token for _, token in mine], np.int32).tobytes(),
                deltas=[delta for delta in deltas if wire.front_of(delta.id) == front],
            )
        return outputs

    def _abort(self, request_id: int, reason: FinishReason) -> None:
        known = [request for request in self.waiting if request.id == request_id]
        if known or request_id in self.running:
            self.waiting = [request for request in self.waiting if request.id != request_id]
            self.running.pop(request_id, None)
            self.aborted.append((request_id, reason))
            self._out.append(Delta(id=request_id, finish=reason, times=RequestTimes()))

    def _advance(self, entry: _Running, plain: list[tuple[int, int]]) -> None:
        request, now_s = entry.request, time.monotonic()
        if self.fault:
            self._end(entry, Delta(id=request.id, finish="error", error=self.fault))
            return
        if request.pin and (problem := self._pin(request)):
            self._end(entry, Delta(id=request.id, finish="error", error=problem))
            return
        if request.pooling:
            self._end(entry, Delta(id=request.id, finish="stop", embedding=fake_embedding(request).tobytes()))
            return
        if request.beam is not None:
            self._end(entry, Delta(id=request.id, finish="length", beams=self._beams(entry), times=RequestTimes()))
            return
        token = next(entry.script)
        entry.num_tokens += 1
        entry.first_s = entry.first_s or now_s
        finish: FinishReason | None = None
        if token in request.stop_ids and entry.num_tokens > request.min_tokens:
            finish = "stop"
        elif entry.num_tokens >= request.max_tokens:
            finish = "length"
        wanted = request.sampling.logprobs
        if finish is None and entry.num_tokens > 1 and wanted < 0:
            plain.append((request.id, token))
            return
        first = entry.num_tokens == 1
        delta = Delta(
            id=request.id,
            tokens=[token],
            logprobs=[self.logprobs(token, wanted)] if wanted >= 0 else [],
            prompt_logprobs=self._prompt_logprobs(request) if first else None,
            finish=finish,
            stop_token=token if finish == "stop" else None,
            times=RequestTimes(request.arrival_s, entry.first_s, entry.first_s, now_s) if finish or first else None,
        )
        if finish is None:
            self._out.append(delta)
        else:
            self._end(entry, delta)

    def _pin(self, request: Request) -> str:
        """What is in the way."""
        num_tokens = len(request.prompt)
        others = sum(pin.num_tokens for pin in self.pins.values() if pin.name != request.pin)
        if others + num_tokens > self.max_pinned_tokens:
            return f"pins may hold {self.max_pinned_tokens} tokens of the cache: unpin another"
        block = self.info.tokens_per_block
        self.pins[request.pin] = PinInfo(name=request.pin, num_tokens=num_tokens, num_blocks=-(-num_tokens // block))
        return ""

    def _end(self, entry: _Running, delta: Delta) -> None:
        del self.running[entry.request.id]
        self._out.append(delta)

    def logprobs(self, token: int, count: int) -> Logprobs:
        """The chosen token second likeliest, its successors around it."""
        others = [(token + step) % self.info.vocab_size for step in range(1, count + 1)]
        others = others[: max(count - 1, 1)] if count else []
        ranks = [1, *range(3, len(others) + 2)]
        return Logprobs([token, *others], [-1.0, *(-0.5 * rank for rank in ranks)][: len(others) + 1], [2, *ranks])

    def _prompt_logprobs(self, request: Request) -> list[Logprobs | None] | None:
        count = request.sampling.prompt_logprobs
        if count < 0:
            return None
        return [None, *(self.logprobs(token, count) for token in request.prompt[1:])]

    def _beams(self, entry: _Running) -> list[Beam]:
        beam = entry.request.beam
        assert beam is not None
        tokens = list(itertools.islice(entry.script, entry.request.max_tokens))
        beams: list[Beam] = []
        for rank in range(beam.num_return):
            kept = tokens[: len(tokens) - rank] or tokens
            logprobs = [self.logprobs(token, 0) for token in kept]
            score = -1.0 - rank
            beams.append(Beam(tokens=kept, score=score, cumulative_logprob=score, finish="length", logprobs=logprobs))
        return beams


class FakeRuntime:
    """The shape of `LocalRuntime`: a thread of its own that steps as fast as it can, or every `step_s` seconds."""

    def __init__(
        self,
        on_message: Callable[[wire.Down], None],
        *,
        loop: FakeLoop | None = None,
        step_s: float = 0.0,
        fails_with: wire.Failed | None = None,
    ) -> None:
        self.loop = loop or FakeLoop(fake_info())
        self.step_s = step_s
        self._on_message = on_message
        self._fails_with = fails_with
        self._inbox: queue.SimpleQueue[wire.Up | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-runtime", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: wire.Up) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(5)

    def die(self, message: str) -> None:
        """Fail as a runtime does whose engine broke."""
        self._on_message(wire.Failed(message))
        self.close()

    def _run(self) -> None:
        if self._fails_with is not None:
            self._on_message(self._fails_with)
            return
        self._on_message(wire.Ready(self.loop.info))
        while self._drain():
            for outputs in self.loop.step().values():
                self._on_message(outputs)
            if self.step_s:
                time.sleep(self.step_s)

    def _drain(self) -> bool:
        """Take what has come; waits while there is nothing to do. False: closed."""
        while True:
            try:
                message = self._inbox.get(block=self.loop.is_idle)
            except queue.Empty:
                return True
            if message is None or isinstance(message, wire.Shutdown):
                return False
            answer = self.loop.receive(message)
            if answer is not None:
                self._on_message(answer)


class FakeRuntimeProcess:
    """The shape of `RuntimeProcess`: a ROUTER socket on a thread of this process."""

    def __init__(
        self, *, loop: FakeLoop | None = None, step_s: float = 0.0, ready_after: threading.Event | None = None
    ):
        self.loop = loop or FakeLoop(fake_info())
        self.step_s = step_s
        self.returncode: int | None = None
        self.stderr_tail = ""
        self._ready_after = ready_after
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-fake-")
        self.address = f"ipc://{Path(self._folder.name) / 'socket'}"
        self._down: queue.SimpleQueue[wire.Down] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-runtime-process", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._folder.cleanup()
        self.returncode = 0 if self.returncode is None else self.returncode

    def fail(self, message: wire.Failed) -> None:
        """Tell the front ends, as a runtime that can't go on."""
        self._down.put(message)

    def kill(self, returncode: int = -9, stderr: str = "") -> None:
        """Vanish without a word."""
        self.stderr_tail = stderr
        self._closing.set()
        self._thread.join(5)
        self.returncode = returncode

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(self.address)
        fronts: dict[int, bytes] = {}
        try:
            while not self._closing.is_set():
                if self._ready_after is not None and not self._ready_after.wait(0.01):
                    continue
                self._serve(socket, fronts)
        finally:
            socket.close()
            context.term()

    def _serve(self, socket: zmq.Socket[bytes], fronts: dict[int, bytes]) -> None:
        while socket.poll(20 if self.loop.is_idle and self._down.empty() else 0):
            identity, data = socket.recv_multipart()
            message = wire.decode_up(data)
            if isinstance(message, wire.Hello):
                fronts[message.front] = identity
            answer = self.loop.receive(message)
            if answer is not None:
                socket.send_multipart([identity, wire.encode(answer)])
        while not self._down.empty():
            message = wire.encode(self._down.get())
            for identity in fronts.values():
                socket.send_multipart([identity, message])
        if self.loop.is_idle:
            return
        for front, outputs in self.loop.step().items():
            socket.send_multipart([fronts[front], wire.encode(outputs)])
        if self.step_s:
            time.sleep(self.step_s)
