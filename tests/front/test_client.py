from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from headrace import wire
from headrace.front.client import Client
from headrace.front.errors import RequestFailed, RuntimeFailure
from headrace.front.fake import FakeLoop, FakeRuntime, FakeRuntimeProcess, fake_info, says
from headrace.front.outputs import Logprob
from headrace.front.socket_link import SocketLink
from headrace.types import PinInfo

from .making import TOKENIZER, client_of, ids_of, make_builder, submit


def test_a_result_and_its_repetition() -> None:
    with client_of() as client:
        for _ in range(2):
            output = submit(client, "hello ", max_tokens=9)
            assert output.result(5) is output
            assert output.finished and output.error is None
            (choice,) = output.outputs
            assert (choice.text, choice.length, choice.finish_reason) == ("hello hel", 9, "length")
            assert output.usage.completion_tokens == 9
        assert client.router.num_running == 0


def test_many_together_keep_their_order() -> None:
    with client_of(FakeLoop(fake_info(max_batch_size=3))) as client:
        outputs = [submit(client, f"{index:03}", max_tokens=3) for index in range(20)]
        assert [output.result(5).outputs[0].text for output in outputs] == [f"{index:03}" for index in range(20)]


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_a_stream_adds_up_to_the_result(max_tokens: int) -> None:
    with client_of(step_s=0.001) as client:
        output = submit(client, "héllo ", max_tokens=max_tokens, streaming=True, logprobs=1)
        text, ids, logprobs, steps = "", [], [], 0
        for step in output:
            assert step is output
            text += step.outputs[0].text_diff
            ids += step.outputs[0].token_ids_diff
            logprobs += step.outputs[0].logprobs_diff
            steps += 1
        whole = submit(client, "héllo ", max_tokens=max_tokens, logprobs=1).result(5).outputs[0]
        assert (text, ids, logprobs) == (whole.text, whole.token_ids, whole.logprobs)
        assert steps <= max_tokens and list(output) == []


def test_async_iteration_and_waiting() -> None:
    async def run(client: Client) -> list[str]:
        streamed = submit(client, "abc", max_tokens=7, streaming=True)
        parts = [step.outputs[0].text_diff async for step in streamed]
        whole, other = await asyncio.gather(
            submit(client, "abc", max_tokens=7).aresult(), submit(client, "xyz", max_tokens=2).aresult()
        )
        return ["".join(parts), whole.outputs[0].text, other.outputs[0].text]

    with client_of(step_s=0.001) as client:
        assert asyncio.run(run(client)) == ["abcabca", "abcabca", "xy"]


def test_without_streaming_there_is_one_step() -> None:
    with client_of(step_s=0.001) as client:
        steps = list(submit(client, "abc", max_tokens=7))
        assert len(steps) == 1 and steps[0].finished and steps[0].outputs[0].text_diff == "abcabca"


def test_a_late_result_times_out_and_comes_later() -> None:
    with client_of(step_s=0.01) as client:
        output = submit(client, "abc", max_tokens=20)
        with pytest.raises(TimeoutError, match="has not finished after"):
            output.result(0.02)
        assert output.result(5).finished


def test_abort_ends_at_once_and_frees_the_runtime() -> None:
    loop = FakeLoop(fake_info())
    with client_of(loop, step_s=0.002) as client:
        output = submit(client, "abc", max_tokens=1000, n=2, temperature=1.0, streaming=True)
        next(output)
        output.abort()
        assert output.aborted() and output.result(1).outputs[0].finish_reason == "cancelled"
        assert output.outputs[0].text.startswith("a")
        output.abort()
        deadline = time.monotonic() + 5
        while loop.running and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(loop.aborted) == 2 and not loop.running
        assert submit(client, "abc", max_tokens=3).result(5).outputs[0].text == "abc"


def test_a_stop_string_frees_the_runtime() -> None:
    loop = FakeLoop(fake_info())
    with client_of(loop, step_s=0.002) as client:
        choice = submit(client, "abcdef", max_tokens=1000, stop=["cd", "x"]).result(5).outputs[0]
        assert (choice.text, choice.stop_reason, choice.finish_reason) == ("ab", "cd", "stop")
        deadline = time.monotonic() + 5
        while loop.running and time.monotonic() < deadline:
            time.sleep(0.005)
        assert [reason for _, reason in loop.aborted] == ["stop"]


def test_logprobs_in_both_formats() -> None:
    with client_of() as client:
        output = submit(client, "ab", max_tokens=2, logprobs=2, prompt_logprobs=0).result(5)
        assert output.outputs[0].logprobs[0] == {97: Logprob(-1.0, 2), 98: Logprob(-0.5, 1)}
        assert output.outputs[0].cumulative_logprob == -2.0
        assert output.outputs[0].prompt_logprobs == [None, {98: Logprob(-1.0, 2)}]
        simple = submit(
            client, "ab", max_tokens=2, logprobs=0, prompt_logprobs=0, logprobs_simple_format=True,
            prompt_logprobs_simple_format=True,
        ).result(5)  # fmt: skip
        assert simple.outputs[0].logprobs == [-1.0, -1.0]
        assert simple.outputs[0].prompt_logprobs == [None, -1.0]


def test_beams_come_best_first() -> None:
    with client_of(FakeLoop(fake_info(), script=says(ids_of("abcdef")))) as client:
        output = submit(client, "x", max_tokens=4, n=2, best_of=3, use_beam_search=True).result(5)
        assert [choice.text for choice in output.outputs] == ["abcd", "abc"]
        assert [choice.cumulative_logprob for choice in output.outputs] == [-1.0, -2.0]


def test_a_failed_request_raises_and_leaves_the_next_alone() -> None:
    loop = FakeLoop(fake_info())
    with client_of(loop, step_s=0.002) as client:
        loop.fault = "broken kernel"
        output = submit(client, "abc", max_tokens=50)
        with pytest.raises(RequestFailed, match="broken kernel"):
            output.result(5)
        assert output.error == "broken kernel"
        loop.fault = ""
        assert submit(client, "abc", max_tokens=1).result(5).outputs[0].text == "a"


def test_a_runtime_that_dies_ends_everything() -> None:
    runtimes: list[FakeRuntime] = []

    def open_link(on_message: object) -> FakeRuntime:
        runtimes.append(FakeRuntime(on_message, step_s=0.01))  # pyright: ignore[reportArgumentType]
        return runtimes[0]

    client = Client(open_link)
    client.start()
    client.wait_ready()
    output = submit(client, "abc", max_tokens=1000)
    runtimes[0].die("out of memory")
    with pytest.raises(RequestFailed, match="out of memory"):
        output.result(5)
    with pytest.raises(RuntimeFailure, match="out of memory"):
        submit(client, "abc")
    client.close()


def test_a_failed_start() -> None:
    failed = wire.Failed("no such file", bad_input=True)
    client = Client(lambda on_message: FakeRuntime(on_message, fails_with=failed))
    client.start()
    with pytest.raises(RuntimeFailure, match="no such file") as error:
        client.wait_ready()
    assert error.value.bad_input
    client.close()


def test_statistics() -> None:
    with client_of() as client:
        submit(client, "abc", max_tokens=5).result(5)
        assert client.stats(5)[0]["iter"] >= 5


def test_closing_ends_waiting_callers() -> None:
    with client_of(step_s=0.01) as client:
        output = submit(client, "abc", max_tokens=100000 // 100)
        threading.Timer(0.05, client.close).start()
        with pytest.raises(RequestFailed, match="shut down"):
            output.result(5)
        with pytest.raises(RuntimeFailure, match="shut down"):
            submit(client, "abc")
    assert not any(thread.name == "headrace-front" for thread in threading.enumerate())


class TestSocketLink:
    def test_over_a_socket(self) -> None:
        process = FakeRuntimeProcess(step_s=0.001)
        client = Client(lambda on_message: SocketLink(process, on_message))
        client.start()
        info = client.wait_ready()
        requests, params = make_builder(info).build(ids_of("hello"), make_params(), allocate=client.router.allocate)
        output = client.submit(requests, params, tokenizer=TOKENIZER)
        assert output.result(5).outputs[0].text == "hellohel"
        assert client.stats(5)
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 5 and process.returncode == 0

    def test_a_process_that_vanishes(self) -> None:
        process = FakeRuntimeProcess(step_s=0.01)
        client = Client(lambda on_message: SocketLink(process, on_message))
        client.start()
        client.wait_ready()
        output = submit(client, "abc", max_tokens=1000)
        process.kill(-9, "Traceback ...\nSomeError: the disk is on fire\n")
        with pytest.raises(
            RequestFailed, match=r"killed by signal 9 \(no memory left\?\): SomeError: the disk is on fire"
        ):
            output.result(5)
        client.close()


def make_params() -> object:
    from headrace.params import SamplingParams

    return SamplingParams(max_tokens=8)


class TestQuestions:
    def test_each_gets_its_own_answer(self) -> None:
        loop = FakeLoop(fake_info())
        loop.kv_events = [{"event_id": 0}]
        with client_of(loop) as client:
            assert client.kv_events(5) == [{"event_id": 0}]
            assert client.kv_events(5) == []
            assert client.pins(5) == []
            assert client.unpin("a", 5) is False
            assert client.stats(5)[0]["numActiveRequests"] == 0

    def test_a_late_answer_is_not_taken_for_another_ones(self) -> None:
        loop = FakeLoop(fake_info())
        with client_of(loop) as client:
            loop.pins["a"] = PinInfo(name="a", num_tokens=1, num_blocks=1)
            loop.kv_events = [{"event_id": 0}]
            with pytest.raises(TimeoutError, match="no answer within"):
                client.unpin("a", 0)
            with pytest.raises(TimeoutError):
                client.kv_events(0)
            assert client.unpin("a", 5) is False, "the late answer said True"
            assert client.kv_events(5) == [{"event_id": 0}], "what came too late is not lost"

    def test_nobody_waits_for_a_runtime_that_has_ended(self) -> None:
        held = threading.Event()

        class Stuck(FakeLoop):
            def receive(self, message: wire.Up) -> wire.Down | None:
                held.wait(10)
                return None

        found: list[BaseException] = []
        runtime: list[FakeRuntime] = []

        def link(on_message: Any) -> FakeRuntime:
            runtime.append(FakeRuntime(on_message, loop=Stuck(fake_info())))
            return runtime[0]

        client = Client(link)
        client.start()
        client.wait_ready()

        def ask() -> None:
            try:
                client.pins(30)
            except RuntimeFailure as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.05)
        runtime[0]._on_message(wire.Failed("the card fell out"))  # pyright: ignore[reportPrivateUsage]
        thread.join(5)
        held.set()
        assert [str(error) for error in found] == ["the card fell out"]
        with pytest.raises(RuntimeFailure):
            client.kv_events(1)
        client.close()
