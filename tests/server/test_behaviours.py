"""A real server with real weights, held to the rows of public failures in other engines.

The numbers are rows of the project's list of behaviours.

    1, 3 streams, stop strings        test_streams_equal_whole_answers, test_stop_strings
    4, 5, 76 to 90 tools, reasoning   test_tools.py, parsers/
    8 no tokenizer                    test_service.py
    9, 11 min_tokens, EOS             test_min_tokens_and_ignore_eos; tests/sampling
    12, 14, 16 choices and seeds      test_choices_and_seeds
    18, 21 log-probabilities          test_log_probabilities_are_finite; test_writing.py
    22 scoring cold and warm          test_real.py
    25, 26 penalties                  tests/sampling
    28, 31 ids out of the vocabulary  test_ids_out_of_the_vocabulary
    29, 32 bias, edge values          test_edges_of_sampling; test_llm_behaviours.py
    34, 35 max_tokens                 test_scoring_and_defaults
    36, 37, 49 prompt lengths         test_prompts_that_do_not_fit, test_empty_prompts; test_every_api.py
    38, 40 batches, usage             test_batches_and_usage; test_tools.py
    41, 42, 45 cancels                test_cancels_free_everything; test_service.py; tests/runtime/test_totals.py
    44, 46, 47, 48, 52, 66            test_llm_behaviours.py
    53, 55, 59 prefix cache           test_cached_prompts
    68 to 72, 75 grammars             test_structured.py, test_every_api.py; tests/text/grammars, tests/twin
    92, 93, 94, 99 refusals           test_api.py, test_every_api.py
    96 events of /v1/responses        test_responses.py
    98 a stream's end                 test_a_killed_engine_ends_everything; test_every_api.py, test_service.py
    100 one BOS                       test_api.py, tests/text
    102 stuck and dead engines        test_http.py, test_a_killed_engine_ends_everything
    103, 104 health under load        test_health_answers_while_long_prompts_are_tokenised; test_service.py
    105 full queue                    test_service.py, test_operations.py
    107, 108, 116 the end             test_run.py, test_real.py, test_a_killed_engine_ends_everything; tests/cli
    109, 111 metrics                  test_operations.py, test_fronts.py
    143 keys                          test_service.py, test_operations.py
    148 linear parsers                parsers/test_kit.py

Every field of every API: test_field_matrix.py, test_field_errors.py (99). 23: tests/test_llm_scoring.py. 90:
twin/test_thinking.py, test_thinking_real.py, tests/test_llm_thinking.py. 124: engine/test_kv_scales.py.
Not built: 133 to 142 (adapters, images, disaggregation).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .harness import events_of
from .series import phases_ms
from .test_real import QUESTION, Real
from .test_service import until

MAX_KV_TOKENS = 1024
FRANCE = "The capital of France is"
PROMPTS = [
    "안녕하세요, 오늘",
    "日本の首都は",
    "🎉🥳 emoji:",
    "Příliš žluťoučký kůň",
    "def f(x):\n    return",
    "👨‍👩‍👧‍👦",
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Real]:
    server = Real(tmp_path_factory.mktemp("serve") / "log", max_kv_tokens=MAX_KV_TOKENS)
    try:
        assert until(server.is_ready, 120), server.log.read_text()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def ask(real: Real, path: str = "completions", *, status: int = 200, **body: Any) -> Any:
    response = httpx.post(f"{real.url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == status, response.text
    return json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


class Streamed:
    """What a stream said, put together by choice."""

    def __init__(self, real: Real, path: str = "completions", **body: Any) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = httpx.post(f"{real.url}/v1/{path}", json={**body, **options}, timeout=60)
        assert response.status_code == 200, response.text
        *self.events, end = events_of(response.text)
        assert end == "[DONE]"
        self.texts: dict[int, str] = {}
        self.finishes: dict[int, str] = {}
        for event in self.events[:-1]:
            for choice in event["choices"]:
                assert choice["index"] not in self.finishes
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                self.texts[choice["index"]] = self.texts.get(choice["index"], "") + text
                if choice["finish_reason"]:
                    self.finishes[choice["index"]] = choice["finish_reason"]
        self.usage = self.events[-1]["usage"]


def without_cache(usage: Any) -> Any:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def test_streams_equal_whole_answers(real: Real) -> None:
    def check(case: tuple[str, float]) -> None:
        body = {"prompt": case[0], "temperature": case[1], "max_tokens": 10, "seed": 5}
        whole, streamed = ask(real, **body), Streamed(real, **body)
        assert streamed.texts[0] == whole["choices"][0]["text"]
        assert streamed.finishes[0] == whole["choices"][0]["finish_reason"]
        assert without_cache(streamed.usage) == without_cache(whole["usage"])
        for event in streamed.events[:-1]:
            assert "\ufffd" not in event["choices"][0]["text"] or "\ufffd" in whole["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, [(prompt, temperature) for prompt in PROMPTS for temperature in (0, 1.3)]))


def test_stop_strings(real: Real) -> None:
    draw = random.Random(1)

    def check(prompt: str) -> None:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 10, "ignore_eos": True}
        text = ask(real, **body)["choices"][0]["text"]
        start = draw.randrange(len(text))
        stop = text[start : start + draw.randrange(1, 5)]
        if "\ufffd" in stop:
            return
        for keeps in (False, True):
            expected = text[: text.index(stop)] + stop * keeps
            more = {**body, "stop": [stop, "never to be seen"], "include_stop_str_in_output": keeps}
            choice, streamed = ask(real, **more)["choices"][0], Streamed(real, **more)
            assert choice["text"] == streamed.texts[0] == expected
            assert (choice["finish_reason"], choice["stop_reason"], streamed.finishes[0]) == ("stop", stop, "stop")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, [*PROMPTS[:3], FRANCE]))


def test_min_tokens_and_ignore_eos(real: Real) -> None:
    body = {"messages": QUESTION, "temperature": 0, "return_token_ids": True}
    plain = ask(real, "chat/completions", max_tokens=20, **body)
    count = plain["usage"]["completion_tokens"]
    assert plain["choices"][0]["finish_reason"] == "stop"
    exact = ask(real, "chat/completions", max_tokens=20, min_tokens=count - 1, **body)
    assert exact["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    later = ask(real, "chat/completions", max_tokens=20, min_tokens=count, **body)
    assert later["usage"]["completion_tokens"] > count
    endless = ask(real, "chat/completions", max_tokens=count + 3, ignore_eos=True, **body)
    assert endless["usage"]["completion_tokens"] == count + 3 and endless["choices"][0]["finish_reason"] == "length"
    held = ask(real, prompt=FRANCE, stop=" Paris", min_tokens=3, max_tokens=6, temperature=0)
    assert held["choices"][0]["text"].startswith(" Paris")


def test_choices_and_seeds(real: Real) -> None:
    body = {"prompt": FRANCE, "temperature": 1, "max_tokens": 8, "n": 4, "seed": 7}
    first = [choice["text"] for choice in ask(real, **body)["choices"]]
    with ThreadPoolExecutor(4) as pool:  # in another batch, beside others
        others = [pool.submit(ask, real, prompt=f"{n} is", max_tokens=12, temperature=1) for n in range(3)]
        again = ask(real, **body)
        assert all(other.result() for other in others)
    assert [choice["text"] for choice in again["choices"]] == first and len(set(first)) == 4
    assert list(Streamed(real, **body).texts.values()) == first
    assert ask(real, **{**body, "n": 1})["choices"][0]["text"] == first[0]
    unseeded = {ask(real, prompt=FRANCE, temperature=1.5, max_tokens=8)["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) > 1
    best = ask(real, prompt=[FRANCE, "2 + 2 ="], n=2, best_of=3, temperature=1, max_tokens=4)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_p": 0.01}, {"bad_token_ids": [260]}, {"logit_bias": {"28": -100}}]
)
def test_log_probabilities_are_finite(real: Real, fields: dict[str, Any]) -> None:
    any_token = {"ignore_eos": True, "skip_special_tokens": False, **fields}
    choice = ask(real, prompt=FRANCE, max_tokens=4, temperature=1, logprobs=5, **any_token)["choices"][0]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"] and len(lists["token_logprobs"]) == 4
    values = [*lists["token_logprobs"], *(value for top in lists["top_logprobs"] for value in top.values())]
    assert all(-9999 <= value <= 0 for value in values)
    chat: dict[str, Any] = {
        "messages": QUESTION,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 0,
    }
    whole = ask(real, "chat/completions", **chat, **fields)["choices"][0]["logprobs"]["content"]
    events = Streamed(real, "chat/completions", **chat, **fields).events[:-1]
    streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole and [len(entry["top_logprobs"]) for entry in whole] == [5] * 4


def test_ids_out_of_the_vocabulary(real: Real) -> None:
    cases: list[dict[str, Any]] = [
        {"logit_bias": {"49152": 1}}, {"stop_token_ids": [49152]}, {"bad_token_ids": [49152]}
    ]  # fmt: skip
    for fields in cases:
        error = ask(real, prompt="a", status=400, **fields)["error"]
        assert "49152" in error["message"] and "vocabulary has 49152 ids" in error["message"]
    for prompt in ([-1], [[5], [2**40]]):
        assert "out of the vocabulary" in ask(real, prompt=prompt, status=400)["error"]["message"]


def test_edges_of_sampling(real: Real) -> None:
    expected = ask(real, prompt=FRANCE, max_tokens=4, temperature=0)["choices"][0]["text"]
    cold: list[dict[str, Any]] = [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"top_p": 1e-9},
                                  {"temperature": 0, "top_k": -1}]  # fmt: skip
    for fields in cold:
        body = {"temperature": 1, **fields}
        assert ask(real, prompt=FRANCE, max_tokens=4, **body)["choices"][0]["text"] == expected
    hot: list[dict[str, Any]] = [{"repetition_penalty": 1e30}, {"top_p": 1e-320}, {"temperature": 1000},
                                 {"no_repeat_ngram_size": 1}]  # fmt: skip
    for fields in hot:
        assert ask(real, prompt=FRANCE, max_tokens=4, **fields)["usage"]["completion_tokens"] <= 4
    token = ask(real, prompt=FRANCE, max_tokens=1, temperature=0, return_token_ids=True)["choices"][0]["token_ids"][0]
    biased = ask(real, prompt=FRANCE, max_tokens=1, temperature=0, logit_bias={str(token): -100})["choices"][0]["text"]
    assert not expected.startswith(biased)


def test_scoring_and_defaults(real: Real) -> None:
    scored = ask(real, prompt=FRANCE, max_tokens=0, echo=True, logprobs=1)
    assert scored["choices"][0]["text"] == FRANCE and scored["choices"][0]["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0 and len(scored["choices"][0]["logprobs"]["tokens"]) == 5
    streamed = Streamed(real, prompt=FRANCE, max_tokens=0, echo=True, logprobs=1)
    assert (streamed.texts, streamed.finishes) == ({0: FRANCE}, {0: "length"})
    assert ask(real, "chat/completions", messages=QUESTION, max_tokens=0, status=400)["error"]["param"] == "max_tokens"
    assert ask(real, prompt="a", max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_prompts_that_do_not_fit(real: Real) -> None:
    """The context is 8,192 tokens, the whole KV cache 1,024."""
    plain = ask(real, prompt=[5] * 8000, max_tokens=500, status=400)["error"]
    text = [{"role": "user", "content": "a " * 8000}]
    chat = ask(real, "chat/completions", messages=text, max_tokens=500, status=400)["error"]
    assert plain["code"] == chat["code"] == "context_length_exceeded"
    assert "8192" in plain["message"] and "8000" in plain["message"] and "500" in plain["message"]
    pattern = [word for word in plain["message"].split() if not word[0].isdigit()]
    assert [word for word in chat["message"].split() if not word[0].isdigit()] == pattern
    for prompt in ([5] * 1024, [[5], [5] * 2000]):
        error = ask(real, prompt=prompt, max_tokens=1, status=400)["error"]
        assert error["code"] == "context_length_exceeded" and "at most 1023 prompt tokens fit" in error["message"]
    assert "Traceback" not in real.log.read_text()


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
def test_empty_prompts(real: Real, prompt: Any) -> None:
    """This tokenizer adds no BOS."""
    assert "empty prompt" in ask(real, prompt=prompt, status=400)["error"]["message"]
    assert ask(real, prompt="a", max_tokens=1)["choices"]


def test_batches_and_usage(real: Real) -> None:
    for prompts in ([FRANCE, "2 + 2 =", "Once"], [[504, 3575, 282], [1, 2, 3, 4]]):
        body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        single = [ask(real, prompt=prompt, **body) for prompt in prompts]
        together, streamed = ask(real, prompt=prompts, n=2, **body), Streamed(real, prompt=prompts, n=2, **body)
        expected = [one["choices"][0]["text"] for one in single for _ in range(2)]
        assert [choice["text"] for choice in together["choices"]] == expected
        assert [streamed.texts[index] for index in range(len(expected))] == expected
        num_prompt = sum(one["usage"]["prompt_tokens"] for one in single)
        for usage in (together["usage"], streamed.usage):
            assert usage["prompt_tokens"] == num_prompt and usage["completion_tokens"] == 6 * len(expected)
            assert usage["total_tokens"] == num_prompt + 6 * len(expected)
            assert type(usage["prompt_tokens_details"]["cached_tokens"]) is int
            assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_cached_prompts(real: Real) -> None:
    for length, cached in ((64, 63), (65, 64), (63, 62)):
        body = {"prompt": [length] * length, "max_tokens": 4, "temperature": 0, "cache_salt": "mine"}
        cold, warm = ask(real, **body), ask(real, **body)
        assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        other = ask(real, **{**body, "cache_salt": "yours"})
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


EVERY_API: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": QUESTION, "max_tokens": 3},
    "completions": {"prompt": FRANCE, "max_tokens": 3},
    "responses": {"input": FRANCE, "max_output_tokens": 3},
    "messages": {"messages": QUESTION, "max_tokens": 3},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", EVERY_API)
def test_one_id_and_where_the_time_went(real: Real, api: str, stream: bool) -> None:
    """The client's name for a request is in the header and in the one log line of its end; its reply's is in both."""
    mine = f"mine-{api.replace('/', '-')}-{stream}"
    body = {**EVERY_API[api], "stream": stream, "return_timing": True, "ignore_eos": True}
    before = phases_ms(real.url)
    answer = httpx.post(f"{real.url}/v1/{api}", json=body, headers={"x-request-id": mine}, timeout=60)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == mine
    texts = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    told = [one for body in map(json.loads, texts) for one in (body, body.get("response", {}), body.get("message", {}))]
    (own,) = {one["id"] for one in told if "id" in one}
    assert own == mine or own.startswith(("resp_", "msg_"))
    usage = [one["usage"] for one in told if one.get("usage")][-1]
    timing = usage["timing"]
    assert until(lambda: phases_ms(real.url)["decode"] > before["decode"])
    spent = {f"{name}_ms": total - before[name] for name, total in phases_ms(real.url).items()}
    inference_ms = spent.pop("inference_ms")
    assert timing == pytest.approx(spent, abs=0.002) and timing["prefill_ms"] > 0
    assert sum(timing.values()) == pytest.approx(timing["queue_ms"] + inference_ms, abs=0.002), "there are no gaps"
    if not stream:
        parts = (part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
        spans = {name: float(value) for name, value in parts}
        assert spans == pytest.approx({name.removesuffix("_ms"): value for name, value in timing.items()}, rel=1e-3)
    cached = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    assert type(cached["cached_tokens"] if cached else usage["cache_read_input_tokens"]) is int
    (line,) = [line for line in real.log.read_text().splitlines() if mine in line]
    assert own in line and "ended: length" in line and "+ 3 tokens" in line, line


def test_cancels_free_everything(real: Real) -> None:
    """100 clients that leave at any moment; then a request that needs every block of the cache."""
    draw = random.Random(5)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        prompt: Any = f"word{number} " * draw.randrange(1, 60)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": number % 2 == 0}
        if number % 5 == 0:
            body.update(prompt=[prompt, "x", "y"])
        if number % 7 == 0:
            body["n"] = 3
        call = client.post(f"{real.url}/v1/completions", json=body)
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(call, draw.choice([0.01, 0.1, 0.5]) * (0.1 + draw.random()))

    async def run() -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(leave(client, number) for number in range(100)))

    asyncio.run(run())
    whole = ask(real, prompt=[9] * (MAX_KV_TOKENS - 3), max_tokens=3, ignore_eos=True, temperature=0)
    assert whole["usage"]["completion_tokens"] == 3
    assert "Traceback" not in real.log.read_text()


def test_health_answers_while_long_prompts_are_tokenised(real: Real) -> None:
    body = json.dumps({"prompt": "word " * 200_000, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    waits: list[float] = []
    with ThreadPoolExecutor(2) as pool, httpx.Client(timeout=30) as client:
        posts = [
            pool.submit(httpx.post, f"{real.url}/v1/completions", content=body, headers=headers, timeout=60)
            for _ in range(2)
        ]
        while not all(post.done() for post in posts):
            started = time.monotonic()
            assert client.get(f"{real.url}/health").status_code == 200
            waits.append(time.monotonic() - started)
            time.sleep(0.01)
    assert all(post.result().status_code == 400 for post in posts)
    assert sorted(waits)[len(waits) // 2] < 0.1 and max(waits) < 0.6, waits


def test_a_killed_engine_ends_everything(real: Real) -> None:
    """Last in this file: it ends the server."""
    (child,) = real.children()
    found: dict[bool, str] = {}
    begun = threading.Event()

    def call(stream: bool) -> None:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": stream}
        parts: list[str] = []
        with httpx.stream("POST", f"{real.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == (200 if stream else 500)
            for part in response.iter_text():
                begun.set()
                parts.append(part)
        found[stream] = "".join(parts)

    threads = [threading.Thread(target=call, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    os.kill(int(child), signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert json.loads(found[False])["error"]["code"] == "engine_failed"
    *_, last, end = events_of(found[True])
    assert end == "[DONE]" and last["error"]["code"] == "engine_failed"
    assert real.process.wait(20) == 1
    assert "killed by signal 9" in real.log.read_text().strip().splitlines()[-1]
    assert not Path(f"/proc/{child}").exists()
