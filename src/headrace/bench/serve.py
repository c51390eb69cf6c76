"""Driving a server with tasks: streamed completions, ids in, each piece timed as it arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from headrace.bench.http import Server
from headrace.bench.pace import Pace, Turns
from headrace.bench.record import Record
from headrace.bench.workload import Task
from headrace.text.tokenizer import Tokenizer
from headrace.types import Delta, FinishReason

__all__ = ["Api", "ServerDriver"]

MAX_ERROR_CHARS = 300
POLL_S = 0.2
DATA = b"data: "
DONE = b"[DONE]"
Api = Literal["completions", "chat"]
FINISHES: dict[Any, FinishReason] = {"length": "length", "stop": "stop"}


@dataclass(slots=True)
class Answer:
    """What came back for one request."""

    times_s: list[float] = field(default_factory=list[float])
    """When each piece came that had text or a token."""
    num_tokens: int | None = None
    """As the server's usage says: a piece may have several tokens, or none of its own."""
    num_prompt: int | None = None
    """As the usage says."""
    num_cached: int = 0
    finish: FinishReason | None = None
    end_s: float = 0.0
    error: str = ""
    text: list[str] = field(default_factory=list[str])

    def take(self, event: dict[str, Any], now_s: float) -> None:
        if "error" in event:
            self.error = str(event["error"])[:MAX_ERROR_CHARS]
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._take_usage(cast("dict[str, Any]", usage))
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
            finish = choice.get("finish_reason")
            # A piece of an ignored or half character has no text and is still a token; the last one may be only an end.
            if text or (finish is None and not (delta or {}).get("role")):
                self.times_s.append(now_s)
                self.text.append(text or "")
            if finish is not None:
                self.finish = FINISHES.get(finish)
                self.error = self.error or ("" if self.finish else f"finish_reason {finish}")

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.num_tokens = usage.get("completion_tokens", self.num_tokens)
        self.num_prompt = usage.get("prompt_tokens", self.num_prompt)
        self.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def token_times_s(self) -> list[float]:
        """One time a token: pieces in order, each with its share of what the usage counts."""
        count, pieces = self.num_tokens, len(self.times_s)
        if count is None or count == pieces:
            return self.times_s
        if not pieces:
            return [self.end_s] * count
        return [self.times_s[number * pieces // count] for number in range(count)]


class ServerDriver:
    """Sends completions to an OpenAI-compatible server."""

    def __init__(
        self, server: Server, *, model: str, api: Api = "completions", tokenizer: Callable[[], Tokenizer] | None = None
    ) -> None:
        """`tokenizer` makes texts of ids, and ids of answers: for the chat API and for conversations."""
        self._server = server
        self._model = model
        self._api: Api = api
        self._tokenizer = tokenizer

    def run(
        self,
        tasks: Sequence[Task],
        *,
        pace: Pace,
        stop_ids: tuple[int, ...] = (),
        cache_salt: str = "",
        progress: Callable[[int], object] | None = None,
    ) -> Record:
        """Greedy generation of every task; returns when the last one has ended."""
        return asyncio.run(
            self._run(tasks, pace, stop_ids=stop_ids, cache_salt=cache_salt, progress=progress or (lambda _: None))
        )

    async def _run(
        self,
        tasks: Sequence[Task],
        pace: Pace,
        *,
        stop_ids: tuple[int, ...],
        cache_salt: str,
        progress: Callable[[int], object],
    ) -> Record:
        turns = Turns(tasks, pace)
        answers = [Answer() for _ in tasks]
        start_s = [0.0] * len(tasks)
        running: set[asyncio.Task[int]] = set()
        num_ended = 0
        while num_ended < len(tasks):
            for number, due_s in turns.due(time.monotonic()):
                start_s[number] = due_s
                body = self._body(turns.tasks[number], stop_ids=stop_ids, cache_salt=cache_salt)
                running.add(asyncio.create_task(self._ask(number, body, answers[number])))
            next_s = turns.next_s
            timeout_s = None if next_s is None else max(next_s - time.monotonic(), 0)
            if not running:
                await asyncio.sleep(timeout_s or 0)
                continue
            ended, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                number = each.result()
                num_ended += 1
                progress(len(answers[number].token_times_s()))
                if turns.has_later_turns:
                    turns.keep(number, self._ids_of(answers[number]))
                turns.end(number, time.monotonic())
        return as_record(turns.tasks, start_s, answers)

    async def _ask(self, number: int, body: dict[str, Any], answer: Answer) -> int:
        path = "/v1/completions" if self._api == "completions" else "/v1/chat/completions"
        try:
            async with self._server.ask("POST", path, json.dumps(body).encode()) as reply:
                if reply.status != 200:
                    text = (await reply.body()).decode(errors="replace")
                    answer.error = f"the server answered {reply.status}: {' '.join(text.split())[:MAX_ERROR_CHARS]}"
                    return number
                async for line in reply.lines():
                    if line.startswith(DATA) and line[len(DATA) :] != DONE:
                        answer.take(json.loads(line[len(DATA) :]), time.monotonic())
            if answer.finish is None:
                answer.error = answer.error or "the stream ended early"
        except (OSError, EOFError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            answer.end_s = time.monotonic()
        return number

    def _body(self, task: Task, *, stop_ids: tuple[int, ...], cache_salt: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": task.num_output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if stop_ids:
            body["stop_token_ids"] = list(stop_ids)
        if cache_salt:
            body["cache_salt"] = cache_salt
        if self._api == "completions":
            return {**body, "prompt": list(task.prompt)}
        return {**body, "messages": [{"role": "user", "content": self._decoder().decode(task.prompt)}]}

    def _ids_of(self, answer: Answer) -> list[int]:
        """Ids of an answer that came as text: nearly the ones that the server has."""
        return self._decoder().encode("".join(answer.text), add_special_tokens=False)

    def _decoder(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("texts need the model's tokenizer: name the MODEL that the server serves")
        return self._tokenizer()


def as_record(tasks: Sequence[Task], start_s: Sequence[float], answers: Sequence[Answer]) -> Record:
    """What a driver of an engine would have noted. The generated ids are unknown, so `token` is -1."""
    times = [answer.token_times_s() for answer in answers]
    counts = [len(each) for each in times]
    return Record(
        tasks=tasks,
        start_s=np.array(start_s),
        end_s=np.array([answer.end_s for answer in answers]),
        request=np.repeat(np.arange(len(tasks)), counts),
        token=np.full(sum(counts), -1, np.int64),
        time_s=np.array([time_s for each in times for time_s in each], np.float64),
        ends=[
            Delta(id=number, finish=answer.finish or "error", error=answer.error, cached_tokens=answer.num_cached)
            for number, answer in enumerate(answers)
        ],
        num_steps=None,
        num_prompt=np.array(
            [len(task.prompt) if each.num_prompt is None else each.num_prompt for task, each in zip(tasks, answers)],
            np.int64,
        ),
    )
