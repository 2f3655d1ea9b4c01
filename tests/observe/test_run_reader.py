"""Reading run folders that are huge, damaged or hostile, and choosing samples."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import DataError
from verl.observe import run_reader, view
from verl.observe.console import SafeConsole
from verl.observe.jsonl import complete_lines
from verl.observe.run_reader import MetricsLog, Run, duration, find_runs, read_crash
from verl.observe.terminal import escape_control

# -- reading ------------------------------------------------------------------------------------------------------


def test_of_a_huge_file_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "reward/mean": step}) + "\n" for step in range(1000)))
    log = MetricsLog(file, tail_bytes=2000)
    log.poll()
    assert "only its end" in log.problem and log.last()["step"] == 999 and 0 < len(log.rows) < 100
    assert log.damaged == 0  # the line that was cut in two at the beginning is not counted as damage


def test_of_many_rows_the_newest_are_kept_and_of_the_others_evenly_spread_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reader, "KEPT_ROWS", 10)
    file = tmp_path / "metrics.jsonl"
    rows = [
        {"step": step, "a": step, "b": None, **({"val/x": 1} if step == 8 else {})} for step in range(200)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = MetricsLog(file)
    log.poll()
    steps = [row["step"] for row in log.rows]
    assert steps[-10:] == list(range(190, 200)) and log.first["step"] == 0
    assert len(steps) <= 20 and len({step // 64 for step in steps}) == 4 and 8 in steps
    assert len(log.points("a")) == len(steps) and log.points("b") == [] and "b" in log.names()  # not finite


@given(
    st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20),
    st.binary(max_size=20),
)
def test_only_whole_lines_are_read(lines: list[bytes], torn: bytes) -> None:
    torn = torn.replace(b"\n", b"")
    content = b"".join(line + b"\n" for line in lines) + torn
    assert list(complete_lines(io.BytesIO(content))) == [line + b"\n" for line in lines]


def test_a_line_beyond_all_measure_is_left_out() -> None:
    content = b"a\n" + b"x" * 100 + b"\nb\n" + b"y" * 100
    assert list(complete_lines(io.BytesIO(content), limit=10)) == [b"a\n", b"", b"b\n"]


def test_checkpoints_and_hidden_folders_are_not_searched_for_runs(tmp_path: Path) -> None:
    for name in ("p/run", "p/run/global_step_3/inner", ".hidden/run", "global_step_1/run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("")
    assert find_runs(tmp_path) == [tmp_path / "p" / "run"]


# -- samples ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 10):
        rows = [
            {
                "uid": f"0-{row}",
                "prompt": f"question {row}",
                "response": f"answer {step} {row}",
                "score": score,
            }
            for row, score in enumerate([0.5, 1.0, None, -1.0, 1.0])
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rollouts" / f"{step}.jsonl").write_text(text + '{"uid": "0-9", "resp')
    (tmp_path / "rollouts" / "notes.txt").write_text("not a step")
    return Run(tmp_path)


def chosen(run: Run, **wanted: object) -> list[tuple[str, dict[str, object]]]:
    parser = argparse.ArgumentParser()
    view.add_arguments(parser)
    args = parser.parse_args([])
    vars(args).update(wanted)
    return list(view.choose_samples(run, args))


def uids(run: Run, **wanted: object) -> list[tuple[int, str]]:
    found = chosen(run, **wanted)
    return [(int(title.split("step ")[1].split()[0]), str(row["uid"])) for title, row in found]


def test_steps_are_numbers_and_the_newest_is_the_default(run: Run) -> None:
    assert run.samples("rollouts").steps() == [1, 2, 10]
    assert uids(run, best=1) == [(10, "0-1")]


def test_best_and_worst_are_by_score_first_come_first(run: Run) -> None:
    assert uids(run, best=3) == [(10, "0-1"), (10, "0-4"), (10, "0-0")]
    assert uids(run, worst=2) == [(10, "0-3"), (10, "0-0")]
    assert uids(run, best=1, worst=1, step=2) == [(2, "0-1"), (2, "0-3")]
    assert len(uids(run, best=99)) == 4  # without a score it is neither


def test_a_text_is_found_newest_first_without_regard_to_case(run: Run) -> None:
    assert uids(run, grep="ANSWER 2 3") == [(2, "0-3")]
    assert [step for step, _ in uids(run, grep="question 1")] == [10, 2, 1]
    assert uids(run, grep="question", limit=2) == [(10, "0-0"), (10, "0-1")]
    assert uids(run, grep="no such thing") == []


def test_best_among_those_with_a_text(run: Run) -> None:
    assert uids(run, grep="question", worst=1) == [
        (1, "0-3")
    ]  # of all steps: the text was looked for everywhere


def test_a_uid_of_any_form_is_followed(run: Run) -> None:
    extra = {"uid": "1-3.1#7", "response": "again", "score": None}
    with open(run.path / "rollouts" / "11.jsonl", "w") as file:
        file.write(json.dumps(extra) + "\n" + json.dumps({**extra, "uid": "mine"}) + "\n")
    assert uids(run, uid="3") == [(1, "0-3"), (2, "0-3"), (10, "0-3"), (11, "1-3.1#7")]
    assert uids(run, uid="mine") == [(11, "mine")]
    assert uids(run, uid="33") == []


def test_a_step_without_samples_names_the_nearest(run: Run) -> None:
    with pytest.raises(DataError, match="nearest 10"):
        chosen(run, step=7)


def test_control_characters_of_a_sample_never_reach_the_terminal(run: Run) -> None:
    evil = {
        "uid": "0-1\x1b[2J",
        "response": "a\x1b]0;owned\x07b\u202e\r\nc[bold]d",
        "score": 1.0,
        "reward_x": "\x9b31m",
    }
    (run.path / "rollouts" / "12.jsonl").write_text(json.dumps(evil) + "\n")
    console = SafeConsole(file=io.StringIO(), force_terminal=False, width=200)
    for title, row in chosen(run, step=12):
        view.write(console, view.sample_text(title, row, 1200))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert not any(letter in text for letter in "\x1b\x07\r\u202e\x9b")
    assert r"\x1b]0;owned\x07b\u202e" in text and "c[bold]d" in text


@given(st.text(max_size=60))
def test_harmless_text_has_no_controls_and_keeps_the_rest(text: str) -> None:
    out = escape_control(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in out)
    if text.isprintable():
        assert out == text


def test_long_texts_keep_both_ends() -> None:
    text = view.shortened("a" * 500 + "THE END", 100)
    assert text.startswith("aaa") and text.endswith("THE END") and len(text) < 150
    assert view.shortened("short", 100) == "short"


@pytest.mark.parametrize(
    "seconds, text", [(3, "3 s"), (300, "5 min"), (10_000, "3 h"), (1e6, "12 days"), (-1, "0 s")]
)
def test_durations_are_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_crash_file_of_any_kind_is_read(tmp_path: Path) -> None:
    assert read_crash(tmp_path) is None
    (tmp_path / "crash.txt").write_text("")
    assert read_crash(tmp_path) == ("crash.txt is empty", "")
    (tmp_path / "crash.txt").write_bytes(b"ValueError: \xff\n\nWhat to do: x\n\nWhen: now\n")
    assert read_crash(tmp_path) == ("ValueError: \ufffd", "x")
