"""The page's files and the route of its map: what they say, and to whom."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.engine.fake_memory import full_group, window_group
from headrace.server.page import FOLDER, HEADERS, PAGE_PATHS
from headrace.server.service import Operations

from .harness import Server, running
from .loop_process import LoopProcess, SlowEngine

KEYS = ("key-of-one", "key-of-two")
CLIENT = httpx.Client(timeout=20)


def get(server: Server, path: str, *, key: str = "") -> httpx.Response:
    return CLIENT.get(server.url + path, headers={"authorization": f"Bearer {key}"} if key else {})


def map_of(server: Server, *, key: str = "") -> dict[str, Any]:
    """One that is made now."""
    time.sleep(1.05)
    response = get(server, "/kv_cache/map", key=key)
    assert response.status_code == 200, response.text
    return response.json()


def ask(server: Server, prompt: str, *, key: str = "", **body: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **body}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    assert CLIENT.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200


def engine() -> SlowEngine:
    return SlowEngine(vocab_size=258, groups=(full_group(), window_group(16)), lateness=0.0)


def real_loop() -> LoopProcess:
    return LoopProcess(engine=engine(), kv_cache_config={"max_tokens": 400, "host_cache_size": 1 << 13})


class TestFiles:
    def test_every_file_is_served_with_the_policy(self, server: Server) -> None:
        assert "/" in PAGE_PATHS and len(PAGE_PATHS) == len(list(FOLDER.iterdir()))
        for path in PAGE_PATHS:
            response = get(server, path)
            assert response.status_code == 200 and response.content
            for name, value in HEADERS.items():
                assert response.headers[name] == value
        assert get(server, "/").headers["content-type"] == "text/html; charset=utf-8"
        assert get(server, "/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"

    def test_the_policy_allows_neither_inline_code_nor_other_sites(self, server: Server) -> None:
        policy = dict(part.split(" ", 1) for part in get(server, "/").headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
        for file in FOLDER.iterdir():
            text = file.read_text()
            foreign = set(re.findall(r"https?://[^\s\"'`/)]+", text)) - {"http://www.w3.org"}
            assert not {url for url in foreign if "." in url}, f"{file.name} names another site"
            assert "innerHTML" not in text and "document.write" not in text and "eval(" not in text
        html = (FOLDER / "index.html").read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", html)

    def test_a_file_that_is_known_is_not_sent_again(self, server: Server) -> None:
        tag = get(server, "/page/app.js").headers["etag"]
        again = CLIENT.get(f"{server.url}/page/app.js", headers={"if-none-match": tag})
        assert again.status_code == 304 and not again.content

    @pytest.mark.parametrize("path", ["/page/nothing.js", "/page/..%2fpage.py", "/page/%2e%2e/page.py", "/page/"])
    def test_nothing_else_is_served(self, server: Server, path: str) -> None:
        response = get(server, path)
        assert response.status_code == 404 and b"import" not in response.content

    def test_off(self, tmp_path: Path) -> None:
        with running(tmp_path, operations=Operations(page=False)) as server:
            assert {get(server, path).status_code for path in PAGE_PATHS} == {404}
            assert get(server, "/kv_cache/map").status_code == 200

    def test_the_files_are_open_and_the_data_is_not(self, tmp_path: Path) -> None:
        with running(tmp_path, api_keys=KEYS) as server:
            assert {get(server, path).status_code for path in PAGE_PATHS} == {200}
            for path in ("/kv_cache/map", "/server_info", "/metrics", "/stats", "/page/other", "/page", "//"):
                assert get(server, path).status_code == 401, path
            assert get(server, "/kv_cache/map", key=KEYS[0]).status_code == 200

    def test_off_with_keys(self, tmp_path: Path) -> None:
        with running(tmp_path, api_keys=KEYS, operations=Operations(page=False)) as server:
            assert get(server, "/").status_code == 401


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), runtime=real_loop()) as found:
        yield found


class TestMap:
    def test_it_agrees_with_the_statistics(self, looped: Server) -> None:
        for number in range(6):
            ask(looped, f"the same beginning of all, and then {number}")
        found = map_of(looped)
        stats = get(looped, "/stats").json()["kvCacheStats"]
        device = [pool for pool in found["pools"] if pool["tier"] == "device"]
        assert [pool["group"] for pool in device] == [0, 1] and device[1]["window"] == 16
        assert any(pool["tier"] == "host" for pool in found["pools"])
        for name, key in (("used", "usedNumBlocks"), ("cached", "cachedNumBlocks"), ("free", "freeNumBlocks")):
            assert sum(pool[f"num_{name}"] for pool in device) == stats[key], name
        for pool in found["pools"]:
            assert sum(pool["used"]) == pool["num_used"] and sum(pool["cached"]) == pool["num_cached"]
        assert stats["cachedNumBlocks"] > 0

    def test_prefixes_have_no_text_by_default(self, looped: Server) -> None:
        ask(looped, "a secret that nobody may read")
        found = map_of(looped)
        assert found["has_text"] is False and len(found["prefixes"]) > 1
        assert all(one["text"] is None and one["tokens"] == [] for one in found["prefixes"])

    def test_the_engine_is_asked_once_a_second(self, looped: Server) -> None:
        first = map_of(looped)
        ask(looped, "something new that changes the map")
        assert get(looped, "/kv_cache/map").json() == first
        assert map_of(looped) != first

    def test_while_it_loads(self, tmp_path: Path) -> None:
        with running(tmp_path, ready_after=threading.Event(), wait=False) as server:
            response = get(server, "/kv_cache/map")
            assert response.status_code == 503 and response.json()["error"]["code"] == "model_loading"


def test_texts_are_those_of_the_key_that_asks(tmp_path: Path) -> None:
    operations = Operations(show_cached_text=True)
    with running(
        tmp_path, runtime=real_loop(), api_keys=KEYS, cache_salt_from_api_key=True, operations=operations
    ) as server:
        ask(server, "the plans of the first", key=KEYS[0])
        ask(server, "what the second thinks", key=KEYS[1])
        for key, mine, other in ((KEYS[0], "the plans", "second"), (KEYS[1], "what the", "plans")):
            found = map_of(server, key=key)
            told = " ".join(one["text"] or "" for one in found["prefixes"])
            assert mine in told and other not in told
            assert found["is_own_only"] and found["num_hidden"] == 1
            assert all(one["is_own"] for one in found["prefixes"])


def test_texts_of_salted_requests_are_not_shown(tmp_path: Path) -> None:
    with running(tmp_path, runtime=real_loop(), operations=Operations(show_cached_text=True)) as server:
        ask(server, "for everybody to see")
        ask(server, "only for who knows the salt", cache_salt="a secret")
        found = map_of(server)
        told = " ".join(one["text"] or "" for one in found["prefixes"])
        assert "for everybody" in told and "only for" not in told
        salted = [one for one in found["prefixes"] if one["is_salted"]]
        assert len(salted) > 1 and "a secret" not in repr(found)
