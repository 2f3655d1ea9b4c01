"""The run folder: locked, atomic, rewindable, and clear about what it cannot do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from verl.errors import ConfigError, VerlError
from verl.observe.diagnoses import Finding
from verl.observe.jsonl import read_jsonl
from verl.observe.run_folder import RunFolder, default_run_path, write_atomically


def test_default_path_is_named_after_project_and_experiment() -> None:
    assert default_run_path("p", "e") == Path("checkpoints/p/e")


def test_config_is_written_resolved_and_readable(tmp_path: Path) -> None:
    config = {"b": {"lr": 1e-6, "names": ["x", "ü"], "none": None}, "a": (1, 2), "path": tmp_path}
    with RunFolder(tmp_path / "run") as run:
        run.write_config(config)
    loaded = yaml.safe_load((tmp_path / "run/config.yaml").read_text(encoding="utf-8"))
    assert loaded == {
        "b": {"lr": 1e-6, "names": ["x", "ü"], "none": None},
        "a": [1, 2],
        "path": str(tmp_path),
    }
    assert list(loaded) == ["b", "a", "path"]


def test_metrics_are_valid_json_whatever_the_number(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.append_metrics(1, {"a": 1.5, "nan": float("nan"), "inf": float("-inf")})
        run.append_metrics(2, {"a": np.float32(0.5), "t": torch.tensor(3), "n": np.int64(7)})
        assert run.read_metrics() == [
            {"step": 1, "a": 1.5, "nan": None, "inf": None},
            {"step": 2, "a": 0.5, "t": 3, "n": 7},
        ]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_samples_go_to_one_file_per_step_also_elsewhere(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", validation_dir=tmp_path / "val") as run:
        run.write_rollouts(3, [{"prompt": "1+1", "response": "2\n", "score": 1.0}])
        run.write_validation(3, [{"prompt": "2+2"}, {"prompt": "3+3"}])
    assert list(read_jsonl(tmp_path / "run/rollouts/3.jsonl")) == [
        {"prompt": "1+1", "response": "2\n", "score": 1.0}
    ]
    assert len(list(read_jsonl(tmp_path / "val/3.jsonl"))) == 2


def test_a_torn_last_line_is_dropped_when_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "a')
    with RunFolder(tmp_path) as run:
        run.append_metrics(2, {"a": 1})
        assert run.read_metrics() == [{"step": 1}, {"step": 2, "a": 1}]


def test_rewinding_forgets_later_steps_only(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in range(1, 6):
            run.append_metrics(step, {"a": step})
            run.write_rollouts(step, [{"x": step}])
        run.tokens_file(2).touch()
        run.in_background(run.tokens_file(5).touch)
        assert not run.rewind(7)
        assert run.rewind(3)
        assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
        names = sorted(f.name for f in run.rollout_dir.iterdir())
        assert names == ["1.jsonl", "2.jsonl", "2.parquet", "3.jsonl"]


def test_samples_written_in_the_background_are_there_when_the_run_ends(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        run.write_rollouts(1, [{"x": 1}])

    with RunFolder(tmp_path) as run:
        run.in_background(slow)
        assert begun.wait(60) and not list(run.rollout_dir.iterdir()), "the caller goes on meanwhile"
        go_on.set()
        run.in_background(lambda: run.write_rollouts(2, [{"x": 2}]))
        assert (run.rollout_dir / "1.jsonl").exists(), "one step is written at a time"
    assert sorted(f.name for f in run.rollout_dir.iterdir()) == ["1.jsonl", "2.jsonl"]


def test_what_fails_in_the_background_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunFolder(tmp_path) as run:
        run.in_background(lambda: [][0], lambda: run.write_rollouts(1, [{"x": 1}]) and None)  # type: ignore[func-returns-value]
    assert "IndexError" in caplog.text and (run.rollout_dir / "1.jsonl").exists()


def test_a_fresh_start_keeps_nothing_of_an_earlier_run_among_its_own(tmp_path: Path) -> None:
    shared = tmp_path / "elsewhere" / "validation"
    with RunFolder(tmp_path / "run", validation_dir=shared) as run:
        run.restart()  # nothing there
        run.append_metrics(1, {"a": 1.0})
        run.write_rollouts(1, [{"a": 1}])
        run.tokens_file(1).touch()
        run.write_validation(1, [{"a": 1}])
        run.restart()
        assert run.read_metrics() == [] and not list(run.rollout_dir.iterdir())
        assert json.loads((run.path / "metrics.previous.jsonl").read_text())["a"] == 1.0
        assert [file.name for file in shared.iterdir()] == ["1.jsonl"]  # a folder of the user's own choice
        run.append_metrics(1, {"a": 2.0})
        assert [row["a"] for row in run.read_metrics()] == [2.0]


def test_a_crash_leaves_cause_and_fix_and_the_next_run_moves_it_aside(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        try:
            raise ConfigError("lr is -1; it must be positive: set optim.lr")
        except ConfigError as error:
            run.write_crash(error, fix="use a positive number")
    text = (tmp_path / "crash.txt").read_text()
    assert text.startswith("ConfigError: lr is -1")
    assert "What to do: use a positive number" in text
    assert "Traceback" in text
    RunFolder(tmp_path).close()
    assert not (tmp_path / "crash.txt").exists()
    assert (tmp_path / "crash.previous.txt").read_text() == text


def test_a_second_run_in_the_same_process_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    first = RunFolder(tmp_path)
    with pytest.raises(VerlError, match="already in use by this process"):
        RunFolder(tmp_path)
    first.close()
    RunFolder(tmp_path).close()


HOLD = """
import sys, time
from verl.observe.run_folder import RunFolder
run = RunFolder(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""
FORK = """
import os, sys, time
from verl.observe.run_folder import RunFolder
run = RunFolder(sys.argv[1])
child = os.fork()
if child:
    print("held", child, flush=True)
time.sleep(600)
"""


def start(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(VerlError, match=f"in use by another run.*process {process.pid}.*experiment_name"):
        RunFolder(tmp_path)
    process.kill()
    process.wait()
    RunFolder(tmp_path).close()


def test_a_child_that_outlives_a_killed_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    process = start(FORK, tmp_path)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    process.kill()
    process.wait()
    try:
        os.kill(child, 0)  # still there
        RunFolder(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_folder_that_cannot_be_made_is_refused_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VerlError, match=r"cannot write to the folder .*file/run.*trainer\.default_local_dir"):
        RunFolder(tmp_path / "file" / "run")
    with pytest.raises(VerlError, match=r"trainer\.rollout_data_dir"):
        RunFolder(tmp_path / "run", rollout_dir=tmp_path / "file" / "rollouts")


def test_a_failed_atomic_write_leaves_the_old_text_and_no_litter(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_findings_go_with_the_steps_they_belong_to(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step in (1, 2, 3):
            found = [Finding("rule", f"seen {step}", "meaning", "key=1")] if step != 2 else []
            folder.append_metrics(step, {"a": 1.0}, found)
        folder.rewind(2)
        first, second = folder.read_metrics()
        assert first["findings"] == [{"rule": "rule", "seen": "seen 1", "meaning": "meaning", "try": "key=1"}]
        assert "findings" not in second
        (folder.path / "health.jsonl").write_text("findings of an older version\n")
        folder.restart()
        assert not (folder.path / "health.jsonl").exists()
