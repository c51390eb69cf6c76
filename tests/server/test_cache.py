"""What HTTP clients may say about the KV cache, and its routes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from headrace import wire
from headrace.config.errors import ConfigError
from headrace.config.serving import ServerOptions
from headrace.front.errors import RequestError
from headrace.front.fake import FakeLoop, fake_info
from headrace.server import service as service_module
from headrace.server.tenancy import Caller, salt_of
from headrace.types import Request, Retention, RetentionRange

from .harness import Server, running

HI: Any = [{"role": "user", "content": "hello"}]
PATHS = ("completions", "chat/completions")


class Listening(FakeLoop):
    """Remembers the requests."""

    def __init__(self, **info: Any) -> None:
        super().__init__(fake_info(**info), script=self.note)
        self.seen: list[Request] = []

    def note(self, request: Request) -> Iterator[int]:
        self.seen.append(request)
        return itertools.repeat(97)


def call(server: Server, path: str, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"messages": HI} if path.startswith("chat") else {"prompt": "hello"}
    return httpx.post(f"{server.url}/v1/{path}", json={**prompt, "max_tokens": 1, **body}, headers=headers, timeout=20)


def post(server: Server, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", json=body, headers=headers, timeout=20)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


class TestFields:
    @pytest.mark.parametrize("path", PATHS)
    def test_they_reach_the_runtime(self, folder: Path, path: str) -> None:
        loop = Listening()
        keep = {
            "token_range_retention_configs": [{"token_start": 0, "token_end": 3, "priority": 90, "duration_ms": 500}],
            "decode_retention_priority": 1,
        }
        with running(folder, loop=loop) as server:
            session = {"x-session-id": "header"}
            assert call(server, path, kv_cache_retention_config=keep, cache_salt="s").status_code == 200
            assert call(server, path, conversation_params={"conversation_id": "talk"}, headers=session).is_success
            assert call(server, path, headers=session).is_success
            assert call(server, path, headers={"x-session-id": ""}).is_success
            assert call(server, path, kv_cache_retention_config=None, conversation_params=None).is_success
        first, *others = loop.seen
        assert first.cache_salt == "s"
        assert first.retention == Retention(ranges=(RetentionRange(0, 3, 90, 0.5),), decode_priority=1)
        assert [request.conversation for request in others] == ["talk", "header", "", ""]
        assert all(request.retention is None and not request.cache_salt for request in others)

    @pytest.mark.parametrize(
        ("fields", "param", "problem"),
        [
            ({"cache_salt": "x" * 1_000_000}, "cache_salt", "1,000,000 bytes"),
            ({"cache_salt": ""}, "cache_salt", "empty"),
            ({"cache_salt": 3}, "cache_salt", "string"),
            ({"kv_cache_retention_config": 3}, "kv_cache_retention_config", "object"),
            ({"kv_cache_retention_config": {"nonsense": 1}}, "kv_cache_retention_config", "nonsense"),
            (
                {"kv_cache_retention_config": {"decode_retention_priority": 101}},
                "kv_cache_retention_config",
                "decode_retention_priority",
            ),
            (
                {
                    "kv_cache_retention_config": {
                        "token_range_retention_configs": [{"token_start": 0, "token_end": 999, "priority": 1}]
                    }
                },
                "kv_cache_retention_config",
                "token_end is 999",
            ),
            ({"conversation_params": {"conversation_id": ""}}, "conversation_params", "empty"),
            ({"conversation_params": {"conversation_id": "x" * 2000}}, "conversation_params", "2,000 bytes"),
            ({"conversation_params": "talk"}, "conversation_params", ""),
        ],
    )
    @pytest.mark.parametrize("path", PATHS)
    def test_bad_ones_are_refused(
        self, server: Server, path: str, fields: dict[str, Any], param: str, problem: str
    ) -> None:
        response = call(server, path, **fields)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param
        assert param in error["message"] and problem in error["message"] and len(error["message"]) < 300

    def test_a_session_that_is_too_long(self, server: Server) -> None:
        response = call(server, "completions", headers={"x-session-id": "x" * 2000})
        assert response.status_code == 400 and response.json()["error"]["param"] == "x-session-id"


class TestSalts:
    def test_a_client_can_not_have_another_ones_salt(self) -> None:
        mine = salt_of(Caller("one"), None, from_api_key=True)
        assert salt_of(Caller("one"), None, from_api_key=True) == mine, "the same in another life"
        others = [
            salt_of(Caller("two"), None, from_api_key=True),
            salt_of(Caller("two"), mine, from_api_key=True),
            salt_of(Caller("one"), "a", from_api_key=True),
            salt_of(Caller("onea"), None, from_api_key=True),
            salt_of(Caller("two"), "a", from_api_key=True),
            salt_of(Caller(), None, from_api_key=True),
        ]
        assert len({mine, *others}) == 1 + len(others)
        assert "one" not in mine
        assert salt_of(Caller("one"), "a", from_api_key=False) == "a"
        assert salt_of(Caller("one"), None, from_api_key=False) == ""

    def test_a_salt_is_checked_before_it_is_mixed_in(self) -> None:
        for given in ("", "x" * 2000):
            with pytest.raises(RequestError, match="cache_salt"):
                salt_of(Caller("one"), given, from_api_key=True)

    def test_without_keys_there_is_nothing_to_derive_from(self) -> None:
        with pytest.raises(ConfigError, match=r"cache_salt_from_api_key.*--api_key"):
            ServerOptions(cache_salt_from_api_key=True)
        ServerOptions(cache_salt_from_api_key=True, api_keys=[SecretStr("a")])

    def test_over_http(self, folder: Path) -> None:
        loop = Listening()
        with running(folder, loop=loop, api_keys=("one", "two"), cache_salt_from_api_key=True) as server:
            for path in PATHS:
                for name, salt in (("one", None), ("two", None), ("two", "a"), ("one", "a"), ("one", None)):
                    assert call(server, path, headers=key(name), cache_salt=salt).status_code == 200
            stolen = loop.seen[0].cache_salt
            assert call(server, "completions", headers=key("two"), cache_salt=stolen).status_code == 200
            assert post(server, "kv_cache/pin", {"name": "p", "prompt": "x"}, headers=key("one")).status_code == 200
        salts = [request.cache_salt for request in loop.seen]
        assert salts[:5] == salts[5:10], "both APIs have the same"
        assert salts[0] == salts[4] == salts[11] and len(set(salts[:4])) == 4
        assert salts[10] not in salts[:10]


class TestEvents:
    def test_reading_drains(self, folder: Path) -> None:
        loop = Listening()
        loop.kv_events = [{"event_id": 0, "data": {"type": "created"}}]
        with running(folder, loop=loop) as server:
            response = post(server, "kv_cache_events")
            assert response.json() == [{"event_id": 0, "data": {"type": "created"}}]
            assert response.headers["content-type"] == "application/json"
            assert post(server, "kv_cache_events").json() == []

    @pytest.mark.parametrize(
        ("info", "remedy"), [({"kv_event_buffer": 0}, "event_buffer_max_size"), ({"block_reuse": False}, "block_reuse")]
    )
    def test_no_events_are_an_error_with_the_remedy(self, folder: Path, info: dict[str, Any], remedy: str) -> None:
        with running(folder, loop=Listening(**info)) as server:
            response = post(server, "kv_cache_events")
            assert response.status_code == 400 and remedy in response.json()["error"]["message"]

    def test_an_engine_that_gives_no_answer(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Deaf(Listening):
            deaf = True

            def receive(self, message: Any) -> Any:
                answer = super().receive(message)
                if self.deaf and type(message).__name__ == "GetKvEvents":
                    time.sleep(0.4)
                return answer

        monkeypatch.setattr(service_module, "ASK_TIMEOUT_S", 0.1)
        loop = Deaf()
        loop.kv_events = [{"event_id": 0}]
        with running(folder, loop=loop) as server:
            response = post(server, "kv_cache_events")
            assert response.status_code == 503 and response.json()["error"]["code"] == "no_answer"
            time.sleep(0.6)
            loop.deaf = False
            monkeypatch.setattr(service_module, "ASK_TIMEOUT_S", 10)
            loop.kv_events = [{"event_id": 1}]
            assert post(server, "kv_cache_events").json() == [{"event_id": 1}], "the late answer is not taken for it"
            assert httpx.get(f"{server.url}/kv_cache/pins").json()["data"] == []

    def test_while_the_model_loads(self, folder: Path) -> None:
        with running(folder, ready_after=threading.Event(), wait=False) as server:
            for path in ("kv_cache_events", "kv_cache/unpin"):
                assert post(server, path, {"name": "a"}).status_code == 503
            for path in ("kv_cache/pins", "server_info"):
                assert httpx.get(f"{server.url}/{path}").status_code == 503

    def test_nobody_waits_for_an_engine_that_has_failed(self, folder: Path) -> None:
        loop = Listening()
        with running(folder, loop=loop) as server:
            server.runtime.kill(0)
            with ThreadPoolExecutor() as pool:
                asking = pool.submit(post, server, "kv_cache_events")
                time.sleep(0.2)
                server.call(lambda: server.service.fail(wire.Failed("gone")))
                response = asking.result(5)
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_failed"


class TestPins:
    def test_a_pin_and_its_end(self, folder: Path) -> None:
        loop = Listening()
        with running(folder, loop=loop) as server:
            assert httpx.get(f"{server.url}/kv_cache/pins").json() == {"object": "list", "data": []}
            first = post(server, "kv_cache/pin", {"name": "a", "prompt": [1] * 40, "cache_salt": "s"})
            assert first.json()["data"] == [{"name": "a", "num_tokens": 40, "num_blocks": 2}]
            second = post(server, "kv_cache/pin", {"name": "b", "messages": HI}).json()["data"]
            assert [pin["name"] for pin in second] == ["a", "b"]
            assert bytes(loop.seen[1].prompt).decode() == "[user] hello\n", "no turn is opened"
            assert [(request.pin, request.cache_salt, request.max_tokens) for request in loop.seen] == [
                ("a", "s", 1),
                ("b", "", 1),
            ]
            assert [pin["name"] for pin in post(server, "kv_cache/unpin", {"name": "a"}).json()["data"]] == ["b"]
            gone = post(server, "kv_cache/unpin", {"name": "a"})
            assert gone.status_code == 404 and gone.json()["error"]["param"] == "name"

    def test_over_the_cap(self, folder: Path) -> None:
        loop = Listening()
        loop.max_pinned_tokens = 10
        with running(folder, loop=loop) as server:
            response = post(server, "kv_cache/pin", {"name": "a", "prompt": [1] * 40})
            assert response.status_code == 409 and "10 tokens" in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"prompt": "x"}, "name"),
            ({"name": "", "prompt": "x"}, "name"),
            ({"name": "x" * 2000, "prompt": "x"}, "name"),
            ({"name": 3, "prompt": "x"}, "name"),
            ({"name": "a"}, "prompt"),
            ({"name": "a", "prompt": "x", "messages": HI}, "prompt"),
            ({"name": "a", "prompt": []}, "prompt"),
            ({"name": "a", "prompt": [999]}, "prompt"),
            ({"name": "a", "prompt": [["x"]]}, "prompt"),
            ({"name": "a", "messages": [{"role": "nobody", "content": "x"}]}, "messages"),
            ({"name": "a", "prompt": "x", "cache_salt": "x" * 2000}, "cache_salt"),
        ],
    )
    def test_bad_ones_are_refused(self, server: Server, body: Any, param: str) -> None:
        response = post(server, "kv_cache/pin", body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text

    def test_bad_unpins(self, server: Server) -> None:
        assert post(server, "kv_cache/unpin", {}).json()["error"]["param"] == "name"
        assert post(server, "kv_cache/unpin", []).status_code == 400

    def test_without_reuse(self, folder: Path) -> None:
        with running(folder, loop=Listening(block_reuse=False)) as server:
            for path in ("pin", "unpin"):
                response = post(server, f"kv_cache/{path}", {"name": "a", "prompt": "x"})
                assert response.status_code == 400 and "enable_block_reuse" in response.text


def test_the_info_tells_what_is_reused(folder: Path) -> None:
    with running(folder, loop=Listening()) as server:
        found = httpx.get(f"{server.url}/server_info").json()
        assert found["model"] == "fake"
        assert found["kv_cache"]["block_reuse"] is True
        assert found["kv_cache"]["reuse_granularity"] == 1
        assert found["kv_cache"]["salt_from_api_key"] is False
