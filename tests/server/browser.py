"""Headless Chromium, driven by its DevTools protocol over a pipe: no driver, no package, no port."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 20.0
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--no-sandbox",
    "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


def executable() -> str | None:
    """Of a Chromium of this machine; the variable HEADRACE_TEST_BROWSER names another one."""
    return os.environ.get("HEADRACE_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process. Messages are JSON, each ended by a zero byte, on file descriptors 3 and 4 of it."""

    def __init__(self, program: str, folder: str) -> None:
        down_read, self._down = os.pipe()
        self._up, up_write = os.pipe()

        def wire() -> None:
            os.dup2(down_read, 13)
            os.dup2(up_write, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            close_fds=False, preexec_fn=wire,
        )  # fmt: skip
        os.close(down_read)
        os.close(up_write)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        os.close(self._down)
        self._thread.join(5)
        os.close(self._up)

    def call(self, method: str, *, session: str = "", **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = queue.Queue()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._down, json.dumps(message).encode() + b"\0")
        try:
            found = answer.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(f"{method}: no answer") from None
        finally:
            del self._answers[number]
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    def page(self, *, width: int = 1280, height: int = 800, dark: bool = False, **changes: Any) -> Page:
        """A tab with a storage of its own. `changes`: of `Page.look`."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.look(width=width, height=height, dark=dark, **changes)
        return page

    def _read(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(self._up, 1 << 16):
                *messages, data = (data + chunk).split(b"\0")
                for message in messages:
                    self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if message["id"] in self._answers:
                self._answers[message["id"]].put(message)
        elif message.get("sessionId") in self._pages:
            self._pages[message["sessionId"]].hear(message["method"], message["params"])


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, and what the policy has blocked."""
        self.urls: list[str] = []
        """All that was asked for."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **params)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def look(self, *, width: int, height: int, dark: bool, still: bool = True, scale: float = 1.0) -> None:
        """The size in CSS pixels, and what the person prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 500,
        )  # fmt: skip
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        self.call("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in features.items()])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True,
                          allowUnsafeEvalBlockedByCSP=False)  # fmt: skip
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        return found["result"].get("value")

    def until(self, script: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for an expression to be true."""
        deadline_s = time.monotonic() + timeout_s
        while not self.run(f"(async () => !!(await ({script})))()"):
            assert time.monotonic() < deadline_s, f"never came true: {script}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def _middle(self, selector: str) -> dict[str, float]:
        return self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'nearest'}); const box = one.getClientRects()[0];"
            "return {x: box.left + box.width / 2, y: box.top + box.height / 2}; })()"
        )

    def hover(self, selector: str) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def click(self, selector: str) -> None:
        place = self._middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, text: str, *, into: str = "") -> None:
        if into:
            self.run(f"document.querySelector({json.dumps(into)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, code: int = 0) -> None:
        """A named key: Enter, Tab, Escape, ArrowRight, ..."""
        text = {"Enter": "\r"}.get(key, "")
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        common: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, code)}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def shot(self, file: Path) -> bytes:
        """A PNG of what is seen, also written to `file`."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return data


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; there has to be an `executable`."""
    program = executable()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="headrace-browser-", ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder)
        try:
            yield browser
        finally:
            browser.close()
