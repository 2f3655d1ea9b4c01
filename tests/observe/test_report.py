"""`report.html` from a run folder whose every text was written by an enemy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from verl.observe.report import write_report
from verl.observe.run_folder import RunFolder

FIRE = "document.title='FIRED'"
ATTACKS = [
    f"<script>{FIRE}</script>",
    f'\'"><img src=x onerror="{FIRE}">',
    f"' onmouseover='{FIRE}' x='",
    f"</title></style></pre></textarea><script>{FIRE}</script>",
    f"<svg onload={FIRE}>",
    "{0.__class__} {policy} %s",
    "\x00\x1b]0;x\x07\u202e",
]
ATTACK = " ".join(ATTACKS)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def report(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    with RunFolder(folder) as run:
        run.write_config({"a": 1})
        run.write_validation(2, [{"prompt": ATTACK, ATTACK: [ATTACK], "score": 10**400}])
    rows = [
        {"step": 1, "reward/mean": 0.25, "timing_s/step": ATTACK, f"val-core/{ATTACK}": 0.5, ATTACK: ATTACK},
        {"step": 2, "reward/mean": 0.75, "actor/entropy": 10**400, f"val-core/{ATTACK}": 0.75},
        {"step": ATTACK, "reward/mean": ATTACK, "perf/throughput": float("inf"), "actor/kl": True},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "crash.txt").write_bytes(ATTACK.encode() + b"\xff")
    (folder / "config.yaml").write_text(ATTACK)
    return write_report(folder, title=ATTACK)


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, ...]] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add((tag, *(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_hostile_run_folder_adds_no_element_and_no_attribute(report: Path) -> None:
    page = Elements()
    page.feed(report.read_text(encoding="utf-8"))
    plain = [
        "head",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "pre",
        "figure",
        "figcaption",
        "span",
        "strong",
    ]
    ours = {(tag,) for tag in [*plain, "dl", "dt", "dd", "details", "summary"]}
    ours |= {("html", "lang"), ("meta", "charset")}
    ours |= {("meta", "http-equiv", "content"), ("div", "class"), ("svg", "viewbox", "role", "aria-label")}
    ours |= {("polyline", "points"), ("circle", "cx", "cy", "r")}
    ours |= {("text", "x", "y"), ("text", "x", "y", "text-anchor")}
    assert page.found == ours
    # title, heading, crash, configuration, a curve, and a sample's value and its name; a row without a step is left out
    assert page.text.count(ATTACKS[4]) == 7
    assert "0.250 → 0.750" in page.text


def title_in_chromium(page: Path, folder: Path) -> str:
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    )
    flags += " --disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=2000 --dump-dom"
    command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={folder}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-2000:]
    return title[1]


@pytest.mark.components
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_no_script_runs_in_a_browser(report: Path, tmp_path: Path) -> None:
    page = report.read_text(encoding="utf-8")
    policy = re.search(r"<meta http-equiv.*?>", page)
    assert policy
    unescaped = page.replace("<h1>", f"<h1>{ATTACK}")
    pages = {
        "as written": (page, False),
        "escaping alone": (page.replace(policy[0], ""), False),
        "policy alone": (unescaped, False),
        "neither": (unescaped.replace(policy[0], ""), True),
    }
    for name, (text, fires) in pages.items():
        path = tmp_path / f"{name.replace(' ', '-')}.html"
        path.write_text(text, encoding="utf-8")
        title = title_in_chromium(path, tmp_path / "chromium")
        assert (title == "FIRED") is fires, name
