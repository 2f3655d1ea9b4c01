"""`verl view` on a real run, on what a killed one leaves, and on files of every kind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.report_data import report_data
from tests.tiny_run import read_metrics, tiny_run
from verl import cli
from verl.errors import VerlError
from verl.observe.diagnoses import Finding, validation_summary
from verl.observe.run_folder import RunFolder
from verl.observe.run_reader import lock_owner, notices, open_run, state_of
from verl.observe.terminal import while_read
from verl.observe.view import follow, make_console

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def overrides(tiny_model_dir: Path, digits_data: Path) -> list[str]:
    return tiny_run(
        tiny_model_dir,
        digits_data,
        f"data.val_files={digits_data}/val.jsonl",
        "data.train_max_samples=32",
        "data.train_batch_size=16",
        "trainer.test_freq=2",
        "trainer.total_epochs=2",
    )


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the console was told between the steps of the finished run."""
    return []


@pytest.fixture(scope="module")
def finished(overrides: list[str], said: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of two steps: every prompt is met twice."""
    from verl.config.load import load_ppo_config
    from verl.observe.trackers import FanOut
    from verl.trainer.main_ppo import run

    folder = tmp_path_factory.mktemp("view") / "project" / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FanOut, "note", lambda self, text: said.append(text))
        return run(load_ppo_config([*overrides, f"trainer.default_local_dir={folder}"])).folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str = "run") -> Path:
        return Path(shutil.copytree(finished, tmp_path / "project" / name))

    return copy


@pytest.fixture
def view(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def look(*words: object) -> tuple[int, str]:
        code = cli.main(["view", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return look


# -- the whole view -----------------------------------------------------------------------------------------------


def test_a_run_is_shown_whole(
    finished: Path, tiny_model_dir: Path, view: Callable[..., tuple[int, str]]
) -> None:
    code, out = view(finished)
    assert code == 0
    for told in (str(tiny_model_dir), "grpo, 16 prompts x 4 responses", f"finished after step {STEPS}"):
        assert told in out
    for part in (
        "reward/mean",
        "val-core/digits",
        "actor/entropy",
        "response_length/mean",
        "perf/throughput",
    ):
        assert part in out, part
    for part in ("findings", "timing_s/gen", "timing_s/update_actor", "best: step 4", "worst: step 4"):
        assert part in out, part


def test_the_numbers_shown_are_those_of_the_files(
    finished: Path, view: Callable[..., tuple[int, str]]
) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    _, out = view(finished)
    (line,) = [line for line in out.splitlines() if line.startswith("reward/mean")]
    assert line.split()[1:4] == [f"{rewards[0]:.4g}", f"{rewards[-1]:.4g}", str(STEPS)]


def test_a_pipe_gets_plain_text(finished: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl", "view", str(finished)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "TERM": "xterm-256color"},
    )
    assert done.returncode == 0 and "\x1b" not in done.stdout and "reward/mean" in done.stdout


def test_a_terminal_without_unicode_gets_ascii(finished: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl", "view", str(finished)],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"reward/mean" in done.stdout


@pytest.mark.parametrize("command", ["view", "--help", "recipes", "completion bash"])
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(
    finished: Path, command: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [*command.split(), *([str(finished)] if command == "view" else [])]
    done = subprocess.run(
        [sys.executable, "-m", "verl", *words], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == b"", done.stderr


def test_a_pipe_that_is_not_the_output_breaks_with_an_error() -> None:
    def command() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        while_read(command)


def test_chosen_metrics_are_shown(finished: Path, view: Callable[..., tuple[int, str]]) -> None:
    _, out = view(finished, "--metric", "critic/score/*")
    assert "critic/score/max" in out and "actor/entropy" not in out.split("findings")[0]
    code, out = view(finished, "--metric", "no/such")
    assert code == 2 and "reward/mean" in out


def test_html_is_written_anew(copied: Callable[..., Path], view: Callable[..., tuple[int, str]]) -> None:
    folder = copied()
    (folder / "report.html").unlink()
    code, out = view(folder, "--html")
    assert code == 0 and str(folder / "report.html") in out
    rewards = report_data(folder / "report.html")["run/0/metrics.json"]["series"]["reward/mean"]
    assert rewards == [row.get("reward/mean") for row in read_metrics(folder)]


# -- which run ----------------------------------------------------------------------------------------------------


def test_a_project_lists_its_runs_the_newest_first(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    copied("newer")
    older = copied("older")
    for name in ("metrics.jsonl", "config.yaml"):
        os.utime(older / name, (1e9, 1e9))
    code, out = view(older.parent)
    assert code == 0 and out.index("project/newer") < out.index("project/older")
    assert f"{STEPS}" in out and "finished" in out
    rows = [row for row in read_metrics(older) if any(name.startswith("val-core/") for name in row)]
    first, last = (validation_summary(row) for row in (rows[0], rows[-1]))
    assert f"{first:.3g} -> {last:.3g}" in out
    above = view(older.parent.parent)[1]
    assert above.index("project/newer") < above.index("project/older")


def test_without_a_run_the_newest_below_checkpoints_is_shown(
    copied: Callable[..., Path],
    view: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out = view()
    assert code == 2 and "checkpoints does not exist" in out
    folder = copied()
    shutil.copytree(folder, tmp_path / "checkpoints" / "verl" / "mine")
    assert "verl/mine" in view()[1]


def test_what_is_no_run_is_refused(view: Callable[..., tuple[int, str]]) -> None:
    code, out = view("nowhere")
    assert code == 2 and "does not exist" in out


def test_a_folder_without_runs_is_refused(tmp_path: Path, view: Callable[..., tuple[int, str]]) -> None:
    code, out = view(tmp_path)
    assert code == 2 and "there is no run in or below" in out


# -- states -------------------------------------------------------------------------------------------------------


def test_a_run_that_holds_its_folder_is_running_and_looking_does_not_disturb_it(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from verl.observe.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]) as folder:\n"
        "    folder.append_metrics(1, {'reward/mean': 0.5})\n"
        "    sys.stdout.write('open\\n'); sys.stdout.flush()\n"
        "    sys.stdin.readline()\n"
    )
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "open\n"
    owner, alive = lock_owner(folder)
    assert alive and f"process {process.pid}" in owner
    assert state_of(open_run(folder)).name == "running"
    with pytest.raises(VerlError, match="in use by another run"):  # still locked after we looked
        RunFolder(folder)
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait() == 0
    assert lock_owner(folder) == ("", False)
    assert state_of(open_run(folder)).name == "killed"


def test_looking_from_within_the_process_of_the_run_keeps_its_lock(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        assert state_of(open_run(folder.path)).name == "running"
        ask = "import sys; from verl.observe.run_folder import RunFolder; RunFolder(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", ask, str(folder.path)], cwd=ROOT, capture_output=True, text=True
        )
        assert "in use by another run" in done.stderr


def test_a_process_that_started_after_the_lock_is_not_its_owner(tmp_path: Path) -> None:
    import socket

    (tmp_path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    assert lock_owner(tmp_path)[1] is True
    os.utime(tmp_path / ".lock", (1e9, 1e9))
    assert lock_owner(tmp_path)[1] is False


def test_finished_stopped_killed_and_crashed_are_told_apart(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    folder = copied()
    assert state_of(open_run(folder)).name == "finished"
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("total_epochs: 2", "total_epochs: 9"))
    state = state_of(open_run(folder))
    assert state.name == "stopped" and f"resumes at step {STEPS}" in state.text
    shutil.rmtree(folder / f"global_step_{STEPS}")
    assert state_of(open_run(folder)).name == "killed"
    with RunFolder(folder) as opened:
        opened.write_crash(RuntimeError("CUDA out of memory"), "data.max_response_length=2")
    assert state_of(open_run(folder)).name == "crashed"
    out = view(folder)[1]
    assert "crashed: RuntimeError: CUDA out of memory" in out and "data.max_response_length=2" in out


def test_a_run_of_another_machine_may_well_be_running(copied: Callable[..., Path]) -> None:
    """Its lock cannot always be seen from here; what it wrote, and when, can."""
    folder = copied()
    shutil.rmtree(folder / f"global_step_{STEPS}")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("total_epochs: 2", "total_epochs: 9"))
    (folder / ".lock").write_text("process 7 on another-machine\n")
    state = state_of(open_run(folder))
    assert state.name == "running" and "probably running (process 7 on another-machine)" in state.text
    for name in ("metrics.jsonl", "config.yaml"):
        os.utime(folder / name, (1e9, 1e9))
    assert state_of(open_run(folder)).name == "killed"


def test_a_run_that_writes_no_more_may_hang(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics(1, {"timing_s/step": 5.0})
        assert "may hang" not in state_of(open_run(folder.path)).text
        os.utime(folder.metrics_file, (1e9, 1e9))
        assert "may hang" in state_of(open_run(folder.path)).text


def test_earlier_crashes_and_bad_batches_are_mentioned(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    folder = copied()
    (folder / "crash.previous.txt").write_text("OSError: the disk was full\n\nWhen: then\n")
    (folder / "bad_batches").mkdir()
    (folder / "bad_batches" / "3.pt").touch()
    out = view(folder)[1]
    assert "an earlier start crashed: OSError: the disk was full" in out
    assert "1 batches without a finite gradient" in out


def test_a_run_before_its_first_step_is_shown(tmp_path: Path, view: Callable[..., tuple[int, str]]) -> None:
    RunFolder(tmp_path / "run").close()
    code, out = view(tmp_path / "run")
    assert code == 0 and "no step has finished" in out


# -- damage and size ----------------------------------------------------------------------------------------------


def test_a_half_written_line_waits_and_a_damaged_one_is_counted(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    folder = copied()
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe no json\n[1, 2]\n{"step": 5, "reward/mean": 0.25}\n{"step": 6, "rew')
    run = open_run(folder)
    assert run.log.damaged == 2 and run.log.last()["step"] == 5
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'ard/mean": 0.75}\n')
    assert [row["step"] for row in run.log.poll()] == [6] and run.log.poll() == []
    assert "2 lines of metrics.jsonl cannot be read" in view(folder)[1]


def test_every_file_may_be_missing(copied: Callable[..., Path], view: Callable[..., tuple[int, str]]) -> None:
    folder = copied()
    for name in ("rollouts", "validation"):
        shutil.rmtree(folder / name)
    (folder / "config.yaml").unlink()
    code, out = view(folder)
    assert code == 0 and "there is no config.yaml" in out
    (folder / "config.yaml").write_text("a: [1\n")
    assert "config.yaml cannot be read" in view(folder)[1]
    (folder / "metrics.jsonl").unlink()
    code, out = view(folder)
    assert code == 0 and "no step has finished" in out
    code, out = view(folder, "--best", "1")
    assert code == 2 and "there are no samples" in out


def test_a_run_that_went_back_in_time_is_read_anew(copied: Callable[..., Path]) -> None:
    folder = copied()
    run = open_run(folder)
    assert run.log.last()["step"] == STEPS
    with RunFolder(folder) as opened:
        opened.rewind(2)
        assert run.log.poll() and run.log.last()["step"] == 2
        assert [step for step, _ in run.log.points("reward/mean")] == [1, 2]


# -- findings -----------------------------------------------------------------------------------------------------


def test_what_the_diagnoses_reported_is_shown_with_its_steps(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    folder = copied()
    with RunFolder(folder) as opened:
        for step, rule, seen in (
            (5, "kl", "kl is 7.5"),
            (25, "kl", "kl is 8.5"),
            (45, "not_finite", "a is nan"),
        ):
            opened.append_metrics(step, {"reward/mean": 0.1}, [Finding(rule, seen, "too far", "lr=1e-6")])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 45, "findings": 3}\n{"step": 45, "findings": [7, {"rule": "x"}]}\n')
        file.write('{"step": 46, "findings": [{"rule"')
    found = notices(open_run(folder))
    kl = next(notice for notice in found if notice.finding.rule == "kl")
    assert (kl.finding.seen, kl.first, kl.last, kl.times, kl.recent) == ("kl is 8.5", 5, 25, 2, False)
    assert found[0].finding.seen == "a is nan" and found[0].recent
    out = view(folder)[1]
    assert "step 45: a is nan: too far. Try lr=1e-6" in out
    assert "steps 5-25, 2 times: kl is 8.5: too far. Try lr=1e-6" in out


def test_findings_of_a_run_that_kept_them_in_a_file_of_their_own_are_shown(
    copied: Callable[..., Path],
) -> None:
    folder = copied()
    lines = ('{"step": 2, "rule": "old", "line": "kl is 7.5. Set lr"}', "no json", '{"step": 3, "rule"')
    (folder / "health.jsonl").write_text("\n".join(lines))
    assert "kl is 7.5. Set lr" in [notice.finding.line for notice in notices(open_run(folder))]


def test_the_view_and_the_report_have_the_findings_the_console_had(
    finished: Path, said: list[str], view: Callable[..., tuple[int, str]]
) -> None:
    assert any("were cut at data.max_response_length=4" in line for line in said)
    assert sorted(notice.finding.line for notice in notices(open_run(finished))) == sorted(said)
    out = view(finished)[1]
    rows = report_data(finished / "report.html")["run/0/summary.json"]["findings"]
    assert sorted(Finding.from_row(row).line for row in rows) == sorted(said)
    assert all(line in out for line in said) and "nothing to report" not in out


# -- following ----------------------------------------------------------------------------------------------------


def test_following_shows_each_line_as_it_comes_and_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run writes between two looks, as the pauses say: no clock is involved."""
    folder = RunFolder(tmp_path / "run")
    folder.append_metrics(1, {"reward/mean": 0.1})
    run = open_run(folder.path)
    steps = iter([2, 3])

    def pause(seconds: float) -> None:
        number = next(steps, None)
        if number is None:
            folder.close()
        else:
            folder.append_metrics(number, {"reward/mean": number / 10})

    state = follow(run, make_console(), pause=pause)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["step 1", "step 2", "step 3"]
    assert state.name == "killed" and "killed after step 3" in lines[-1]


def test_following_a_run_that_is_over_ends_at_once(
    finished: Path, view: Callable[..., tuple[int, str]]
) -> None:
    code, out = view("--follow", finished)
    assert code == 0 and f"finished after step {STEPS}" in out.splitlines()[-1]


def test_ctrl_c_ends_the_following_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics(1, {"reward/mean": 0.1})

        def pause(seconds: float) -> None:
            raise KeyboardInterrupt

        assert follow(open_run(folder.path), make_console(), pause=pause).name == "running"


def test_on_a_terminal_the_whole_view_is_drawn_anew(tmp_path: Path, finished: Path) -> None:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=60)
    run = open_run(finished)
    follow(run, console, pause=lambda seconds: None)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[?1049h" in drawn and "\x1b[?1049l" in drawn  # the other screen is entered and left
    assert "finished after step" in drawn.split("\x1b[?1049l")[1]


def test_an_interrupt_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """The real command on a real terminal, while the run goes on."""
    ours, theirs = os.openpty()
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics(1, {"reward/mean": 0.5})
        process = subprocess.Popen(
            [sys.executable, "-m", "verl", "view", "--follow", str(folder.path)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
            # Tests that run in a shell's background were told to ignore it, and what they start inherits that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        shown = b""
        while b"reward/mean" not in shown:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            shown += data
        assert process.wait() == 0, shown
    os.close(ours)
    assert b"Traceback" not in shown, shown.decode()
    assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown


# -- samples of a real run ----------------------------------------------------------------------------------------


def test_a_prompt_is_found_in_every_epoch(finished: Path, view: Callable[..., tuple[int, str]]) -> None:
    uid = next(open_run(finished).samples("rollouts").rows(1))["uid"]
    number = uid.split("-")[1]
    out = view(finished, "--id", uid)[1]
    assert out.count(f"uid 0-{number} ") == out.count(f"uid 1-{number} ") == 4
    assert view(finished, "--id", number)[1] == out
    validated = view(finished, "--id", "3", "--val")[1]
    assert [step for step in range(5) if f"step {step} " in validated] == [0, 2, 4]
    rows = [row for row in open_run(finished).log.rows if row["step"]]
    assert [row["training/epoch"] for row in rows] == [0, 0, 1, 1], (
        "a step belongs to the epoch of its prompts"
    )
    assert [row["training/epochs_done"] for row in rows] == [0, 1, 1, 2]


def test_threads_may_look_while_the_run_writes(tmp_path: Path) -> None:
    """A reader beside a writer sees every line exactly once, whole."""
    folder = RunFolder(tmp_path / "run")
    done = threading.Event()

    def write() -> None:
        for step in range(300):
            folder.append_metrics(step, {"reward/mean": step / 300, "text": "x" * 500})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    run = open_run(folder.path)
    seen = [row["step"] for row in run.log.rows]
    while not done.is_set():
        seen += [row["step"] for row in run.log.poll()]
    seen += [row["step"] for row in run.log.poll()]
    writer.join()
    folder.close()
    assert seen == list(range(300)) and run.log.damaged == 0


def test_numbers_are_short_and_prompts_without_the_marks_of_templates(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    run = copied()
    turns = ("system\nBe brief.<|im_end|>", "user\nIs 1 < 2 |> 3?<|im_end|>", "assistant\n")
    prompt = "\n".join(f"<|im_start|>{turn}" for turn in turns)
    row = {
        "uid": "0-1",
        "prompt": prompt,
        "response": "<|yes|>",
        "score": 1.0,
        "advantage": -2.4748666286468506,
    }
    (run / "rollouts" / f"{STEPS}.jsonl").write_text(json.dumps(row) + "\n")
    _, text = view(run, "--best", "1")
    assert "score 1  advantage -2.475" in text and "<|yes|>" in text
    shown = [line.strip() for line in text.splitlines()]
    assert shown[1:6] == ["prompt      system", "Be brief.", "user", "Is 1 < 2 |> 3?", "assistant"]
    assert "<|im_start|>user" in view(run, "--best", "1", "--full")[1], (
        "in full they are as the model saw them"
    )


def test_agents_numbers_are_shown_and_only_phases_that_take_time(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    run = copied()
    agents = {"agents/turns/mean": 3.0, "tools/calls/all": 4.0, "tools/failed/all": 0.0}
    times = {"timing_s/step": 10.0, "timing_s/gen": 8.0, "timing_s/adv": 0.01}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **agents, **times}) + "\n")
    first = {line.split(" ")[0] for line in view(run)[1].splitlines()}
    assert first & (agents | times).keys() == {
        "agents/turns/mean",
        "tools/calls/all",
        "timing_s/step",
        "timing_s/gen",
    }


def test_a_conversation_is_shown_turn_by_turn(
    copied: Callable[..., Path], view: Callable[..., tuple[int, str]]
) -> None:
    run = copied()
    row = {
        "uid": "0-1",
        "prompt": "What is 2*3?",
        "response": "all of it",
        "score": 1.5,
        "turns": [
            {"role": "assistant", "content": "calling multiply", "reward": 0.5},
            {"role": "tool", "content": "the product is 6"},
            {"role": "assistant", "content": "It is 6."},
        ],
    }
    (run / "rollouts" / f"{STEPS}.jsonl").write_text(json.dumps(row) + "\n")
    code, text = view(run, "--grep", "PRODUCT")
    lines = [line.strip() for line in text.splitlines()]
    assert code == 0 and "all of it" not in text
    shown = [line.split(maxsplit=2) for line in lines if line[:1].isdecimal()]
    assert shown == [
        ["1", "assistant", "calling multiply"],
        ["2", "tool", "the product is 6"],
        ["3", "assistant", "It is 6."],
    ]
    assert "(reward 0.5)" in lines and "at the end  reward 1" in lines
    played = row | {"score": float(np.float32(-0.3)), "turns": [{"role": "assistant", "reward": -0.1}] * 3}
    (run / "rollouts" / f"{STEPS}.jsonl").write_text(json.dumps(played) + "\n")
    assert "at the end  reward 0\n" in view(run, "--step", str(STEPS))[1]  # a sum in single precision
    (run / "rollouts" / f"{STEPS}.jsonl").write_text(json.dumps(row) + "\n")
    view(run, "--html")
    data = report_data(run / "report.html")
    groups = [chunk["groups"] for path, chunk in data.items() if path.startswith("run/0/groups/rollouts/")]
    rows = [each for chunk in groups for group in chunk.values() for each in group["rows"]]
    assert [each["turns"] for each in rows if each["prompt"] == row["prompt"]] == [row["turns"]]
