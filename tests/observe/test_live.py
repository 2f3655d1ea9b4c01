"""The live table and the progress line made from it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.scraping import scraping
from tests.tiny_run import tiny_run
from verl.config.load import load_ppo_config
from verl.errors import RolloutError
from verl.observe.console import StepConsole, StepProgress
from verl.observe.live import METRICS, Live, Snapshot, live
from verl.observe.run_folder import RunFolder
from verl.trainer import main_ppo


def test_phases_are_recorded_with_their_step_and_removed_by_a_resume(tmp_path: Path) -> None:
    table = Live()
    with RunFolder(tmp_path) as folder:
        file = folder.phases_dir / "rank_0.jsonl"
        table.record_phases(file, "rank_0")
        for step in (1, 2, 3):
            table.begin_step(step)
            with table.phase("gen"):
                pass
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]
        folder.rewind(1)
        table.begin_step(2)
        with table.phase("again"):  # the file is still open
            pass
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(row["name"], row["step"]) for row in rows] == [("gen", 1), ("again", 2)]
        assert rows[1]["start"] <= rows[1]["end"]
        folder.restart()
        assert file.read_text() == ""
        table.record_phases(None)


def test_a_progress_line_adds_up_ranks_and_says_what_is_waited_for() -> None:
    now = [100.0]
    controller = Snapshot(
        values={
            "responses_wanted": 128,
            "responses_done": 125,
            "rewards_waiting": 12,
            "tool_calls_waiting": 1,
        },
        phases={"step": 50.0, "gen": 58.0},
    )
    ranks = [
        Snapshot(
            "rank_0",
            {"generated_tokens_total": 1000, "sequences_running": 1, "longest_response_tokens": 2113},
        ),
        Snapshot("rank_1", {"generated_tokens_total": 500, "sequences_running": 2, "sequences_waiting": 1}),
    ]
    progress = StepProgress(lambda: [controller, *ranks], lambda: now[0])
    progress.line()
    now[0] = 104.0
    ranks[1].values["generated_tokens_total"] += 400
    assert progress.line() == (
        "gen 46 s  125/128 responses  100 tok/s  waiting for 3 responses being generated, the longest with 2,113 "
        "tokens, 1 sequence not yet started, 1 tool call, 12 rewards"
    )
    controller.phases.clear()
    assert progress.line() == ""


def test_the_documentation_lists_every_live_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for name, metric in METRICS.items():
        assert f"| `verl_{name}` | {metric.kind} | {metric.help} |" in page, name


@pytest.mark.slow(seconds=10)
def test_a_run_counts_its_tokens_responses_rewards_and_steps(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    extra = ["trainer.total_training_steps=2", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert main_ppo.main(tiny_run(tiny_model_dir, digits_data, *extra, folder=tmp_path)) == 0
    values = live.values
    lengths, total = live.snapshot().histograms["response_length_tokens", ""]
    assert values["step"] == values["steps_total"] == 2 and values["last_step_timestamp_seconds"] > 1e9
    assert values["responses_total"] == values["rewards_total"] == sum(lengths) == 2 * 8 * 4
    assert values["generated_tokens_total"] == total, "each token is counted once, when it is drawn"
    assert values["prefilled_tokens_total"] > 0 and values["sample_age"] == 0
    assert values["sequences_running"] == values["sequences_waiting"] == values["rewards_waiting"] == 0
    assert values["responses_done"] == values["responses_wanted"] == 8 * 4
    spans = [json.loads(line) for line in (tmp_path / "phases" / "controller.jsonl").read_text().splitlines()]
    assert [span["step"] for span in spans if span["name"] == "step"] == [1, 2]


def test_piped_output_says_what_a_long_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.observe.console.LINE_S", 0.01)
    out = io.StringIO()
    live.begin_run()
    console = StepConsole(5, console=Console(file=out, width=200, highlight=False))
    with live.phase("step"), live.phase("gen"):
        live.set("responses_wanted", 8)
        live.set("responses_done", 3)
        deadline = time.monotonic() + 120
        while "3/8" not in out.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    console.close()
    lines = out.getvalue().splitlines()
    assert lines[-1].startswith("step 1  gen 0 s  3/8 responses  0 tok/s") and "\x1b" not in out.getvalue()
    live.begin_run()


@pytest.mark.slow(seconds=8)
def test_training_on_a_terminal_shows_the_live_display(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, fork_server: Any
) -> None:
    keys = ["trainer.total_training_steps=2", "trainer.logger=[console]", "trainer.project_name=shown"]
    ours, theirs = pty.openpty()
    process = fork_server.start(
        "verl.trainer.main_ppo",
        tiny_run(tiny_model_dir, digits_data, *keys, folder=tmp_path / "run"),
        output=Path(os.ttyname(theirs)),
        environment={"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal ends whose last process has ended
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(timeout=120) == 0, shown.decode()
    text = shown.decode()
    assert "╭─ shown/" in text and "step 2/2" in text and "\x1b[" in text


def test_a_start_that_fails_frees_the_terminal_and_the_port(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RolloutError("no engine today")

    monkeypatch.setattr("verl.trainer.assembly.build_group", fail)
    keys = tiny_run(
        tiny_model_dir, digits_data, *scraping(), "trainer.total_training_steps=1", folder=tmp_path
    )
    for _ in range(2):
        with pytest.raises(RolloutError, match="today"):
            main_ppo.run(load_ppo_config(keys))
