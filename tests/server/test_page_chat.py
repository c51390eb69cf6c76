"""Talking on the page, in headless Chromium: streams, log-probabilities, errors, keys, output that would be code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.front.fake import FakeLoop, fake_info, says
from headrace.types import Request

from .browser import Browser
from .harness import MODEL, Server, running
from .page_kit import ask, is_answered, is_ready, needs_chromium, opened, script_of, shown

pytestmark = needs_chromium

KEY = "a-key-for-the-page"
ANSWER = "A **bold** word and `code`.\n\n- one\n- two\n\n```python\nprint(1)\n```\nThe end, ünd so."
ATTACK = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=2</script><b>bold</b> '
    '[a](javascript:window.pwned=3) [b](https://example.com/" onclick="window.pwned=4) <svg/onload=window.pwned=5>'
)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Says ANSWER."""
    loop = FakeLoop(fake_info(), script=script_of(ANSWER))
    with running(tmp_path_factory.mktemp("model"), loop=loop, step_s=0.003) as server:
        yield server


class TestChat:
    def test_an_answer_streams_and_is_rendered(self, browser: Browser, talking: Server) -> None:
        with opened(browser, talking.url) as page:
            is_ready(page)
            assert MODEL in page.text(".empty")
            ask(page, "Tell me")
            page.until("document.querySelector('.turn.running .body').textContent.length > 3")
            first = page.text(".turn.assistant .body")
            is_answered(page)
            assert len(first) < len(page.text(".turn.assistant .body"))
            kinds = page.run("[...document.querySelector('.turn.assistant .body').children].map((one) => one.tagName)")
            assert kinds == ["P", "UL", "FIGURE", "P"]
            assert page.text(".body strong") == "bold" and page.text(".body p code") == "code"
            assert page.text(".body pre") == "print(1)" and page.text(".body figcaption") == "python"
            assert page.text(".body > :last-child") == "The end, ünd so."
            assert "tokens" in page.text(".facts") and "finished" in page.text(".facts")

    def test_hovering_a_token_shows_what_else_was_likely(self, browser: Browser, talking: Server, shots: Path) -> None:
        with opened(browser, talking.url) as page:
            is_ready(page)
            ask(page, "Tell me")
            is_answered(page)
            shown = page.run("[...document.querySelectorAll('.body .token')].map((one) => one.textContent).join('')")
            assert "bold" in shown and "print(1)" in shown and "ünd" in shown, "also in bold, in code, of several bytes"
            page.hover(".body strong .token")
            page.until("!document.getElementById('tip').hidden")
            tip = page.text("#tip")
            assert tip.startswith("b\n37%") and "−1.000" in tip, "the fake's second likeliest"
            assert page.run("document.querySelectorAll('#tip .options li:not(.rest)').length") == 5
            assert page.run("document.querySelectorAll('#tip .options code')[1].textContent") == "b"
            page.shot(shots / "tip.png")
            page.hover("#message")
            page.until("document.getElementById('tip').hidden")

    def test_tokens_by_keyboard(self, browser: Browser, talking: Server) -> None:
        with opened(browser, talking.url) as page:
            is_ready(page)
            ask(page, "Tell me")
            is_answered(page)
            page.run("document.querySelector('.turn.assistant .body').focus()")
            for _ in range(3):
                page.press("ArrowRight")
            page.until("!document.getElementById('tip').hidden")
            assert page.text(".token.marked") == "b"
            page.press("Escape")
            page.until("document.getElementById('tip').hidden")

    def test_stop(self, browser: Browser, folder: Path) -> None:
        loop = FakeLoop(fake_info(), script=says([97]))
        with running(folder, loop=loop, step_s=0.005) as server, opened(browser, server.url) as page:
            is_ready(page)
            ask(page, "Never end")
            page.until("document.querySelector('.turn.running .body').textContent.length > 3")
            assert page.run("document.activeElement.textContent") == "Stop"
            page.press("Enter")
            is_answered(page)
            assert "stopped by you" in page.text(".facts")
            deadline_s = time.monotonic() + 5
            while loop.running and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert loop.aborted, "the server has stopped its work"

    def test_what_is_set_is_what_is_asked(self, browser: Browser, folder: Path) -> None:
        asked: list[tuple[float, int, bytes]] = []

        def script(request: Request) -> Iterator[int]:
            asked.append((request.sampling.temperature, request.max_tokens, bytes(request.prompt)))
            return script_of("ok")(request)

        with running(folder, loop=FakeLoop(fake_info(), script=script)) as server, opened(browser, server.url) as page:
            is_ready(page)
            for name, text in (("temperature", "0.25"), ("max_tokens", "7")):
                page.run(f"document.getElementById('set-{name}').value = ''")
                page.type(text, into=f"#set-{name}")
            page.type("Be brief.", into="#set-system")
            ask(page, "Hello")
            is_answered(page)
            ask(page, "And then?")
            page.until("document.querySelectorAll('.acts').length === 2")
            page.open(f"{server.url}/?again")
            assert page.run("document.getElementById('set-temperature').value") == "0.25", "kept in this tab"
        assert [one[:2] for one in asked] == [(0.25, 7)] * 2
        assert asked[0][2].decode() == "[system] Be brief.\n[user] Hello\n[assistant] "
        assert asked[1][2].decode().endswith("[user] Hello\n[assistant] ok\n[user] And then?\n[assistant] ")

    def test_errors_are_told_in_words(self, browser: Browser, folder: Path, shots: Path) -> None:
        with running(folder) as server, contextlib.ExitStack() as stack:
            page = browser.page()
            stack.callback(page.close)
            page.open(server.url)
            is_ready(page)
            page.run("document.getElementById('set-max_tokens').value = ''")
            page.type("99999999", into="#set-max_tokens")
            ask(page, "Hello")
            is_answered(page)
            assert "ask for fewer" in page.text(".turn .error") and page.text(".acts") == "Try again"
            page.shot(shots / "error.png")


class TestSafety:
    def test_output_never_runs(self, browser: Browser, folder: Path, shots: Path) -> None:
        loop = FakeLoop(fake_info(), script=script_of(ATTACK))
        with running(folder, loop=loop) as server, opened(browser, server.url) as page:
            is_ready(page)
            ask(page, ATTACK)
            is_answered(page)
            assert page.text(".turn.user .body") == ATTACK
            body = page.text(".turn.assistant .body")
            assert '<img src=x onerror="window.pwned=1"><script>window.pwned=2</script><b>bold</b>' in body
            assert "<svg/onload=window.pwned=5>" in body
            assert page.run("window.pwned") is None
            assert page.run("document.querySelectorAll('.log :is(img, script, svg, b)').length") == 0
            links = page.run("[...document.querySelectorAll('.log a')].map((one) => one.href)")
            assert links == [] or all(link.startswith("https://") for link in links)
            assert not page.run("document.querySelectorAll('.log [onclick]').length")
            page.shot(shots / "attack.png")

    def test_the_policy_holds(self, browser: Browser, talking: Server) -> None:
        page = browser.page()
        try:
            page.open(talking.url)
            is_ready(page)
            tries = {
                "innerHTML": "document.body.innerHTML = '<b>x</b>'",
                "script": "Object.assign(document.createElement('script'), {text: 'window.pwned = 1'})",
                "eval": "new Function('window.pwned = 2')()",
            }
            for name, code in tries.items():
                caught = page.run(f"(() => {{ try {{ {code} }} catch (error) {{ return error.name }} }})()")
                assert caught in ("TypeError", "EvalError"), name
            elsewhere = "fetch('https://127.0.0.1:1/').then(() => 'sent', (error) => error.name)"
            assert page.run(elsewhere) == "TypeError"
            page.run(
                "document.body.append(Object.assign(document.createElement('img'), {src: 'https://127.0.0.1:1/x.png'}))"
            )
            blocked = " ".join(page.complaints)
            deadline_s = time.monotonic() + 5
            while "img-src" not in blocked and time.monotonic() < deadline_s:
                time.sleep(0.05)
                blocked = " ".join(page.complaints)
            assert "connect-src" in blocked and "img-src" in blocked
            assert page.run("window.pwned") is None
        finally:
            page.close()


class TestKeys:
    def test_the_key_is_asked_for_and_stays_in_the_tab(self, browser: Browser, folder: Path, shots: Path) -> None:
        loop = FakeLoop(fake_info(), script=script_of("yes"))
        with running(folder, loop=loop, api_keys=(KEY,), operations=shown(has_api_keys=True)) as server:
            page = browser.page()
            try:
                page.open(server.url)
                page.until("document.getElementById('key-dialog').open")
                page.shot(shots / "key.png")
                page.type("wrong", into="#key-input")
                page.press("Enter")
                page.until("document.getElementById('key-error').textContent.includes('did not accept')")
                assert page.run("sessionStorage.getItem('headrace.key')") is None
                page.run("document.getElementById('key-input').value = ''")
                page.type(KEY, into="#key-input")
                page.press("Enter")
                is_ready(page)
                page.until("!document.getElementById('key-dialog').open")
                ask(page, "Do you answer?")
                is_answered(page)
                assert page.text(".turn.assistant .body") == "yes"
                page.open(f"{server.url}/?again")
                is_ready(page)
                assert not page.run("document.getElementById('key-dialog').open")
                assert page.run("JSON.stringify(localStorage)") == "{}", "nothing is kept beyond the tab"
                assert all(KEY not in url for url in page.urls)
                assert all("401" in complaint for complaint in page.complaints), "what was refused before, and no more"
                page.click("#key-button")
                page.click("#key-forget")
                page.until("document.getElementById('message').disabled")
                assert page.run("sessionStorage.getItem('headrace.key')") is None
            finally:
                page.close()
