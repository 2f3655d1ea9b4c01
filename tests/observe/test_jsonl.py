"""Files of lines: a line that was cut costs itself and nothing else, whoever reads the file."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.report_data import report_data
from verl import cli
from verl.observe.jsonl import append_line, read_jsonl, read_metrics
from verl.observe.report import write_report
from verl.observe.run_folder import RunFolder
from verl.observe.run_reader import MetricsLog, SampleFiles
from verl.trainer.generation import Journal

DEEP = "[" * 100_000 + "]" * 100_000
DAMAGED = {
    "cut in the middle": b'{"step": 2, "reward/me',
    "glued to the next": b'{"step": 2, "rew{"step": 3, "reward/mean": 0.5}',
    "a list": b"[1]",
    "a number": b"3",
    "a step that is a text": b'{"step": "x"}',
    "a step that is a truth": b'{"step": true}',
    "a step beyond 64 bits": b'{"step": 99999999999999999999}',
    "a step no float can hold": b'{"step": 1' + b"0" * 400 + b"}",
    "no step": b'{"reward/mean": 1.0}',
    "nested too deeply": b'{"step": 2, "x": ' + DEEP.encode() + b"}",
    "too many digits": b'{"step": 2' + b"0" * 100_000 + b"}",
    "bytes that are no text": b'{"step": 2, "x": "\xff"}',
}
each_damage = pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: the write that would ends in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_for_a_moment_costs_the_line_alone(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.append_metrics(1, {"a": 1.0})
        whole = run.metrics_file.read_bytes()
        with room_for(len(whole) + 5), pytest.raises(OSError, match="File too large"):
            run.append_metrics(2, {"a": 2.0})
        assert run.metrics_file.read_bytes() == whole
        run.append_metrics(3, {"a": 3.0})
        assert [row["step"] for row in run.read_metrics()] == [1, 3]
        write_report(tmp_path)


def test_a_line_is_never_added_to_the_rest_of_another(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "a')
    append_line(file, '{"step": 2}')
    assert file.read_text() == '{"step": 1}\n{"step": 2, "a\n{"step": 2}\n'


@each_damage
def test_a_damaged_line_is_left_out_by_every_reader_and_removed_when_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    good = [json.dumps({"step": step, "reward/mean": 0.1 * step}).encode() for step in (1, 2, 3)]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([good[0], line, good[1], good[2]]) + b"\n")
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in read_metrics(file)] == [1, 2, 3]
    assert [record.getMessage().count("1 line is left out") for record in caplog.records] == [1]
    log = MetricsLog(file)
    assert [row["step"] for row in log.poll()] == [1, 2, 3] and log.damaged == 1
    data = report_data(write_report(tmp_path))
    assert data["run/0/metrics.json"]["step"] == [1, 2, 3]
    assert data["run/0/summary.json"]["notes"][-1] == "1 lines of metrics.jsonl cannot be read"
    caplog.clear()
    with RunFolder(tmp_path) as run, caplog.at_level(logging.WARNING):
        assert run.rewind(2)
    assert file.read_bytes() == good[0] + b"\n" + good[1] + b"\n"
    assert len(caplog.records) == 1


@each_damage
def test_verl_view_copes_with_a_damaged_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    (tmp_path / "rollouts").mkdir()
    for name in ("metrics.jsonl", "rollouts/1.jsonl"):
        (tmp_path / name).write_bytes(b'{"step": 1, "score": 1.0}\n' + line + b"\n")
    assert cli.main(["view", str(tmp_path)]) == 0
    assert "1 lines of metrics.jsonl cannot be read" in capsys.readouterr().out


def test_values_that_are_no_numbers_are_no_metrics_to_verl_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"step": 1, "reward/mean": 0.5, "timing_s/step": 1.0, "timing_s/testing": "x", "actor/entropy": []}
    huge = f'{{"step": 2, "reward/mean": 1{"0" * 400}, "val-core/a/acc/mean@1": "y"}}'
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + huge + "\n")
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {}")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/2.jsonl").write_text(f'{{"uid": 1, "score": 1{"0" * 400}}}\n')
    assert cli.main(["view", str(tmp_path)]) == 0
    assert "reward/mean" in capsys.readouterr().out


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_what_is_no_file_is_named_by_verl_view_and_put_aside_by_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def make(name: str) -> None:
        if kind == "FIFO":
            os.mkfifo(tmp_path / name)
        elif kind == "device":
            (tmp_path / name).symlink_to("/dev/zero")
        else:
            (tmp_path / name).mkdir()

    (tmp_path / "rollouts").mkdir()
    for name in ("metrics.jsonl", "config.yaml", "crash.txt", "crash.previous.txt", "rollouts/3.jsonl"):
        make(name)
    assert cli.main(["view", str(tmp_path)]) == 0
    assert "metrics.jsonl is not a regular file" in capsys.readouterr().out
    assert cli.main(["view", str(tmp_path.parent)]) == 0
    (tmp_path / "metrics.jsonl").rename(tmp_path / "away")
    write_report(tmp_path, outside=True)  # as a run does
    (tmp_path / "away").rename(tmp_path / "metrics.jsonl")
    with RunFolder(tmp_path) as run:
        assert run.previous_config() is None
        run.append_metrics(1, {"a": 1.0})
        assert len(run.read_metrics()) == 1
    assert "renamed to metrics.jsonl.unusable" in caplog.text


def test_odd_names_among_the_samples_do_not_stop_a_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for name in ("\u00b2.jsonl", "x.jsonl", "3.jsonl"):
            (run.rollout_dir / name).write_text("{}\n")
        (run.rollout_dir / "4.jsonl").mkdir()
        run.rewind(2)
        assert sorted(path.name for path in run.rollout_dir.iterdir()) == [
            "4.jsonl",
            "x.jsonl",
            "\u00b2.jsonl",
        ]
        run.restart()
    assert SampleFiles(tmp_path / "rollouts").steps() == [4]


def test_samples_that_cannot_be_removed_do_not_stop_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError("immutable")

    with RunFolder(tmp_path) as run:
        run.write_rollouts(3, [{"a": 1}])
        monkeypatch.setattr(Path, "unlink", refuse)
        assert not run.rewind(2)
        run.restart()
        monkeypatch.undo()
    assert caplog.text.count("3.jsonl, of a step that is written again, could not be removed: immutable") == 2


def test_text_that_utf_8_cannot_hold_is_written_and_read_back(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        file = run.write_rollouts(1, [{"response": "half a pair: \ud800"}, {"response": "\u00e9"}])
    assert list(read_jsonl(file)) == [{"response": "half a pair: \ud800"}, {"response": "\u00e9"}]


@each_damage
def test_a_damaged_line_of_a_generation_costs_its_row_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, {"a": 1}) as journal:
        journal.add(0, {"": ["x"]})
    rows = journal.path
    rows.write_bytes(rows.read_bytes() + line + b"\n" + b'{"row": 5, "": ["y"]}\n{"row": 6, "": ["cut')
    with Journal(output, {"a": 1}) as journal:
        assert len(journal) == 2 and journal.read(5) == {"": ["y"]}
        journal.add(6, {"": ["z"]})
        assert [journal.read(row) for row in (0, 5, 6)] == [{"": ["x"]}, {"": ["y"]}, {"": ["z"]}]
    assert "1 lines of" in caplog.text and "generated again" in caplog.text


def test_a_generation_on_a_full_disk_keeps_whole_lines_only(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl", {"a": 1}) as journal:
        journal.add(0, {"": ["x"]})
        file = journal.path
        size = file.stat().st_size
        with room_for(size + 4), pytest.raises(OSError, match="File too large"):
            journal.add(1, {"": ["y"]})
        assert file.stat().st_size == size
        journal.add(2, {"": ["z"]})
        assert journal.read(2) == {"": ["z"]}


@pytest.mark.parametrize("crash", ["file", "folder"])
@pytest.mark.parametrize("before", ["file", "folder"])
def test_whatever_stands_where_things_are_put_aside_does_not_stop_a_run(
    tmp_path: Path, crash: str, before: str
) -> None:
    for name, kind in (
        ("crash.txt", crash),
        ("crash.previous.txt", before),
        ("metrics.previous.jsonl", before),
    ):
        (tmp_path / name).mkdir() if kind == "folder" else (tmp_path / name).write_text("x")
        if kind == "folder":
            (tmp_path / name / "inside").write_text("x")
    with RunFolder(tmp_path) as run:
        assert not (tmp_path / "crash.txt").exists()
        run.append_metrics(1, {})
        run.restart()
        assert run.read_metrics() == []


@pytest.mark.parametrize("text", ["[1]", DEEP, "nonsense"])
def test_settings_of_a_generation_that_cannot_be_read_are_not_gone_on_with(tmp_path: Path, text: str) -> None:
    from verl.errors import DataError

    with Journal(tmp_path / "out.jsonl", {"a": 1}) as journal:
        journal.add(0, {"": ["x"]})
    journal.path.write_text(f"{text}\n{journal.path.read_text().splitlines()[1]}\n")
    with pytest.raises(DataError, match="the settings, cannot be read"):
        Journal(tmp_path / "out.jsonl", {"a": 1})
