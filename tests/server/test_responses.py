"""/v1/responses with the official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.front.errors import RequestError
from headrace.front.fake import FakeLoop, fake_info, says
from headrace.server.response_store import ResponseStore, StoredResponse
from headrace.server.service import Apis, Operations

from .harness import TOOL_TEMPLATE, Server, running, text_side

PROMPT = "[user] hello\n[assistant] "


def create(server: Server, **fields: Any) -> Any:
    return server.client.responses.create(model="fake:1", **fields)


def typed_events(body: str) -> list[dict[str, Any]]:
    """The events of a raw stream, whose names are their types."""
    events: list[dict[str, Any]] = []
    for block in body.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_text_is_answered(server: Server) -> None:
    answer = create(server, input="hello", max_output_tokens=12, temperature=0.5, metadata={"a": "b"})
    assert answer.output_text == PROMPT[:12]
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")
    assert answer.temperature == 0.5 and answer.top_p == 1 and answer.metadata == {"a": "b"}
    assert answer.usage.input_tokens == len(PROMPT) and answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == len(PROMPT) + 12
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_items_and_instructions_are_messages_of_the_template(server: Server) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]
    answer = create(server, input=items, instructions="be kind", max_output_tokens=60)
    expected = "[system] be kind\n[user] a\n[assistant] b\n[user] c\nd\n[assistant] "
    assert answer.output_text == expected[:60] and answer.usage.input_tokens == len(expected)


def test_the_stream_has_the_order_that_the_client_expects(server: Server) -> None:
    events = list(create(server, input="hello", max_output_tokens=4, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final: Any = events[-1]
    assert final.response.output_text == PROMPT[:4] and final.response.usage.output_tokens == 4
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {final.response.output[0].id}
    assert events[0].response.id == final.response.id and events[0].response.output == []


def test_the_clients_own_accumulation_agrees(server: Server) -> None:
    with server.client.responses.stream(model="fake:1", input="hello", max_output_tokens=9) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert snapshots[-1] == PROMPT[:9]


def test_a_finished_stream_is_completed(folder: Path) -> None:
    with running(folder, loop=FakeLoop(fake_info(), script=says(b"yes", then=257))) as server:
        with server.client.responses.stream(model="fake:1", input="hello") as stream:
            final: Any = stream.get_final_response()
        assert final.output_text == "yes" and final.status == "completed" and final.completed_at is not None
        assert final.output[0].status == "completed"


def test_no_chunks_of_the_chat_api_and_no_end_marker(server: Server) -> None:
    body = {"model": "fake:1", "input": "hello", "stream": True, "max_output_tokens": 3}
    text = httpx.post(f"{server.url}/v1/responses", json=body).text
    assert "[DONE]" not in text and "chat.completion" not in text
    assert typed_events(text)[-1]["type"] == "response.incomplete"


def test_an_answer_without_a_word_is_an_empty_message(folder: Path) -> None:
    with running(folder, loop=FakeLoop(fake_info(), script=says([257]))) as server:
        answer = create(server, input="hello")
        assert answer.output_text == "" and answer.output[0].type == "message" and answer.status == "completed"


def test_chains(server: Server) -> None:
    first = create(server, input="one", instructions="short", max_output_tokens=2)
    second = create(server, input="two", previous_response_id=first.id, max_output_tokens=200)
    assert second.previous_response_id == first.id
    expected = f"[user] one\n[assistant] {first.output_text}\n[user] two\n[assistant] "
    assert second.usage.input_tokens == len(expected) and second.output_text.startswith(expected)
    third = create(server, input="three", previous_response_id=second.id, max_output_tokens=2)
    assert third.usage.input_tokens == len(expected) + 200 + len("\n[user] three\n[assistant] ")


def test_get_items_and_delete(server: Server) -> None:
    made = create(server, input="hello", max_output_tokens=3)
    client = server.client.responses
    assert client.retrieve(made.id).model_dump() == made.model_dump()
    items = client.input_items.list(made.id).data
    assert len(items) == 1 and items[0].to_dict()["content"] == [{"type": "input_text", "text": "hello"}]
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.cancel(made.id)
    client.delete(made.id)
    for call in (client.retrieve, client.delete, client.cancel):
        with pytest.raises(openai.NotFoundError, match="was deleted, or has given way") as error:
            call(made.id)
        assert error.value.code == "response_not_found"


def test_streamed_responses_are_stored_too(server: Server) -> None:
    *_, last = create(server, input="hello", max_output_tokens=3, stream=True)
    assert server.client.responses.retrieve(last.response.id).output_text == PROMPT[:3]


def test_what_is_not_stored_is_not_found(server: Server) -> None:
    made = create(server, input="hello", max_output_tokens=3, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError) as error:
        create(server, input="more", previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found" and error.value.param == "previous_response_id"


def test_responses_belong_to_their_key(folder: Path) -> None:
    with running(folder, api_keys=("one", "two")) as server:
        mine, other = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        made = mine.responses.create(model="fake:1", input="hello", max_output_tokens=2)
        assert mine.responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="fake:1", input="x", previous_response_id=made.id)


def stored(name: str, size: int) -> StoredResponse:
    return StoredResponse(name, "me", b"", [], [], size)


def test_the_store_keeps_to_its_bounds_and_drops_the_least_recently_used() -> None:
    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abc":
        store.put(stored(name, 30))
    store.get("a", "me")
    store.put(stored("d", 30))
    assert len(store) == 3 and store.num_bytes == 90
    with pytest.raises(RequestError, match="keeps the last 3"):
        store.get("b", "me")
    store.put(stored("e", 90))
    assert len(store) == 1 and store.num_bytes == 90
    store.put(stored("f", 101))
    assert store.get("e", "me").id == "e" and len(store) == 1
    store.delete("e", "me")
    assert store.num_bytes == 0


def test_a_server_that_stores_nothing_says_so(folder: Path) -> None:
    with running(folder, apis=Apis(max_stored_responses=0)) as server:
        made = create(server, input="hello", max_output_tokens=2)
        assert made.store is False
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            server.client.responses.retrieve(made.id)


def test_several_processes_store_nothing(folder: Path) -> None:
    """A chain's next request may come to another of them."""
    with running(folder, operations=Operations(num_fronts=2)) as server:
        assert create(server, input="hello", max_output_tokens=2).store is False


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input is empty"),
        ({"input": []}, "input", "input is empty"),
        ({"input": "a", "background": True}, "background", "background responses are not supported"),
        ({"input": "a", "truncation": "auto"}, "truncation", "shorten the input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"input": "a", "max_output_tokens": 5000}, "input", "context length is 4096"),
        ({"input": "a", "temperature": -1}, "temperature", "temperature"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", r"tools\[0\]: a tool of type 'web_search'"),
        ({"input": "a", "conversation": "c"}, "conversation", "not supported yet"),
        ({"input": [{"role": "boss", "content": "a"}]}, "input", r"input\[0\].role must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", r"input\[0\].content\[0\]"),
        ({"input": [{"type": "computer_call"}]}, "input", "items of type 'computer_call'"),
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id", "there is no response 'resp_x'"),
        ({"input": 5}, "input", "input"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_named_before_the_first_byte(
    server: Server, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"model": "fake:1", **fields, "stream": stream})
    assert answer.status_code == (404 if param in ("previous_response_id", "model") else 400)
    error = answer.json()["error"]
    assert error["param"] == param
    with pytest.raises(RequestError, match=message):
        raise RequestError(error["message"])


def test_unknown_fields_have_no_effect_and_are_told(server: Server) -> None:
    body = {"model": "fake:1", "input": "hello", "max_output_tokens": 2, "echo": True, "colour": "red", "top_k": 5}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert len(answer.json()["output"]) == 1
    assert answer.headers["x-headrace-warnings"] == "unknown fields: echo, colour"


def test_logprobs_of_the_text(server: Server) -> None:
    answer = create(
        server, input="hello", max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2
    )
    assert [entry.token for entry in answer.output[0].content[0].logprobs] == list(PROMPT[:3])
    assert len(answer.output[0].content[0].logprobs[0].top_logprobs) == 2
    events = list(create(server, input="hello", max_output_tokens=3, top_logprobs=1, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [delta.logprobs[0].token for delta in deltas] == list(PROMPT[:3])


def test_a_fault_in_the_middle_ends_in_one_failed_event(folder: Path) -> None:
    loop = FakeLoop(fake_info())
    with running(folder, loop=loop, step_s=0.01) as server:
        stream = create(server, input="hello", max_output_tokens=1000, stream=True)
        events: list[Any] = []
        for event in stream:
            events.append(event)
            if len(events) == 8:
                loop.fault = "the row has failed"
        assert [event.type for event in events if event.type.split(".")[1] in ("completed", "failed")] == [
            "response.failed"
        ]
        assert events[-1].response.error.message == "the row has failed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with pytest.raises(openai.InternalServerError, match="the row has failed"):
            create(server, input="hello")


# ---- reasoning and calls ---------------------------------------------------------------------

THOUGHT, SAID, CALL = "is it warm?", "Let me look.", {"name": "weather", "arguments": {"city": "Rome"}}
OUTPUT = f"<think>{THOUGHT}</think>{SAID}<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that thinks, says something and calls a tool."""
    loop = FakeLoop(fake_info(), script=says(OUTPUT.encode(), then=257))
    folder = tmp_path_factory.mktemp("caller")
    with running(
        folder,
        loop=loop,
        load_text=lambda: text_side(folder, template=TOOL_TEMPLATE),
        reasoning_parser="qwen3",
        tool_parser="hermes",
    ) as found:
        yield found


def test_reasoning_text_and_calls_are_items(caller: Server) -> None:
    answer = create(caller, input="hello", tools=[TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == THOUGHT and message.content[0].text == SAID
    assert call.name == "weather" and json.loads(call.arguments) == {"city": "Rome"} and call.call_id
    assert {item.status for item in answer.output} == {"completed"} and answer.status == "completed"
    assert answer.output_text == SAID and answer.tools[0].name == "weather"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_the_stream_of_items(caller: Server) -> None:
    with caller.client.responses.stream(model="fake:1", input="hello", tools=[TOOL]) as stream:
        events: list[Any] = list(stream)
        final: Any = stream.get_final_response()
    kinds = [key for key, _ in itertools.groupby(event.type for event in events)]
    text = ["response.output_item.added", "response.content_part.added", "response.{}.delta", "response.{}.done",
            "response.content_part.done", "response.output_item.done"]  # fmt: skip
    assert kinds == [
        "response.created",
        "response.in_progress",
        *(kind.format("reasoning_text") for kind in text),
        *(kind.format("output_text") for kind in text),
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    places: list[int] = [event.output_index for event in events if hasattr(event, "output_index")]
    assert places == sorted(places) and set(places) == {0, 1, 2}
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    joined = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert final.output[2].to_dict()["arguments"] == joined and json.loads(joined) == {"city": "Rome"}


def test_results_of_calls_go_back_with_the_items_or_with_the_chain(caller: Server) -> None:
    first = create(caller, input="hello", tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}
    items = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in first.output), result]
    whole = create(caller, input=items, tools=[TOOL])
    chained = create(caller, input=[result], tools=[TOOL], previous_response_id=first.id)
    assert whole.usage.input_tokens == chained.usage.input_tokens
    call_id = first.output[2].call_id
    expected = f"[user] hello\n[assistant] ({THOUGHT}) {SAID} weather#{call_id}\n[tool {call_id}] sunny\n[assistant] "
    assert whole.usage.input_tokens == len(expected)


def test_a_call_that_is_cut_off_is_incomplete(caller: Server) -> None:
    answer = create(caller, input="hello", tools=[TOOL], max_output_tokens=len(OUTPUT) - 20)
    assert answer.status == "incomplete"
    assert all(item.type != "function_call" or item.status == "incomplete" for item in answer.output)


def test_truncated_thinking_is_no_answer(caller: Server) -> None:
    answer = create(caller, input="hello", max_output_tokens=12)
    assert [item.type for item in answer.output] == ["reasoning"] and answer.output[0].status == "incomplete"
    assert answer.output_text == ""
