"""`report.html`: what it holds, also of a run folder whose every text was written by an enemy."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report_data import report_data
from verl.observe.diagnoses import Finding
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
    ours = {(tag,) for tag in ("head", "title", "style", "body", "noscript", "script")}
    ours |= {("html", "lang"), ("meta", "charset"), ("meta", "http-equiv", "content")}
    ours |= {("meta", "name", "content"), ("header", "id"), ("main", "id", "tabindex")}
    ours |= {("div", "id", "role", "hidden"), ("script", "type", "data-path")}
    assert page.found == ours
    assert page.text.count(ATTACKS[4]) == 1, "the title; all other text is in the data"


def test_the_report_has_the_texts_of_a_hostile_run_folder_as_they_are(report: Path) -> None:
    data = report_data(report)
    summary, metrics = data["run/0/summary.json"], data["run/0/metrics.json"]
    assert summary["crash"]["cause"] == ATTACK + "\ufffd" and len(summary["notes"]) == 2
    assert metrics["step"] == [1, 2]  # a row without a step is left out
    assert metrics["series"] == {"reward/mean": [0.25, 0.75], f"val-core/{ATTACK}": [0.5, 0.75]}
    (group,) = data["run/0/groups/validation/0"]["groups"].values()
    (row,) = group["rows"]
    assert row["prompt"] == ATTACK and row["extra"] == {ATTACK: [ATTACK]} and row["score"] is None


def test_only_the_page_s_own_script_and_style_are_allowed(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    policy = dict(
        rule.split(" ", 1)
        for rule in unescape(re.search(r'Policy" content="(.*?)">', page)[1]).split("; ")  # type: ignore[index]
    )
    for kind, text in (
        ("style-src", re.findall(r"<style>(.*?)</style>", page, re.DOTALL)),
        ("script-src", re.findall(r"<script>(.*?)</script>", page, re.DOTALL)),
    ):
        digest = base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
        assert len(text) == 1 and policy.pop(kind) == f"'sha256-{digest}'"
    assert set(policy.values()) == {"'none'"}
    assert {"default-src", "connect-src", "base-uri", "form-action"} == set(policy)


def test_the_report_has_each_curve_once_and_what_the_rules_said(tmp_path: Path) -> None:
    name = "val-core/a_rather_long_dataset_name/with-another-part/acc"
    with RunFolder(tmp_path / "run") as run:
        run.write_config({"actor_rollout_ref": {}})
        for step in (1, 2):
            scores = {f"{name}/mean@1": step / 10, f"{name}/pass@1": step / 10, f"{name}/best@4": step / 5}
            found = [Finding("rule", "<b>cut</b> at 4", "short", "key=1")]
            run.append_metrics(step, {**scores, "reward/mean": 0.1}, found)
    data = report_data(write_report(tmp_path / "run"))
    shown = data["run/0/metrics.json"]["shown"]
    assert shown == [f"{name}/best@4", f"{name}/mean@1", "reward/mean"], "mean@1 and pass@1 are one curve"
    (said,) = data["run/0/summary.json"]["findings"]
    assert said == found[0].to_row() | {"first": 1, "last": 2, "times": 2, "recent": True}


def test_a_report_of_an_empty_run_has_no_step_and_no_sample(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        run.write_config({"a": 1})
    data = report_data(write_report(tmp_path / "run"))
    assert data["run/0/metrics.json"] == {"step": [], "series": {}, "shown": [], "about": {}}
    assert data["run/0/index/rollouts.json"]["count"] == 0 and data["run/0/timeline.json"]["spans"] == []
    assert data["runs.json"]["runs"][0]["state"] == "waiting"
