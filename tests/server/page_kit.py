"""What the tests of the page share: a tab that has nothing to complain about, and how a person uses it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from headrace.front.fake import Script, says
from headrace.server.service import Operations

from .browser import Browser, Page, executable
from .harness import MODEL, Server

needs_chromium = pytest.mark.skipif(
    executable() is None, reason="no Chromium here: install Debian's package, or set HEADRACE_TEST_BROWSER"
)


@contextlib.contextmanager
def opened(browser: Browser, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[Page]:
    """A tab that shows the page, and has nothing to complain about in the end."""
    page = browser.page(width=width, height=height, dark=dark)
    try:
        page.open(url)
        yield page
        assert page.complaints == []
        assert {url.split("/")[2] for url in page.urls if not url.startswith("data:")} == {url.split("/")[2]}
    finally:
        page.close()


def is_ready(page: Page) -> None:
    page.until(f"document.getElementById('model').textContent === {json.dumps(MODEL)}")


def is_answered(page: Page) -> None:
    page.until("document.querySelector('.turn.assistant .acts') && !document.querySelector('.turn.running')")


def ask(page: Page, text: str) -> None:
    page.type(text, into="#message")
    page.press("Enter")


def show(page: Page, view: str) -> None:
    page.run(f"location.hash = '{view}'")
    page.until(f"!document.getElementById('view-{view}').hidden")


def script_of(text: str) -> Script:
    return says(list(text.encode()), then=257)


def shown(**options: object) -> Operations:
    """What /server_info says of the server's options."""
    return Operations(shown=dict(options))


@contextlib.contextmanager
def loaded(server: Server, *, num_clients: int = 5) -> Iterator[None]:
    """Several clients that share a beginning ask one thing after the other."""
    done = threading.Event()

    def client(number: int) -> None:
        for turn in range(1000):
            if done.is_set():
                return
            prompt = f"You are a helpful assistant. Client {number % 3} asks again: what is {turn}?"
            body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "seed": turn}
            session.post(f"{server.url}/v1/completions", json=body).raise_for_status()

    with httpx.Client(timeout=20) as session, ThreadPoolExecutor(num_clients) as pool:
        futures = [pool.submit(client, number) for number in range(num_clients)]
        try:
            yield
        finally:
            done.set()
            for future in futures:
                future.result()
