"""/tokenize, /detokenize and /render: the ids that a request would begin with, without running one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from .harness import Server, running

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "héllo"}]


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=20)


@pytest.mark.parametrize("path", ["/tokenize", "/_internal/tokenize"])
def test_there_and_back(server: Server, path: str) -> None:
    found = post(server, path, prompt="héllo").json()
    assert found == {"count": 7, "max_model_len": 4096, "tokens": [256, *"héllo".encode()]}
    plain = post(server, path, prompt="héllo", add_special_tokens=False).json()["tokens"]
    assert plain == found["tokens"][1:]
    assert post(server, "/detokenize", tokens=plain).json() == {"prompt": "héllo"}


def test_names_of_tokens(server: Server) -> None:
    assert post(server, "/tokenize", prompt="ab", return_token_strs=True).json()["token_strs"] == ["<bos>", "a", "b"]


def test_special_tokens_are_shown_unless_skipped(server: Server) -> None:
    whole, bare = (post(server, "/detokenize", tokens=[97, 257], skip_special_tokens=s).json() for s in (False, True))
    assert whole["prompt"].startswith("a") and len(whole["prompt"]) > 1 and bare["prompt"] == "a"


def test_what_is_rendered_is_what_is_computed(server: Server) -> None:
    rendered = post(server, "/render", messages=MESSAGES).json()
    assert rendered["prompt"] == "[system] be kind\n[user] héllo\n[assistant] "
    assert rendered["prompt_token_ids"] == list(rendered["prompt"].encode()) and rendered["count"] == 43
    assert post(server, "/tokenize", messages=MESSAGES).json()["tokens"] == rendered["prompt_token_ids"]
    answer = post(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=1, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == rendered["prompt_token_ids"]


def test_variables_of_the_template(server: Server) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "add_generation_prompt": False}
    rendered = post(server, "/render", **body, chat_template_kwargs={"suffix": "!"}).json()
    assert rendered["prompt"] == "[system] be kind\n[user] héllo\n!"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": 5}, "prompt", "prompt"),
        ("/detokenize", {}, "tokens", "tokens is required"),
        ("/detokenize", {"tokens": [258]}, "tokens", "token id 258 is out of the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "token id -1"),
        ("/render", {"messages": [{"role": "boss", "content": "a"}]}, "messages", "unknown role boss"),
        ("/render", {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs",
         "may not have a chat_template"),
    ],
)  # fmt: skip
def test_mistakes(server: Server, path: str, body: dict[str, Any], param: str, message: str) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


def test_another_model_is_not_found(server: Server) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/render", {"messages": MESSAGES}),
    ):
        assert post(server, path, model="other", **body).status_code == 404


def test_a_key_is_needed(folder: Path) -> None:
    with running(folder, api_keys=("secret",)) as server:
        for path in ("/tokenize", "/detokenize", "/render"):
            assert post(server, path, prompt="a").status_code == 401
