"""The viewer's page in a real Chromium, as `report.html` and served: 100k responses, numbers as in the files, and text
that stays text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from tests.chromium import CHROMIUM, Page, browser
from tests.observe.big_run import N, sample, write_run, write_samples
from verl.observe.report import write_report
from verl.observe.token_table import TokenTable

STEPS, PROMPTS = 100, 125
ATTACK = "</script><script>document.title='FIRED'</script><img src=x onerror=\"document.title='FIRED'\"><b>bold</b>"
VIEWS = (
    ("overview?run=0", ".facts"),
    ("curves?run=0", ".curve"),
    ("timeline?run=0", "#bar"),
    ("config?run=0", ".keys"),
    ("rollouts?run=0", ".space .line"),
    ("group", ".response"),
)


def group_of(row: dict[str, Any], step: int) -> str:
    """The address of the group that a row of a step belongs to."""
    return f"group?run=0&kind=rollouts&step={step}&uid={quote(row['uid'])}"


pytestmark = [
    pytest.mark.slow(seconds=15),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


def found(tab: Page) -> int:
    return int(tab.value("Number(document.querySelector('.found').dataset.found)"))


def test_a_report_of_100k_responses_filters_sorts_and_opens_a_group_with_the_numbers_of_the_files(
    tab: Page, tmp_path: Path
) -> None:
    samples = {step: [sample(step, line) for line in range(PROMPTS * N)] for step in range(1, STEPS + 1)}
    report = write_report(write_run(tmp_path / "p" / "run", samples))
    everything = [(step, line, row) for step, rows in samples.items() for line, row in enumerate(rows)]
    tab.requests.clear()
    tab.open(report.as_uri())
    tab.go("rollouts?run=0", ".space .line")
    assert found(tab) == len(everything) == 100_000

    for field, value in (("step-from", "40"), ("score-from", "0.5"), ("length-to", "300")):
        tab.fill(f"[data-filter={field}]", value)
    passing = [e for e in everything if e[0] >= 40 and e[2]["score"] >= 0.5 and e[2]["length"] <= 300]
    tab.until(f"document.querySelector('.found').dataset.found === '{len(passing)}'")
    assert (
        tab.value("document.querySelectorAll('.space .line').length") < 100
    )  # lines are made as they are seen
    tab.click("[data-sort=length]")
    best = max(passing, key=lambda e: (e[2]["length"], e[0], e[1]))
    shown = tab.texts(".space .line:first-child > *")
    assert [shown[0], shown[3]] == [str(best[0]), str(best[2]["length"])]

    tab.value("document.activeElement.blur()")
    tab.press("j")
    tab.press("Enter")
    tab.until("document.querySelectorAll('.columns .response').length === 8")
    step = tab.value("Number(new URLSearchParams(location.hash.split('?')[1]).get('step'))")
    lines = tab.value("[...document.querySelectorAll('.columns .response')].map(e => Number(e.dataset.line))")
    rows = [samples[step][line] for line in lines]
    assert tab.texts(".response .score") == [f"{row['score']:g}" for row in rows]
    signs = [f"adv {'+' if row['advantage'] > 0 else ''}{row['advantage']:g}" for row in rows]
    assert tab.texts(".response .advantage") == signs
    assert tab.texts(".response .answer") == [row["response"] for row in rows]
    tab.press("Escape")
    tab.until("main.dataset.page === 'rollouts'")
    assert found(tab) == len(passing)  # the filter is kept
    assert set(tab.requests) == {report.as_uri()} and not tab.problems


def test_a_search_finds_texts_and_a_curve_zooms(tab: Page, tmp_path: Path) -> None:
    samples = {step: [sample(step, line) for line in range(16)] for step in range(1, 9)}
    report = write_report(write_run(tmp_path / "p" / "run", samples))
    tab.open(report.as_uri())
    tab.go("rollouts?run=0", ".space .line")
    tab.press("/")
    tab.value("document.querySelector('input[type=search]').value = 'ANSWER 3 to 1'")
    tab.press("Enter")
    tab.until("document.querySelector('.found').dataset.found === '8'")
    tab.go("curves?run=0", ".curve .u-over")
    assert "1" in tab.text("[data-metric='reward/mean'] .readout")  # the newest value: 8 / 8
    tab.hover("[data-metric='reward/mean'] .u-over", 0.0)
    tab.until("document.querySelector('.readout').textContent.includes('step 1')")
    assert tab.text("[data-metric='reward/mean'] .readout b") == "0.125"
    tab.drag("[data-metric='reward/mean'] .u-over", 0.4, 0.9)
    tab.hover("[data-metric='reward/mean'] .u-over", 0.01)
    tab.until("document.querySelector('.readout').textContent.includes('step 4')")
    assert not tab.problems


def test_markup_in_a_run_is_shown_as_text_and_does_not_run(tab: Page, tmp_path: Path) -> None:
    samples = {1: [sample(1, line, ATTACK) for line in range(8)]}
    report = write_report(write_run(tmp_path / "p" / "run", samples, ATTACK), title=f"t{ATTACK}")
    tab.requests.clear()
    tab.open(report.as_uri())
    seen = tab.text("main")
    for view, ready in VIEWS:
        tab.go(group_of(samples[1][0], 1) if view == "group" else view, ready)
        seen += tab.text("main")
        assert (
            tab.value("document.querySelectorAll('main img, main b:not(.readout b), main script').length")
            == 0
        )
    for words in ("seen", "meaning", "key=1", "answer 0 to 0", "question 0 of step 1", "TimeoutError", "1-0"):
        assert words + ATTACK in seen, words
    assert tab.value("document.title") == f"t{ATTACK}"
    assert set(tab.requests) == {report.as_uri()} and not tab.dialogs


def test_tokens_are_coloured_by_their_numbers_and_a_fork_continues_its_parent(
    tab: Page, tmp_path: Path
) -> None:
    samples = {step: [sample(step, line) for line in range(N)] for step in range(1, 5)}
    parent = write_run(tmp_path / "p" / "parent", samples)
    fork = write_run(tmp_path / "p" / "fork", {step: samples[step] for step in (3, 4)})
    lineage = {"parent": str(parent), "parent_name": "p/parent", "step": 2, "overrides": [], "time": 1.0}
    (fork / "lineage.json").write_text(json.dumps(lineage), encoding="utf-8")
    ratios, mask = np.array([1.0, 2.0, 0.5]), np.array([1, 1, 0], np.uint8)
    row = {
        "code": np.array([0, 1, 2]),
        "ratio": ratios,
        "advantage": np.full(3, 0.5, np.float32),
        "mask": mask,
    }
    columns = {name: np.tile(values, N) for name, values in row.items()}
    TokenTable([b"one ", b"<b>two</b>", b"\n"], [3] * N, columns).write(fork / "rollouts" / "3.parquet")
    tab.open(write_report(fork, outside=True).as_uri())
    tab.go(group_of(samples[3][0], 3), ".response")
    tab.click(".colours [data-value=ratio]")
    tab.until("document.querySelectorAll('.response:first-child .tokens span').length === 3")
    assert tab.texts(".response:first-child .tokens span") == ["one ", "<b>two</b>", "\n"]
    colours = "[...document.querySelectorAll('.response:first-child .tokens span')].map(e => e.style.backgroundColor)"
    same, higher, lower = tab.value(colours)
    assert "240, 140, 20" in higher and "60, 110, 235" in lower and same not in (higher, lower)
    tab.hover(".tokens span:nth-child(2)")
    assert "ratio" in tab.text("#tip") and "+0.5" in tab.text("#tip")
    tab.go("curves?run=0&with=0", ".curve .u-over")
    tab.hover("[data-metric='reward/mean'] .u-over", 0.0)
    tab.until("document.querySelector('.readout').textContent.includes('step 1')")  # of the parent: 1 / 8
    assert tab.text("[data-metric='reward/mean'] .readout b") == "0.125"
    tab.go("runs?run=0", ".runs a")
    depths = tab.value("[...document.querySelectorAll('.runs tbody tr')].map(e => e.dataset.depth)")
    assert tab.texts(".runs td:first-child > a") == ["p/parent", "p/fork"] and depths == ["0", "1"]
    assert not tab.problems


def test_long_names_make_no_page_wider_than_the_screen(tab: Page, tmp_path: Path) -> None:
    long = "_a_rather_long_name_without_a_space" * 5
    samples = {1: [sample(1, line, long) for line in range(8)]}
    report = write_report(write_run(tmp_path / "p" / "run", samples, long))
    for width in (1300, 1101, 390):
        tab.open(report.as_uri(), width=width)
        for view, ready in VIEWS:
            tab.go(group_of(samples[1][0], 1) if view == "group" else view, ready)
            parts = "[...document.querySelectorAll('main, header, nav, .card, .space .line')]"
            wide = tab.value(
                f"{parts}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 99))"
            )
            assert wide == [], (width, view)
            assert tab.value("document.documentElement.scrollWidth <= innerWidth"), (width, view)


def test_the_policy_stops_a_script_that_was_not_escaped(tab: Page, tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]}))
    page = report.read_text(encoding="utf-8").replace('<header id="bar">', f'{ATTACK}<header id="bar">')
    policy = re.search(r"<meta http-equiv.*?>", page)
    assert policy
    for text, fires in ((page, False), (page.replace(policy[0], ""), True)):
        path = tmp_path / f"{fires}.html"
        path.write_text(text, encoding="utf-8")
        tab.open(path.as_uri())
        tab.until("[...document.images].every(e => e.complete)")
        assert (tab.value("document.title") == "FIRED") is fires


def test_a_served_page_searches_opens_a_group_with_colours_and_follows_the_run(
    tab: Page, tmp_path: Path
) -> None:
    samples = {step: [sample(step, line) for line in range(2 * N)] for step in (1, 2)}
    run = write_run(tmp_path / "p" / "run", samples)
    texts, row = [b"one ", b"two"], {"code": np.array([0, 1]), "mask": np.array([1, 0], np.uint8)}
    row["log_prob"] = np.array([-0.5, -5.0])
    columns = {name: np.tile(values, 2 * N) for name, values in row.items()}
    TokenTable(texts, [2] * 2 * N, columns).write(run / "rollouts" / "2.parquet")
    command = [sys.executable, "-m", "verl", "view", str(run), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            tab.requests.clear()
            tab.problems.clear()
            tab.open(address)
            tab.go("rollouts?run=0", ".space .line")
            assert found(tab) == 32
            tab.press("/")
            tab.value("document.querySelector('input[type=search]').value = 'QUESTION 1 of step 2'")
            tab.press("Enter")
            tab.until("document.querySelector('.found').dataset.found === '8'")
            tab.value("document.activeElement.blur()")
            tab.press("j")
            tab.press("Enter")
            tab.until("document.querySelectorAll('.columns .response').length === 8")
            assert tab.texts(".response .answer") == [each["response"] for each in samples[2][N:]]
            tab.click(".colours [data-value=log_prob]")
            tab.until("document.querySelectorAll('.tokens span').length === 16")
            paints = (
                "[...document.querySelectorAll('.tokens span')].slice(0, 2).map(e => e.style.backgroundColor)"
            )
            likely, unlikely = tab.value(paints)
            assert likely != unlikely and tab.texts(".tokens span")[:2] == ["one ", "two"]
            write_samples(run, 3, [sample(3, line) for line in range(N)])
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "reward/mean": 0.5}\n')
            tab.go("rollouts?run=0", ".space .line")
            tab.press("Escape")  # no filter: the new step is listed without a reload
            tab.until("document.querySelector('.found').dataset.found === '40'")
            assert all(each.startswith(address) for each in tab.requests) and not tab.problems
            assert any("/search/rollouts?q=" in each for each in tab.requests)
        finally:
            process.terminate()


def test_a_conversation_has_its_tool_turns_folded(tab: Page, tmp_path: Path) -> None:
    turns = [
        {"role": "assistant", "content": "I ask", "reward": 0.5, "tool_calls": [{"name": "add", "arguments": "1"}]},
        {"role": "tool", "content": "the sum is <b>6</b>"},
        {"role": "assistant", "content": "It is 6."},
    ]  # fmt: skip
    row = sample(1, 0) | {"turns": turns, "response": "all of it", "score": 1.25}
    single = float(np.float32(-0.3))  # what three turns of -0.1 are in single precision
    played = sample(1, 1) | {
        "score": single,
        "turns": [{"role": "assistant", "content": "7", "reward": -0.1}] * 3,
    }
    run = write_run(tmp_path / "p" / "run", {1: [row, played]})
    tab.problems.clear()
    tab.open(write_report(run).as_uri())
    tab.go(group_of(sample(1, 0), 1), ".response")
    assert tab.texts(".final")[1] == "final reward 0 and of its turns -0.3: -0.3 in all"
    assert "all of it" not in tab.text("main") and "reward 0.5" in tab.text("main")
    assert tab.text(".final") == "final reward +0.75 and of its turns +0.5: 1.25 in all"
    assert tab.texts(".response:first-child .turn.assistant > .text") == ["I ask", "It is 6."]
    assert tab.texts("details.turn.tool > .text:not(.mono)") == ["the sum is <b>6</b>"]
    assert tab.value("[...document.querySelectorAll('details.turn.tool')].map(e => e.open)") == [False, False]
    tab.click(".answer > details.turn.tool > summary")
    assert tab.value("document.querySelector('.answer > details.turn.tool').open") and not tab.problems


def write_metrics(run: Path, rows: list[dict[str, float]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_curve_of_zeros_has_an_axis_to_one_and_steps_are_whole(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    write_metrics(run, [{"step": step, "actor/ppo_kl": 0.0, "reward/mean": step} for step in (1, 2, 3)])
    tab.problems.clear()
    tab.open(write_report(run).as_uri())
    ranges = "JSON.stringify([Charts.rangeOfY(null, 0, 0), Charts.rangeOfY(null, 2, 2)])"
    zeros, constant = json.loads(tab.value(ranges))
    assert zeros == [0, 1] and constant[0] <= 0 < 2 < constant[1] <= 4
    tab.until("document.querySelector(\"[data-metric='actor/ppo_kl'] canvas\")")
    assert tab.text("[data-metric='actor/ppo_kl'] .readout") == "0" and not tab.problems


def test_the_text_of_a_metric_is_shown_at_its_name(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    tab.open(write_report(run).as_uri())
    tab.hover("[data-metric='reward/mean'] .title")
    tab.until("!document.getElementById('tip').hidden")
    assert "Mean score of the responses of this step" in tab.text("#tip")


def test_ticks_of_the_timeline_differ_and_a_phase_has_one_colour(tab: Page, tmp_path: Path) -> None:
    colours = []
    for name, gen, other in (("first", 1.0, 0.2), ("second", 0.2, 1.0)):
        run = write_run(tmp_path / "p" / name, {1: [sample(1, 0)]})
        times = {"timing_s/gen": gen, "timing_s/update_actor": other, "timing_s/step": 2.0}
        write_metrics(run, [{"step": step, **times, "perf/gpu_busy": 0.83} for step in range(1, 91)])
        tab.open(write_report(run).as_uri())
        tab.go("timeline?run=0", "canvas")
        for _ in range(9):
            ticks = tab.value("document.querySelector('canvas').dataset.ticks").replace(" s", "s").split()
            assert len(ticks) >= 2 and len(set(ticks)) == len(ticks), ticks
            tab.press("+")
        parts = "[...document.querySelectorAll('.stack i')]"
        paint = "[e.dataset.phase, [e.style.backgroundColor, Number(e.style.flexGrow)]]"
        colours.append(tab.value(f"Object.fromEntries({parts}.map(e => {paint}))"))
        assert {each: round(share, 3) for each, (_, share) in colours[-1].items()} == {
            "gen": gen / 2, "update_actor": other / 2, "other": 0.4}  # fmt: skip
    assert "GPU busy 83 %" in tab.text(".steptime")
    assert {each: paint for each, (paint, _) in colours[0].items()} == {
        each: paint for each, (paint, _) in colours[1].items()
    }
    shown = tab.value(
        "[[0.5, 0.1], [59.5, 0.5], [150, 10], [150.5, 0.5], [3725, 5]].map(e => Timeline.clock(...e))"
    )
    assert shown == ["0.5 s", "59.5 s", "2:30", "2:30.5", "1:02:05"]


def test_the_list_of_responses_has_their_words_and_of_groups_those_of_the_prompt(
    tab: Page, tmp_path: Path
) -> None:
    long = {"response": f"<|im_start|>It begins{' and goes on' * 40} with 42<|im_end|>"}
    rows = [sample(1, line) | (long if line == 0 else {}) for line in range(N)]
    rows[1]["score"] = -0.125
    for width in (1300, 1101, 390):
        tab.open(write_report(write_run(tmp_path / str(width) / "run", {1: rows})).as_uri(), width=width)
        tab.go("rollouts?run=0", ".space .line")
        shown = tab.texts(".space .line .peek")
        assert shown[1:] == [f"answer {k} to 0" for k in (6, 5, 4, 3, 2, 1)] + [shown[-1]]
        assert shown[-1].startswith("It begins and") and shown[-1].endswith("goes on with 42")
        lefts = (
            "[...document.querySelectorAll('.space .line .meter')].map(e => e.getBoundingClientRect().left)"
        )
        assert len(set(tab.value(lefts))) == 1, "the bars of scores are below each other"
        tab.click("[data-value=groups]")
        tab.until("document.querySelectorAll('.space .line').length === 1")
        assert tab.texts(".space .line .peek") == ["question 0 of step 1"]


def test_a_crash_is_told_once(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)], 2: [sample(2, 0)]})
    (run / "crash.txt").write_text("RuntimeError: lost\nline 2\n\nWhat to do: start again\n\nWhen: now\n")
    tab.open(write_report(run).as_uri())
    seen = tab.text("main")
    assert seen.count("RuntimeError: lost") == seen.count("start again") == 1
    assert "crashed after step 2" in tab.text(".facts")


def test_several_runs_are_all_drawn_and_ranked_by_what_they_reached(tab: Page, tmp_path: Path) -> None:
    runs = []
    for name, validation, loss in (("a", 0.5, None), ("b", 0.9, None), ("c", None, 0.25), ("d", 0.7, None)):
        runs.append(write_run(tmp_path / "p" / name, {1: [sample(1, 0)]}))
        score = {"train/loss": loss} if validation is None else {"val-core/x/acc/mean@1": validation}
        write_metrics(runs[-1], [{"step": 1, "reward/mean": 0.5, **score}])
    tab.problems.clear()
    tab.open(write_report(runs[0], others=runs[1:]).as_uri())
    tab.go("curves?run=0", ".curve .u-over")
    assert tab.value("[...document.querySelectorAll('.legend input')].map(e => e.checked)") == [True] * 4
    tab.until("document.querySelectorAll(\"[data-metric='reward/mean'] .readout .dot\").length === 4")
    tab.go("runs?run=0", ".runs")
    names = ".runs td:first-child > a"
    assert tab.texts(names) == ["p/a", "p/b", "p/c", "p/d"]
    tab.click("[data-sort=validation]")
    assert tab.texts(names) == ["p/b", "p/d", "p/a", "p/c"]  # without a number last
    assert tab.texts("[data-result=validation]") == ["0.9", "0.7", "0.5", "–"]
    assert tab.texts("[data-result=validation].best") == ["0.9"]
    tab.click("[data-sort=validation]")
    assert tab.texts(names) == ["p/a", "p/d", "p/b", "p/c"]
    tab.click("[data-sort=given]")
    assert tab.texts(names) == ["p/a", "p/b", "p/c", "p/d"] and not tab.problems


def test_an_address_of_a_prompt_that_is_not_there_leads_back_to_the_list(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, line) for line in range(N)]})
    tab.open(write_report(run).as_uri())
    for address in ("step=1&uid=9-9", "step=7&uid=1-0"):
        tab.go(f"group?run=0&kind=rollouts&{address}", ".empty a")
        tab.click(".empty a")
        tab.until("main.dataset.page === 'rollouts' && document.querySelector('.space .line')")


def test_pairs_that_were_given_are_shown_as_samples_of_validation(tab: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0) | {"score": None}]})
    (run / "config.yaml").write_text(json.dumps({"model": {"path": "m"}, "algorithm": {"loss": "dpo"}}))
    pairs = [
        {"uid": "7", "prompt": "why?", "response": side, "score": score, "length": 2, "answer": side}
        for side, score in (("chosen", 0.5), ("rejected", -0.25))
    ]
    (run / "validation").mkdir()
    (run / "validation" / "2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    tab.problems.clear()
    tab.open(write_report(run).as_uri())
    assert "Samples" in tab.texts("nav a") and "Rollouts" not in tab.texts("nav a")
    tab.go("rollouts?run=0", ".space .line")
    assert tab.texts(".line.head button") == ["step ↓", "reward", "tokens", "answer", "id"]
    assert tab.texts(".space .line .peek") == ["rejected", "chosen"]
    tab.fill("[data-filter=finish]", "0", "change")
    tab.until("document.querySelector('.found').dataset.found === '1'")
    tab.go("group?run=0&kind=validation&step=2&uid=7", ".response")
    assert tab.texts(".response .badge") == ["chosen", "rejected"]
    assert tab.texts(".response .score") == ["0.5", "-0.25"] and not tab.problems


def test_equal_rewards_of_zero_fill_no_bar_and_keys_of_an_advice_are_code(tab: Page, tmp_path: Path) -> None:
    samples = {1: [sample(1, line) | {"score": 0.0} for line in range(8)]}
    run = write_run(tmp_path / "p" / "run", samples)
    finding = {"rule": "r", "seen": "s", "try": "`verl sft` first, or actor.optim.lr=1e-06 (now 2e-06)"}
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "reward/mean": 0.0, "findings": [finding]}) + "\n"
    )
    tab.open(write_report(run).as_uri())
    assert tab.text(".try") == "Try verl sft first, or actor.optim.lr=1e-06 (now 2e-06)"
    assert tab.texts(".try code") == ["verl sft", "actor.optim.lr=1e-06"]
    tab.go("rollouts?run=0", ".space .line")
    assert set(tab.value("[...document.querySelectorAll('.space .meter i')].map(e => e.style.width)")) == {
        "0%"
    }
