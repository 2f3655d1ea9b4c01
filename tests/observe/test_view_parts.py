"""Reading, choosing and drawing, apart from any run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import DataError
from verl.observe import view_files
from verl.observe.jsonl import whole_lines
from verl.observe.terminal import harmless
from verl.observe.view_compare import differing_keys, recent
from verl.observe.view_files import MetricsLog, Run, SampleFiles, find_runs
from verl.observe.view_plot import bar, figure, number, plot, thinned
from verl.observe.view_samples import Question, choose, show
from verl.observe.view_sections import chosen_curves, time_shares
from verl.observe.view_state import ago, duration, read_crash, seconds_per_step
from verl.observe.view_text import shortened

# -- reading ------------------------------------------------------------------------------------------------------


def test_of_a_huge_file_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "reward/mean": step}) + "\n" for step in range(1000)))
    log = MetricsLog(file, tail_bytes=2000)
    log.poll()
    assert log.cut and log.last()["step"] == 999 and 0 < log.steps < 100
    assert log.damaged == 0  # the line that was cut in two at the beginning is not counted as damage


def test_old_rows_are_forgotten_and_their_curve_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_files, "KEPT_ROWS", 10)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "a": step, "b": None}) + "\n" for step in range(100)))
    log = MetricsLog(file)
    log.poll()
    assert len(log.rows) <= 20 and len(log.points("a")) == 100 and log.points("b") == []
    assert len(log.series["b"]) == 100  # measured, and not finite


@given(
    st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20),
    st.binary(max_size=20),
)
def test_only_whole_lines_are_read(lines: list[bytes], torn: bytes) -> None:
    torn = torn.replace(b"\n", b"")
    content = b"".join(line + b"\n" for line in lines) + torn
    assert list(whole_lines(io.BytesIO(content))) == [line + b"\n" for line in lines]


def test_a_line_beyond_all_measure_is_left_out() -> None:
    content = b"a\n" + b"x" * 100 + b"\nb\n" + b"y" * 100
    assert list(whole_lines(io.BytesIO(content), limit=10)) == [b"a\n", b"", b"b\n"]


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
    return Run(tmp_path, rollouts=SampleFiles(tmp_path / "rollouts", "rollouts"))


def uids(run: Run, **question: object) -> list[tuple[int, str]]:
    return [(sample.step, sample.row["uid"]) for sample in choose(run, Question(**question))]  # type: ignore[arg-type]


def test_steps_are_numbers_and_the_newest_is_the_default(run: Run) -> None:
    assert run.rollouts.steps() == [1, 2, 10]
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
    with pytest.raises(DataError, match="the nearest is 10"):
        choose(run, Question(step=7))


def test_control_characters_of_a_sample_never_reach_the_terminal(run: Run) -> None:
    from rich.console import Console

    evil = {
        "uid": "0-1\x1b[2J",
        "response": "a\x1b]0;owned\x07b\u202e\r\nc[bold]d",
        "score": 1.0,
        "reward_x": "\x9b31m",
    }
    (run.path / "rollouts" / "12.jsonl").write_text(json.dumps(evil) + "\n")
    console = Console(file=io.StringIO(), force_terminal=False, markup=False, width=200)
    for block in show(choose(run, Question(step=12))):
        console.print(block)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert not any(letter in text for letter in "\x1b\x07\r\u202e\x9b")
    assert r"\x1b]0;owned\x07b\u202e" in text and "c[bold]d" in text


@given(st.text(max_size=60))
def test_harmless_text_has_no_controls_and_keeps_the_rest(text: str) -> None:
    out = harmless(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in out)
    if text.isprintable():
        assert out == text


def test_long_texts_keep_both_ends() -> None:
    text = shortened("a" * 500 + "THE END", 100)
    assert text.startswith("aaa") and text.endswith("THE END") and len(text) < 150
    assert shortened("short", 100) == "short"


# -- drawing ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e12, 1e12)), min_size=1, max_size=50),
    st.integers(1, 60),
    st.integers(1, 8),
    st.booleans(),
)
def test_a_plot_is_as_large_as_asked_and_shows_something(
    points: list[tuple[int, float]], width: int, height: int, braille: bool
) -> None:
    lines = plot(sorted(points), width, height, braille=braille)
    assert len(lines) == height and all(len(line) == width for line in lines)
    assert any(line.strip() for line in lines)


def test_a_rising_line_rises() -> None:
    lines = plot([(step, float(step)) for step in range(10)], 10, 10, braille=False)
    assert [line.index("*") for line in lines] == list(range(9, -1, -1))


def test_a_flat_line_is_flat_and_bounds_hold() -> None:
    assert plot([(0, 1.0), (9, 1.0)], 5, 3, braille=False) == ["     ", "*****", "     "]
    assert plot([(0, 1.0), (9, 1.0)], 5, 3, low=0.0, high=1.0, braille=False)[0] == "*****"
    assert plot([(0, 5.0)], 5, 3, low=0.0, high=1.0, first=0, last=9, braille=False)[0] == "*    "


def test_braille_has_two_by_four_dots_in_a_letter() -> None:
    rising = 0x40 + 0x04 + 0x10 + 0x08  # from the lowest dot on the left to the highest on the right
    assert plot([(0, 0.0), (1, 1.0)], 1, 1) == [chr(0x2800 + rising)]


def test_a_figure_has_its_name_its_range_and_its_newest_value() -> None:
    lines = figure("reward/mean", [(1, 0.25), (2, 0.75), (3, 0.5)], 40, 4, braille=False)
    assert lines[0].startswith("reward/mean") and lines[0].endswith("0.5") and len(lines) == 5
    assert lines[1].startswith("0.75 ") and lines[4].startswith("0.25 ")
    assert all(len(line) <= 40 for line in lines)


def test_many_points_are_drawn_as_means_of_neighbours() -> None:
    noise = [(step, float(step % 2)) for step in range(1000)]
    assert thinned(noise, 10) == [(99 + 100 * n, 0.5) for n in range(10)]
    assert thinned(noise[:7], 10) == noise[:7]
    assert len(thinned(noise, 999)) <= 999
    assert figure("x", noise, 40, 3, braille=False)[0].endswith("1")  # the newest value is its own


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.12345, "0.1235"),
        (12345.6, "12,346"),
        (2.5e7, "2.5e+07"),
        (1e-5, "1.0e-05"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_bars_have_their_share() -> None:
    assert (
        bar(0.5, 10) == "█████" and bar(0.0, 10) == "" and bar(2.0, 4) == "████" and bar(0.55, 10) == "█████▌"
    )
    assert bar(0.5, 10, blocks=False) == "#####"


# -- numbers ------------------------------------------------------------------------------------------------------


def log_of(tmp_path: Path, *rows: dict[str, object]) -> Run:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run(tmp_path, log=MetricsLog(file))
    run.log.poll()
    return run


def test_the_time_of_a_step_adds_up(tmp_path: Path) -> None:
    run = log_of(
        tmp_path,
        {"step": 0, "timing_s/testing": 9.0},
        {"step": 1, "timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/adv": 1.0},
        {
            "step": 2,
            "timing_s/step": 10.0,
            "timing_s/gen": 6.0,
            "timing_s/adv": 1.0,
            "timing_s/testing": 20.0,
        },
    )
    shares = {span: (seconds, share) for span, seconds, share in time_shares(run)}
    assert shares == {"testing": (10.0, 0.5), "gen": (6.0, 0.3), "other": (3.0, 0.15), "adv": (1.0, 0.05)}
    assert seconds_per_step(run) == 20.0


def test_the_curves_that_matter_are_chosen(tmp_path: Path) -> None:
    row = {
        "reward/mean": 1,
        "actor/kl_loss": 1,
        "actor/ppo_kl": 1,
        "actor/entropy": 1,
        "noise": 1,
        "val-core/a/reward/mean@1": 1,
        "val-core/a/reward/pass@1": 1,
        "val-core/b/acc/mean@4": 1,
    }
    names = chosen_curves(log_of(tmp_path, {"step": 1, **row}).log)
    assert names == [
        "reward/mean",
        "val-core/a/reward/mean@1",
        "val-core/b/acc/mean@4",
        "actor/kl_loss",
        "actor/entropy",
    ]


def test_two_configs_are_compared_key_by_key(tmp_path: Path) -> None:
    first = Run(tmp_path, {"a": {"b": 1, "c": [1]}, "trainer": {"experiment_name": "x"}, "only": 1})
    second = Run(tmp_path, {"a": {"b": 2, "c": [1]}, "trainer": {"experiment_name": "y"}})
    assert differing_keys(first, second) == [("a.b", "1", "2"), ("only", "1", "-")]


def test_recent_means_are_of_the_last_steps(tmp_path: Path) -> None:
    run = log_of(tmp_path, *({"step": step, "x": step} for step in range(10)))
    assert recent(run, "x", window=2) == 8.5 and recent(run, "y") is None


@pytest.mark.parametrize(
    "seconds, text", [(3, "3 s"), (300, "5 min"), (10_000, "3 h"), (1e6, "12 days"), (-1, "0 s")]
)
def test_durations_are_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text and ago(100.0, now=100.0 + seconds) == f"{text} ago"
    assert ago(0.0) == "never"


def test_a_crash_file_of_any_kind_is_read(tmp_path: Path) -> None:
    assert read_crash(tmp_path) is None
    (tmp_path / "crash.txt").write_text("")
    assert read_crash(tmp_path) == ("crash.txt is empty", "")
    (tmp_path / "crash.txt").write_bytes(b"ValueError: \xff\n\nWhat to do: x\n\nWhen: now\n")
    assert read_crash(tmp_path) == ("ValueError: \ufffd", "x")
