"""The page's figures, maps and looks, in headless Chromium."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from headrace.engine.fake_memory import full_group, window_group
from headrace.server.service import Apis

from .browser import Browser, Page
from .harness import Server, running
from .loop_process import LoopProcess, SlowEngine
from .page_kit import is_ready, loaded, needs_chromium, opened, show, shown

pytestmark = needs_chromium

LOOKS = [(width, height, dark) for width, height in ((1280, 800), (375, 740)) for dark in (False, True)]
CONTRAST = """(() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = (name) => {
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
      .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  };
  const ratio = ([one, other]) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  return PAIRS.map((pair) => [...pair, ratio(pair)]);
})()"""
PAIRS = [
    (ink, paper) for paper in ("--bg", "--surface", "--sunken") for ink in ("--text", "--muted", "--accent", "--bad")
] + [("--on-accent", "--accent"), ("--bad", "--bad-soft"), ("--text", "--warn-soft"), ("--accent", "--accent-soft")]
UNNAMED = """[...document.querySelectorAll("button, input, select, textarea, [role=img]")].filter((one) =>
  !one.closest("[hidden]") && !one.getAttribute("aria-label") && !one.labels?.length && !one.textContent.trim()
).map((one) => one.outerHTML)"""


@pytest.fixture(scope="module")
def engine() -> SlowEngine:
    made = SlowEngine(vocab_size=258, groups=(full_group(), window_group(64)), lateness=0.0, tokens_per_block=8)
    made.step_s = 0.04
    return made


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory, engine: SlowEngine) -> Iterator[Server]:
    """The real loop and cache."""
    runtime = LoopProcess(
        engine=engine, max_batch_size=4, kv_cache_config={"max_tokens": 6400, "host_cache_size": 1 << 14}
    )
    with running(tmp_path_factory.mktemp("model"), runtime=runtime) as server:
        yield server


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same, and nobody asks it anything."""
    runtime = LoopProcess(
        engine=SlowEngine(groups=(full_group(), window_group(64)), tokens_per_block=8),
        kv_cache_config={"max_tokens": 6400, "host_cache_size": 1 << 14},
    )
    with running(tmp_path_factory.mktemp("model"), runtime=runtime) as server:
        yield server


class TestLive:
    def test_charts_move_under_load(self, browser: Browser, looped: Server) -> None:
        with opened(browser, f"{looped.url}/#live") as page:
            is_ready(page)
            page.until("document.querySelector('.tiles b').textContent !== '–'")
            page.until("document.querySelectorAll('.frame .vacant')[1].innerText.includes('Send one from Chat')")
            with loaded(looped):
                page.until("Number(document.querySelector('.tiles b').textContent.replace(',', '')) > 20")
                paths = "[...document.querySelectorAll('.path')].map((one) => one.getAttribute('points')).join()"
                before = page.run(paths)
                page.until(f"{paths} !== {json.dumps(before)}")
                page.until("document.querySelectorAll('.tile b')[2].textContent === '4'")
                page.until("Number(document.querySelectorAll('.tile b')[3].textContent) > 0")
                page.until("/\\d m?s/.test(document.querySelectorAll('.tile b')[1].textContent)")
                label = page.run("document.querySelector('.plot').getAttribute('aria-label')")
                assert label.startswith("Tokens per second, the last 120 seconds; now Output ")

    def test_counts_have_no_halves(self, browser: Browser, quiet: Server) -> None:
        """Where the most is 5, the axis ends at 10: it has a tick at its middle."""
        with opened(browser, quiet.url) as page:
            is_ready(page)
            script = """(async () => {
              const { Chart } = await import("/page/chart.js");
              const series = [{name: "a", line: 1}];
              const chart = new Chart({title: "t", note: "", series, format: String, whole: true});
              chart.element.style.width = "400px";
              document.body.append(chart.element);
              chart.show([[[-1, 5]]], "");
              await new Promise((done) => setTimeout(done, 200));
              return [...chart.element.querySelectorAll(".tick[text-anchor=end]")].map((one) => one.textContent);
            })()"""
            assert page.run(script)[:3] == ["0", "5", "10"]

    def test_no_scrape_while_nobody_looks(self, browser: Browser, quiet: Server) -> None:
        with opened(browser, quiet.url) as page:
            is_ready(page)
            page.run("Object.defineProperty(document, 'hidden', {get: () => true})")
            time.sleep(1.2)
            before = len(page.urls)
            time.sleep(1.5)
            assert len(page.urls) == before


class TestCache:
    def test_the_map_agrees_with_the_statistics(self, browser: Browser, looped: Server) -> None:
        with opened(browser, f"{looped.url}/#cache") as page:
            is_ready(page)
            with loaded(looped):
                time.sleep(1)
            counts = (
                "[...document.querySelectorAll('.pool')].filter((one) => one.textContent.startsWith('Device'))"
                ".map((one) => Number(one.querySelector('[data-state={}]').dataset.count)).reduce((a, b) => a + b, 0)"
            )
            stats = httpx.get(f"{looped.url}/stats").json()["kvCacheStats"]
            assert stats["usedNumBlocks"] == 0 and stats["cachedNumBlocks"] > 0
            for state, key in (("cached", "cachedNumBlocks"), ("free", "freeNumBlocks"), ("total", "maxNumBlocks")):
                page.until(f"{counts.format(state)} === {stats[key]}")
            assert page.run("document.querySelectorAll('.pool').length") == 4, "two groups on two tiers"
            assert page.run("document.querySelectorAll('.prefix').length") > 3
            assert "--show_cached_text" in page.text(".tree-box")
            page.hover(".pool canvas")
            page.until("/^Block/.test(document.querySelector('.under').textContent)")

    def test_empty(self, browser: Browser, quiet: Server) -> None:
        with opened(browser, f"{quiet.url}/#cache") as page:
            page.until("document.querySelector('.tree-box').textContent.includes('Nothing is cached yet')")


class TestSetup:
    def test_settings_are_found(self, browser: Browser, looped: Server) -> None:
        with opened(browser, f"{looped.url}/#setup") as page:
            page.until("document.querySelectorAll('.settings-table tr').length > 100")
            page.type("kv_cache_config.host", into="#filter")
            page.until("document.querySelectorAll('.settings-table tbody tr').length === 1")
            assert page.text(".settings-table tbody tr").split() == ["kv_cache_config.host_cache_size", "16384"]
            page.type("nothing", into="#filter")
            page.until("document.querySelector('#view-setup').textContent.includes('clear the filter')")


class TestState:
    def test_a_page_that_is_there_before_the_model(self, browser: Browser, folder: Path, shots: Path) -> None:
        ready = threading.Event()
        with running(folder, ready_after=ready, wait=False) as server:
            page = browser.page()
            try:
                page.open(server.url)
                page.until("document.getElementById('notice').textContent.startsWith('The model is loading')")
                assert page.run("document.getElementById('message').disabled")
                page.shot(shots / "loading.png")
                ready.set()
                is_ready(page)
                page.until("document.getElementById('notice').hidden && !document.getElementById('message').disabled")
            finally:
                page.close()

    def test_embeddings_only(self, browser: Browser, folder: Path) -> None:
        operations = shown(embeddings_only=True)
        apis = Apis(embeddings_only=True)
        with running(folder, apis=apis, operations=operations) as server, opened(browser, server.url) as page:
            is_ready(page)
            page.until("document.getElementById('message').placeholder.includes('embeddings only')")

    def test_the_theme_is_kept(self, browser: Browser, quiet: Server) -> None:
        with opened(browser, quiet.url) as page:
            is_ready(page)
            background = "getComputedStyle(document.body).backgroundColor"
            light = page.run(background)
            page.click("#theme-button")
            dark = page.run(background)
            assert dark != light
            page.open(f"{quiet.url}/?again")
            assert page.run(background) == dark


def look_at_all(page: Page, width: int, keep: Callable[[str], Path]) -> None:
    """Nothing is wider than the screen, every control has a name; with pictures to look at."""
    for view, is_there in VIEWS.items():
        show(page, view)
        page.until(is_there)
        page.shot(keep(view))
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(UNNAMED) == []


VIEWS = {
    "chat": "document.querySelector('.settings summary')",
    "live": "document.querySelectorAll('.plot .tick').length >= 24",
    "cache": "document.querySelectorAll('.pool canvas').length === 4",
    "setup": "document.querySelectorAll('.settings-table tr').length > 100",
}


class TestLooks:
    @pytest.mark.parametrize(("width", "height", "dark"), LOOKS)
    def test_empty(self, browser: Browser, quiet: Server, shots: Path, *, width: int, height: int, dark: bool) -> None:
        with opened(browser, quiet.url, width=width, height=height, dark=dark) as page:
            is_ready(page)
            look_at_all(page, width, lambda view: shots / f"{width}-{'dark' if dark else 'light'}-empty-{view}.png")
            for ink, paper, ratio in page.run(CONTRAST.replace("PAIRS", json.dumps(PAIRS))):
                assert ratio >= 4.5, (ink, paper, ratio)

    @pytest.mark.slow
    def test_loaded(self, browser: Browser, looped: Server, shots: Path) -> None:
        with loaded(looped):
            for width, height, dark in LOOKS:
                with opened(browser, looped.url, width=width, height=height, dark=dark) as page:
                    is_ready(page)
                    page.until("Number.parseFloat(document.getElementById('pulse').textContent) > 20")
                    name = f"{width}-{'dark' if dark else 'light'}-loaded"
                    look_at_all(page, width, lambda view, name=name: shots / f"{name}-{view}.png")
