"""`bench serve` against the real server over the fake runtime, and the client against answers made by hand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.bench.http import Server as Address
from headrace.bench.pace import Closed, Open
from headrace.bench.report import Load, make_point
from headrace.bench.serve import Answer, ServerDriver
from headrace.bench.workload import Task
from headrace.cli.main import cli
from headrace.text.tokenizer import ByteTokenizer
from tests.server.harness import MODEL, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model")) as found:
        yield found


def driver(server: Server, api: str = "completions") -> ServerDriver:
    return ServerDriver(Address(url=server.url), model=MODEL, api=api, tokenizer=ByteTokenizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("pace", [Closed(2), Open([0.0, 0.01, 0.02, 0.02])])
def test_every_token_is_counted_and_timed(server: Server, api: str, pace: Closed | Open) -> None:
    tasks = [Task(number, list(b"some text"), number + 2) for number in range(4)]
    shown: list[int] = []
    record = driver(server, api).run(tasks, pace=pace, progress=shown.append)
    assert record.errors() == [] and record.num_output.tolist() == [2, 3, 4, 5] and sum(shown) == 14
    assert (record.ttft_s() >= 0).all() and (record.e2e_s() >= record.ttft_s()).all() and record.num_steps is None
    if isinstance(pace, Open):
        assert (record.start_s - record.start_s[0]).tolist() == pytest.approx(list(pace.arrivals_s))


def test_turns_follow_answers(server: Server) -> None:
    turns = [Task(0, list(b"abc"), 3), Task(0, list(b"de"), 2, after=0)]
    record = driver(server).run(turns, pace=Closed())
    assert bytes(record.tasks[1].prompt) == b"abcabcde"  # it echoes
    assert record.start_s[1] >= record.end_s[0] and record.num_output.tolist() == [3, 2]


def test_what_fails_is_a_line_of_the_record(server: Server) -> None:
    tasks = [Task(3, [97] * 9999, 5), Task(4, [97], 2)]
    record = driver(server).run(tasks, pace=Closed())
    (line,) = record.errors()
    assert line.startswith("request 3: the server answered 400") and record.num_output.tolist() == [0, 2]
    assert record.num_input.tolist()[0] == 0, "nobody worked on it"


def test_prompts_are_counted_with_the_server_s_template(server: Server) -> None:
    tasks = [Task(0, list(b"some text"), 2)]
    plain, chat = (driver(server, api).run(tasks, pace=Closed()).num_input[0] for api in ("completions", "chat"))
    assert plain == 9 < chat


def test_all_may_fail() -> None:
    with listening(b"HTTP/1.1 503 Busy\r\n\r\n{}") as url:
        record = ServerDriver(Address(url=url), model="m").run([Task(0, [1, 2], 2)], pace=Closed())
    point = make_point(record, Load(pattern="closed"))
    result = point.result
    assert point.latency["e2e_s"] is None, "a refusal's time is no latency"
    assert (result.num_done, result.input_tokens, result.total_tokens_per_s, result.cache_hit_rate) == (0, 0, 0, 0)


def test_pieces_of_several_tokens_share_their_arrival() -> None:
    answer = Answer()
    for text, now_s in (("ab", 1.0), ("cd", 2.0)):
        answer.take({"choices": [{"text": text, "finish_reason": None}]}, now_s)
    answer.take({"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 4}}, 3.0)
    assert answer.token_times_s() == [1.0, 1.0, 2.0, 2.0] and answer.finish == "length" and not answer.error
    answer.take({"error": {"message": "no"}}, 4.0)
    assert "no" in answer.error


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """A server that says the same to everyone."""
    ready, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(10)
    yield urls[0]
    stop.set()
    thread.join(10)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {\"choices\": [{\"text\": \"a\"}]}\n\n", "the stream ended early"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {nonsense\n\n", "JSONDecodeError"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\ndata: {", "IncompleteReadError"),
        (b"HTTP/1.1 503 Busy\r\n\r\n{\"error\": \"full\"}", "answered 503: .*full"),
    ],
)  # fmt: skip
def test_a_broken_answer_is_a_failed_request(answer: bytes, problem: str) -> None:
    with listening(answer) as url:
        record = ServerDriver(Address(url=url), model="m").run([Task(0, [1], 2)], pace=Closed())
    (line,) = record.errors()
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(line)


def serve(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", "serve", *map(str, arguments)])


def test_from_the_command_line(server: Server, tmp_path: Path) -> None:
    data, report, rows = (tmp_path / name for name in ("set.jsonl", "report.json", "rows.json"))
    lines = [{"input_ids": [97, 98], "output_tokens": 3, "timestamp": 10 * number} for number in range(3)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ("--url", server.url, "--dataset", data, "--report_json", report, "--request_json", rows)
    found = serve(*common, "--trace_speed", "1,2", "--slo", "ttft=5000", "--num_gpus", 2)
    assert found.exit_code == 0, (found.output, found.exception)
    values = json.loads(report.read_text())
    assert (values["kind"], values["num_gpus"], values["model"]["name"]) == ("serve", 2, MODEL)
    assert [point["load"]["trace_speed"] for point in values["points"]] == [1.0, 2.0]
    for point in values["points"]:
        result = point["result"]
        assert result["output_tokens"] == 9 and point["goodput"]["share"] == 1.0
        assert result["output_tokens_per_s_per_gpu"] == pytest.approx(result["output_tokens_per_s"] / 2)
    assert [len(each) for each in json.loads(rows.read_text())] == [3, 3]
    assert "trace x2" in found.stdout


def test_bad_input_is_one_line(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "set.jsonl"
    data.write_text('{"input_ids": [1], "output_tokens": 9999}\n')
    for arguments, problem in (
        (("--url", "http://127.0.0.1:9"), "--url: no server answers"),
        (("--url", "localhost:8000"), "--url must be http://HOST:PORT"),
        (("--url", server.url, "--served_model_name", "other"), f"has {MODEL}, not other"),
        (("--url", server.url), "MODEL: the server's model isn't on this machine"),
        (("--url", server.url, "--dataset", data), "needs 10000 tokens .* max_seq_len is 4096"),
    ):
        error = serve(*arguments).exception
        assert isinstance(error, ValueError) and "\n" not in str(error), error
        with pytest.raises(ValueError, match=problem):
            raise error
