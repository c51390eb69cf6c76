"""The served OpenAPI document, and what a machine that has read it does to the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.front.fake import FakeLoop, fake_info
from headrace.server.openapi import BODIES, EXAMPLES

from .harness import MODEL, Server, running

NUM_EXAMPLES = 12
VALID: dict[str, Any] = {
    "messages": [{"role": "user", "content": "ab"}],
    "prompt": "ab",
    "input": "ab",
    "model": MODEL,
    "max_tokens": 3,
    "max_output_tokens": 3,
}
"""Put into every second body, so that its other fields are looked at."""
WITHOUT_BODY = {"/kv_cache_events", "/stop_profile", "/v1/responses/{id}/cancel"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A context in which random lengths end soon."""
    loop = FakeLoop(fake_info(max_seq_len=256, kv_num_blocks=64))
    with running(tmp_path_factory.mktemp("model"), loop=loop) as server:
        yield server


def test_the_document(small: Server) -> None:
    document = httpx.get(f"{small.url}/openapi.json").json()
    assert document["openapi"].startswith("3.")
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posts - WITHOUT_BODY == set(BODIES), "a route that takes a body says which"
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"] != path, f"{path} needs a docstring"
    assert document["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"] == [MODEL]


@pytest.mark.parametrize("path", EXAMPLES)
def test_its_examples_work(small: Server, path: str) -> None:
    if path == "/start_profile":
        return  # only where the operator wants it
    response = httpx.post(small.url + path, json=EXAMPLES[path], timeout=20)
    assert response.status_code == 200, response.text


def test_with_keys(folder: Path) -> None:
    with running(folder, api_keys=("one",)) as server:
        assert httpx.get(f"{server.url}/openapi.json").status_code == 401
        document = httpx.get(f"{server.url}/openapi.json", headers={"x-api-key": "one"}).json()
        paths = document["paths"]
        assert "security" in paths["/stats"]["get"] and "security" not in paths["/health"]["get"]


@pytest.mark.slow
def test_no_request_breaks_the_server(small: Server) -> None:
    """Schemathesis' bodies over all routes: whatever comes, it is no 5xx, and nothing stays behind."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    limits = settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None,
                      suppress_health_check=list(HealthCheck))  # fmt: skip
    statuses: dict[int, int] = {}
    turn = 0
    for found in schema.get_all_operations():

        def check(case: Any) -> None:
            nonlocal turn
            turn += 1
            if isinstance(case.body, dict) and turn % 2:
                fields = BODIES[case.operation.path].model_fields
                case.body |= {name: value for name, value in VALID.items() if name in fields}
            response = case.call(timeout=20)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code < 500, (case.as_curl_command(), response.text)

        given(case=found.ok().as_strategy())(limits(check))()
    assert statuses.get(200, 0) > 20, statuses
    assert not small.service.jobs and small.service.meter.num_open == 0
    assert httpx.get(f"{small.url}/health_generate").status_code == 200
