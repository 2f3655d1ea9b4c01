"""The files of the viewer's page: complete, without a way for text to become HTML or for a request to leave."""

from __future__ import annotations

import json
import re
from pathlib import Path

WEB = Path(__file__).resolve().parents[2] / "verl" / "observe" / "web"
OWN = sorted(path for path in WEB.glob("*.js") if path.name != "uplot.js")


def test_every_file_is_loaded_once_and_exists() -> None:
    files = json.loads((WEB / "files.json").read_text(encoding="utf-8"))
    assert sorted(files["style"] + files["script"]) == sorted(
        path.name for path in WEB.iterdir() if path.suffix in (".js", ".css")
    )
    assert (WEB / "LICENSE-uplot").read_text(encoding="utf-8").startswith("The MIT License")


def test_text_never_becomes_html_or_code() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|Contextual|srcdoc|eval\(|Function\("
    for path in [*OWN, WEB / "uplot.js"]:
        assert not re.search(ways, path.read_text(encoding="utf-8")), path.name
    page = (WEB / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"\{\{(\w+)\}\}", page) == ["POLICY", "TITLE", "STYLE", "DATA", "SCRIPT"]


def test_no_file_names_another_host_and_requests_are_made_in_one_place() -> None:
    for path in [*OWN, WEB / "style.css", WEB / "uplot.css", WEB / "page.html"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://|url\(|@import|XMLHttpRequest|WebSocket|sendBeacon", text), path.name
        assert len(text.splitlines()) < 400, path.name
    assert [path.name for path in OWN if "fetch(" in path.read_text(encoding="utf-8")] == ["source.js"]
