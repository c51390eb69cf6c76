"""The main job: `headrace serve smollm2` answers the official client, with the real weights in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from headrace.server.run import bind

from .test_service import until

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Real:
    def __init__(self, log: Path, *, max_kv_tokens: int = 16384, flags: tuple[str, ...] = ()) -> None:
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "headrace.cli.main", "serve", "smollm2", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--engine_threads", "1", "--max_beam_width", "2"]
        command += ["--set", f"kv_cache_config.max_tokens={max_kv_tokens}", *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def children(self) -> list[str]:
        """Ids of the processes that the server started."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Real]:
    server = Real(tmp_path_factory.mktemp("serve") / "log")
    try:
        assert until(server.is_ready, 120), server.log.read_text()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_chat_streamed_and_not(real: Real) -> None:
    create = real.client.chat.completions.create
    whole = create(model="smollm2", messages=QUESTION, max_tokens=16, temperature=0)
    assert "Paris" in (whole.choices[0].message.content or "") and whole.choices[0].finish_reason == "stop"
    chunks = list(create(model="smollm2", messages=QUESTION, max_tokens=16, temperature=0, stream=True,
                         stream_options={"include_usage": True}))  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_batched_prompts_equal_single_ones(real: Real) -> None:
    create = real.client.completions.create
    prompts = ["The capital of France is", "2 + 2 =", "Once upon a time"]
    together = create(model="smollm2", prompt=prompts, max_tokens=8, temperature=0)
    single = [create(model="smollm2", prompt=p, max_tokens=8, temperature=0).choices[0].text for p in prompts]
    assert [choice.text for choice in together.choices] == single


def test_seeded_choices_repeat(real: Real) -> None:
    def texts() -> list[str]:
        answer = real.client.completions.create(
            model="smollm2", prompt="Once upon a time", n=3, seed=7, temperature=1, max_tokens=8
        )
        return [choice.text for choice in answer.choices]

    first = texts()
    assert first == texts() and len(set(first)) == 3


def test_stop_strings_logprobs_and_beams(real: Real) -> None:
    create = real.client.completions.create
    plain = create(model="smollm2", prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=2)
    lists = plain.choices[0].logprobs
    assert lists is not None and lists.tokens is not None and lists.token_logprobs is not None
    assert "".join(lists.tokens) == plain.choices[0].text and len(lists.token_logprobs) == 8
    cut = create(model="smollm2", prompt="The capital of France is", max_tokens=8, temperature=0, stop="ris")
    assert cut.choices[0].text == " Pa" and cut.choices[0].finish_reason == "stop"
    beams = create(
        model="smollm2", prompt="The capital of France is", max_tokens=4, n=2, extra_body={"use_beam_search": True}
    )
    assert len({choice.text for choice in beams.choices}) == 2


def test_scoring_sees_the_same_cold_and_warm(real: Real) -> None:
    def score() -> list[float | None]:
        answer = real.client.completions.create(
            model="smollm2", prompt="The quick brown fox " * 20, max_tokens=0, echo=True, logprobs=0
        )
        assert answer.choices[0].logprobs is not None
        return answer.choices[0].logprobs.token_logprobs or []

    cold, warm = score(), score()
    assert cold[0] is None and len(cold) == len(warm) > 60
    assert all(abs((a or 0) - (b or 0)) < 0.05 for a, b in zip(cold, warm))


def test_a_client_that_leaves_and_a_mistake_disturb_nobody(real: Real) -> None:
    stream = real.client.completions.create(
        model="smollm2", prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.response.close()
    assert until(lambda: "the client has disconnected" in real.log.read_text())
    assert until(lambda: "ended: abort" in real.log.read_text())
    with pytest.raises(openai.BadRequestError, match="token id 49152 is out of the vocabulary"):
        real.client.completions.create(model="smollm2", prompt=[49152], max_tokens=1)
    with pytest.raises(openai.BadRequestError) as error:
        real.client.completions.create(model="smollm2", prompt="a", max_tokens=100_000)
    assert error.value.code == "context_length_exceeded"
    assert real.client.completions.create(model="smollm2", prompt="2 + 2 =", max_tokens=2).choices


def test_responses_and_their_chain(real: Real) -> None:
    create = real.client.responses.create
    whole = create(model="smollm2", input="What is the capital of France?", temperature=0, max_output_tokens=16)
    assert "Paris" in whole.output_text and whole.status == "completed"
    with real.client.responses.stream(
        model="smollm2", input="What is the capital of France?", temperature=0, max_output_tokens=16
    ) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == whole.output_text
    after = create(model="smollm2", input="And of Italy?", previous_response_id=whole.id, temperature=0,
                   max_output_tokens=16)  # fmt: skip
    assert after.usage is not None and whole.usage is not None
    assert after.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens
    assert after.usage.input_tokens_details.cached_tokens > 0


def test_structured_responses(real: Real) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    answer = real.client.responses.create(
        model="smollm2",
        input="Name the capital of France.",
        temperature=0,
        max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}},
    )
    assert set(json.loads(answer.output_text)) == {"city"}


def test_messages(real: Real) -> None:
    client = anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=60)
    asked: Any = {"model": "smollm2", "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    assert whole.content[0].type == "text" and "Paris" in whole.content[0].text and whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    counted = client.messages.count_tokens(model="smollm2", messages=QUESTION).input_tokens
    assert whole.usage.cache_read_input_tokens is not None
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_embeddings_tell_meanings_apart(real: Real) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by two percent."]
    answer = real.client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": "mean"})
    rows = np.asarray([entry.embedding for entry in answer.data])
    assert rows.shape == (3, 576) and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-3)
    assert rows[0] @ rows[1] > rows[0] @ rows[2]
    one = real.client.embeddings.create(model="smollm2", input=texts[2], extra_body={"pooling": "mean"}).data[0]
    assert np.allclose(one.embedding, rows[2], atol=0.02)


def test_tokens_there_and_back_and_the_template(real: Real) -> None:
    tokens = httpx.post(f"{real.url}/tokenize", json={"prompt": "The capital of France"}).json()["tokens"]
    text = httpx.post(f"{real.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "The capital of France"
    rendered = httpx.post(f"{real.url}/render", json={"messages": QUESTION}).json()
    assert rendered["prompt"].endswith("<|im_start|>assistant\n") and "capital of France" in rendered["prompt"]
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 1}
    answer = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == rendered["count"] == len(rendered["prompt_token_ids"])


def test_sigterm_leaves_nothing(real: Real) -> None:
    """Last in this file: it ends the server."""
    children = real.children()
    assert len(children) == 1
    real.process.send_signal(signal.SIGTERM)
    assert real.process.wait(20) == 0
    assert until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 5)
    assert "Traceback" not in real.log.read_text()
