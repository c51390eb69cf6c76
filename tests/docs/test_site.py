"""The documentation builds as a site that needs nothing from elsewhere; its links and the README's lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .terminal import ROOT

EXTERNAL = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")
IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        assert not os.environ.get("CI"), "the extra docs is missing"
        pytest.skip("mkdocs-material isn't here: pip install 'headrace[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = ["build", "--strict", "--quiet", "--site-dir", str(folder), "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words], capture_output=True, text=True, timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    """Strict: a page that the navigation leaves out, or a link or an anchor that leads nowhere, fails the build."""
    wanted = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    assert wanted <= {path.name for path in site.glob("*.html")}


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not EXTERNAL.findall(path.read_text()), path.name
    for path in site.rglob("*.css"):
        assert not IN_STYLES.findall(path.read_text()), path.name


def test_tables_and_commands_became_such(site: Path) -> None:
    """Python-Markdown reads some things otherwise than others do: nothing of a table or of a block is left as text."""
    pages = [path for path in site.glob("*.html") if path.name != "404.html"]
    assert len(pages) > 20
    for path in pages:
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        body = re.search(r"<article.*?</article>", text, re.DOTALL)
        assert body is not None, path.name
        assert "|---" not in body[0] and "```" not in body[0] and "| --- |" not in body[0], path.name
        assert not re.search(r"<p>\s*(curl|headrace|python -m) ", body[0]), path.name


def test_links_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    targets = {target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target}
    assert len(targets) > 10
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing
