"""The fields of each API's own: whatever is no value of theirs is a 400 that names them, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .field_kit import BODIES, CHAT, COMPLETIONS, MESSAGES, NO_INT, RESPONSES, Served

COUNT = (*NO_INT, "-1")
NO_STOP = ("5", '[""]', "[5]", "{}")
BAD: dict[str, dict[str, tuple[str, ...]]] = {
    CHAT: {
        "messages": ("5", "[]", "{}", "[5]", '[{"role": 5}]', '[{"role": "user", "content": 5}]', "null"),
        "max_tokens": (*COUNT, "0"),
        "max_completion_tokens": (*COUNT, "0"),
        "stop": (*NO_STOP, '""'),
        "stream_options": ("5", '"x"'),
        "logprobs": ("5", '"x"'),
        "top_logprobs": (*COUNT, "21", "5"),
        "tools": ("5", "{}", "[5]", '[{"type": "function"}]', '[{"type": "function", "function": {"name": "a b"}}]'),
        "tool_choice": ("5", '"sometimes"', "{}", '"required"'),
        "parallel_tool_calls": ("5", '"x"'),
        "add_generation_prompt": ("5",),
        "chat_template": ("5", '"x"'),
        "thinking": ("5", '{"type": "x"}', '{"effort": "x"}'),
        "stop_in_reasoning": ("5",),
        "detokenize": ("5",),
        "model": ("5",),
    },
    COMPLETIONS: {
        "prompt": ("5", "[]", "{}", "[[]]", '[5, "a"]', "[-1]", "[99999]", "[1.5]", "null", "true", "[[5], []]"),
        "max_tokens": COUNT,
        "echo": ("5", '"x"'),
        "logprobs": (*NO_INT, "-1", "21"),
        "suffix": ('"x"', "5"),
        "stop": (*NO_STOP, '""'),
    },
    RESPONSES: {
        "input": ("5", "[]", "{}", "[5]", '[{"type": "x"}]', "null"),
        "instructions": ("5", "[]"),
        "previous_response_id": ("5", "[]"),
        "store": ("5", '"x"'),
        "background": ("5", "true"),
        "metadata": ("5", '{"a": 5}'),
        "max_output_tokens": (*COUNT, "0"),
        "tools": ("5", "[5]", '[{"type": "web_search"}]', '[{"type": "function"}]'),
        "tool_choice": ("5", '"sometimes"', '{"type": "x"}', '"required"'),
        "parallel_tool_calls": ("5",),
        "text": ("5", '{"format": 5}', '{"format": {"type": "x"}}', '{"format": {"type": "json_schema"}}',
                 '{"format": {"type": "json_schema", "name": "a"}}', '{"verbosity": "low"}'),
        "reasoning": ("5", '{"effort": 5}', '{"effort": "x"}'),
        "include": ("5", "[5]", '"x"'),
        "top_logprobs": (*COUNT, "21"),
        "truncation": ("5", '"auto"'),
        "stop": NO_STOP,
        "model": ("5",),
    },
    MESSAGES: {
        "messages": ("5", "[]", "[5]", '[{"role": "user", "content": 5}]', "null"),
        "max_tokens": (*COUNT, "0", "null"),
        "system": ("5", "[5]", '[{"type": "image"}]'),
        "stop_sequences": ("5", '"x"', "[5]", '[""]'),
        "tools": ("5", "[5]", '[{"type": "x"}]', "[{}]"),
        "tool_choice": ("5", '{"type": "x"}', '{"type": "any"}'),
        "thinking": ("5", '{"type": "x"}', '{"type": "enabled"}'),
        "output_config": ("5", '{"format": 5}', '{"effort": 5}', '{"effort": "x"}', '{"format": {"type": "text"}}',
                          '{"format": {"type": "json_schema", "schema": {"type": "x"}}}'),
        "model": ("5",),
    },
}  # fmt: skip


def post(served: Served, client: httpx.Client, api: str, name: str, value: str, *, stream: bool) -> httpx.Response:
    body: dict[str, Any] = {key: given for key, given in BODIES[api].items() if key != name}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    text = json.dumps({**body, "stream": stream})
    return client.post(served.server.url + api, content=f'{text[:-1]}, "{name}": {value}}}')


@pytest.mark.parametrize(("api", "name"), [(api, name) for api, rows in BAD.items() for name in rows])
def test_a_bad_value_is_named(served: Served, client: httpx.Client, api: str, name: str) -> None:
    for value in BAD[api][name]:
        for stream in (False, True):
            response = post(served, client, api, name, value, stream=stream)
            assert response.status_code == 400, (value, response.text[:300])
            error = response.json()["error"]
            assert error["param"].split(".")[0] == name and error["message"], (value, error)
    assert not served.requests, "nothing has reached the engine"


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("value", ['"yes"', "1", "[]"])
def test_whether_to_stream(served: Served, client: httpx.Client, api: str, value: str) -> None:
    text = json.dumps(BODIES[api])
    response = client.post(served.server.url + api, content=f'{text[:-1]}, "stream": {value}}}')
    assert response.status_code == 400 and response.json()["error"]["param"] == "stream"
