"""One HTTP request while it runs: its prompts' collectors, its writer and its feed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace.front.collector import Choice, Collector
from headrace.front.errors import RequestError
from headrace.front.tracing import NO_TRACE, Trace
from headrace.log import get
from headrace.seam import NO_TOKEN
from headrace.server.answer import Answer, Route
from headrace.server.feed import Feed

__all__ = ["Job", "Written"]

log = get("server")


class Written(NamedTuple):
    """What a job has to say after something came."""

    data: bytes
    last: bool
    error: RequestError | None = None
    """Instead of an answer, when nothing of one was written."""


@dataclass(slots=True)
class _Place:
    """A collector within the job."""

    prompt: int
    """Number of its prompt."""
    cursors: list[_Cursor]
    closed: bool = False
    """Its end has been written."""


@dataclass(slots=True)
class _Cursor:
    """How far a choice has been written to the stream."""

    parts: int = 0
    tokens: int = 0
    events: int = 0
    opened: bool = False
    closed: bool = False


class Job:
    """`feed` belongs to the event loop, everything else to the thread that dispatches outputs."""

    def __init__(self, answer: Answer, feed: Feed, *, trace: Trace = NO_TRACE) -> None:
        self.answer = answer
        self.feed = feed
        self.trace = trace
        self.collectors: list[Collector] = []
        self.ended = False
        """The last piece has been written, well or not."""
        self.error: RequestError | None = None
        """Why it was the last one, where that is a fault."""
        self._route: Route = answer.api.writer(answer)
        self._places: dict[int, _Place] = {}
        self._num_open = 0
        self._begun = False

    def add(self, collector: Collector) -> None:
        collector.owner = self
        self._places[id(collector)] = _Place(len(self.collectors), [_Cursor() for _ in collector.choices])
        self.collectors.append(collector)
        self._num_open += 1

    def write(self, collector: Collector) -> Written:
        """Bytes for what `collector` just got. A fault here is this request's alone."""
        if self.ended:
            return Written(b"", True)
        try:
            place = self._places[id(collector)]
            if collector.is_done and not place.closed:
                place.closed = True
                self._num_open -= 1
            done = self._num_open == 0
            written = self._failure(collector)
            if written is None:
                written = self._stream(collector, place, done=done) if self.answer.stream else self._whole(done=done)
        except Exception:
            log.exception("request %s could not be written", self.answer.label)
            written = self.fail("internal error", status=500)
        self.ended = written.last
        return written

    def fail(self, message: str, *, status: int = 500, code: str | None = None, param: str | None = None) -> Written:
        """End with an error: as the last event of a stream that has begun, else as the whole answer."""
        self.ended = True
        error = self.error = RequestError(message, code=code, status=status, param=param)
        say = log.error if status >= 500 else log.info  # a client's matter
        if self._begun:
            say("request %s failed while it streamed: %s", self.answer.label, message)
            return Written(self._route.failure(error), True)
        say("request %s failed: %s", self.answer.label, message)
        return Written(b"", True, error)

    def _failure(self, collector: Collector) -> Written | None:
        """An error of one prompt is the whole request's; one that timed out without a token is an error too."""
        if collector.error_param:
            message = f"{collector.error_param}: {collector.error}"
            code = "no_token_left" if collector.error == NO_TOKEN else "invalid_grammar"
            return self.fail(message, code=code, status=400, param=collector.error_param)
        if collector.error:
            return self.fail(collector.error, code="request_failed", status=self.answer.failure_status)
        if collector.is_done and not self._begun and all(_is_late(choice) for choice in collector.choices):
            return self.fail("the request timed out before it produced a token", status=504, code="timeout")
        return None

    def _whole(self, *, done: bool) -> Written:
        return Written(self._route.response(self.collectors), True) if done else Written(b"", False)

    def _stream(self, collector: Collector, place: _Place, *, done: bool) -> Written:
        pieces: list[bytes] = []
        for choice, cursor in zip(collector.choices, place.cursors):
            if not cursor.closed:
                self._write_choice(choice, place.prompt, cursor, pieces)
        if done:
            pieces.append(self._route.closing(self.answer.total_usage(self.collectors)))
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._begun = self._begun or bool(data)
        return Written(data, done)

    def _write_choice(self, choice: Choice, prompt: int, cursor: _Cursor, pieces: list[bytes]) -> None:
        num_new = len(choice.token_ids) - cursor.tokens
        if choice.finish is None and num_new < (self.answer.stream_interval if cursor.tokens else 1):
            return
        if not cursor.opened:
            pieces.append(self._route.opening(choice, prompt))
            cursor.opened = True
        piece = self._route.piece(
            choice, prompt, parts_from=cursor.parts, tokens_from=cursor.tokens, events_from=cursor.events
        )
        pieces.append(piece)
        cursor.parts, cursor.tokens, cursor.events = len(choice.parts), len(choice.token_ids), len(choice.events)
        if choice.finish is not None:
            pieces.append(self._route.end(choice, prompt))
            cursor.closed = True


def _is_late(choice: Choice) -> bool:
    return choice.finish == "timeout" and choice.num_generated == 0
