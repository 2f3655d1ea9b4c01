"""The site (`make docs`) as files: it loads nothing from other hosts, and its search has a worker there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chromium import CHROMIUM, Page, browser

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "docs" / "theme" / "iframe-worker.js"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PAGE = """<!doctype html><script src="iframe-worker.js"></script><body><script>
const worker = new Worker("double.js");
worker.addEventListener("message", event => { document.title = `answer ${event.data}`; });
worker.postMessage(21);
</script>"""
WORKER = 'addEventListener("message", async event => { await null; postMessage(2 * event.data); });'


def test_the_worker_is_ours_instead_of_the_one_that_the_plugin_would_load_from_another_host() -> None:
    assert "\n  - offline\n" in CONFIG and "\nuse_directory_urls: false" in CONFIG
    assert f"\n    - theme/{SHIM.name}\n" in CONFIG and SHIM.is_file()
    assert "http" not in SHIM.read_text(encoding="utf-8")


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as page:
        yield page


@pytest.mark.components
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_that_is_opened_as_a_file_has_a_worker_that_answers(tab: Page, tmp_path: Path) -> None:
    for name, text in (("page.html", PAGE), ("double.js", WORKER), (SHIM.name, SHIM.read_text("utf-8"))):
        (tmp_path / name).write_text(text, encoding="utf-8")
    tab.call("Page.navigate", url=(tmp_path / "page.html").as_uri())
    tab.until("document.title === 'answer 42'")
    assert tab.problems == []
