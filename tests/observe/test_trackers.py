"""Trackers and console: what reaches the user."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verl.errors import ConfigError, MissingPackage
from verl.observe import trackers as module
from verl.observe.console import StepConsole, sparkline, step_line
from verl.observe.run_folder import RunFolder
from verl.observe.trackers import FanOut, FileTracker, build_trackers, register_tracker

METRICS = {
    "reward/mean": 0.4375,
    "response_length/mean": 84.6,
    "actor/pg_loss": -0.00123,
    "actor/entropy": 1.25,
    "actor/grad_norm": 0.512,
    "perf/throughput": 3210.4,
    "timing_s/step": 2.34,
    "val-core/x/acc/mean@1": 0.5,
}


class Broken:
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise ConnectionError("no route")

    def log_samples(self, step: int, rows: list[Any]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


def test_a_step_is_one_line_with_the_numbers_that_matter() -> None:
    line = step_line(7, METRICS, total_steps=100)
    assert line == (
        "step   7/100  reward 0.438  length 85  loss -0.0012  entropy 1.250  grad 0.51  tok/s 3,210  time 2.3s"
        "  validation 0.500"
    )
    assert step_line(3, {"actor/grad_norm": float("nan"), "actor/kl": 1e-7}) == "step 3  kl 1.0e-07  grad nan"


def test_piped_output_is_plain_lines_even_when_live_is_asked_for() -> None:
    out = io.StringIO()
    console = StepConsole(5, live=True, console=Console(file=out, width=200, highlight=False))
    console.log(1, METRICS)
    console.note("[not markup] <stays>")
    console.close()
    assert out.getvalue().splitlines() == [step_line(1, METRICS, 5), "[not markup] <stays>"]


def test_a_step_that_does_not_fit_continues_below_its_first_number() -> None:
    line = step_line(7, METRICS, total_steps=100, width=80)
    assert line.splitlines() == [
        "step   7/100  reward 0.438  length 85  loss -0.0012  entropy 1.250  grad 0.51",
        "              tok/s 3,210  time 2.3s  validation 0.500",
    ]
    assert step_line(7, METRICS, width=5).splitlines()[:2] == ["step 7", "        reward 0.438"]


def test_preferences_show_accuracy_and_margin_at_each_step() -> None:
    metrics = {"train/loss": 0.69, "train/accuracy": 0.75, "train/margin": 0.012, "val/accuracy": 0.5}
    assert step_line(1, metrics) == "step 1  loss 0.6900  accuracy 0.750  margin +0.012  val accuracy 0.500"


def screen(written: str, height: int = 60) -> list[str]:
    """The lines that a terminal shows after rich wrote this."""
    rows, row = [""] * height, 0
    for mark in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", written):
        if mark == "\n":
            row += 1
        elif mark == "\x1b[2K":
            rows[row] = ""
        elif mark == "\x1b[1A":
            row -= 1
        elif mark[0] not in "\x1b\r":
            rows[row] += mark
    return rows


def test_on_a_terminal_the_steps_stay_above_a_live_display_with_a_named_curve() -> None:
    out = io.StringIO()
    console = StepConsole(
        2, live=True, console=Console(file=out, width=120, force_terminal=True, _environ={})
    )
    console.log(1, METRICS)
    console.note("halfway")
    console.log(2, METRICS | {"reward/mean": 0.9})
    console.close()
    shown = screen(out.getvalue())
    assert shown[0].startswith("step 1/2  reward 0.438") and shown[1] == "halfway"
    assert shown[2].startswith("step 2/2  reward 0.900") and shown[3].startswith("╭─ training")
    assert shown[5].startswith("│ reward 0.438 -> 0.9  ▁█")


def test_a_step_that_does_not_stay_is_in_the_display_until_the_next() -> None:
    out = io.StringIO()
    console = StepConsole(
        3, live=True, console=Console(file=out, width=120, force_terminal=True, _environ={})
    )
    console.log(1, {"reward/mean": 0.25}, stays=False)
    console.log(2, {"reward/mean": 0.5}, stays=False)
    console.close()
    shown = "\n".join(screen(out.getvalue()))
    assert "step 1/3" not in shown and "│ step 2/3  reward 0.500" in shown


@pytest.mark.parametrize("rows", [1, 5])
def test_a_live_display_keeps_its_height(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Else what one thread prints while another draws would erase steps above it, or leave parts of it there."""
    console = StepConsole(
        9,
        live=True,
        rows=rows,
        console=Console(file=io.StringIO(), width=80, force_terminal=True, _environ={}),
    )
    metrics = {**METRICS, "actor/kl_loss": 0.1}
    heights = []

    def measure() -> None:
        lines = console.console.render_lines(console._panel())
        heights.append(len(lines))

    try:
        console.log(1, metrics, stays=False)
        measure()
        for step, progress in ((2, "gen 1 s"), (3, "gen 1 s  " + "waiting for " * 20), (4, "")):
            monkeypatch.setattr(console._progress, "line", lambda progress=progress: progress)
            for stays in (False, True):
                console.log(step, metrics, stays=stays)
                measure()
    finally:
        console.close()
    assert len(set(heights)) == 1
    framed = console.console.render_lines(console._panel(), pad=False)
    assert {len("".join(part.text for part in line)) for line in framed} == {76}  # `^C^C` fits beside it


def test_sparkline_scales_to_its_range() -> None:
    assert sparkline([0.0, 1.0, float("nan"), 0.5]) == "▁█▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0, 5.0], rows=2, marks=".|").splitlines() == ["   |", "..||"]
    assert sparkline([0.0, 1.0, 2.0, 3.0], width=3, rows=3, marks="#").splitlines() == ["  #", " ##", "###"]


def test_the_file_is_always_written_and_failing_trackers_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder(tmp_path) as run, caplog.at_level(logging.WARNING):
        fan = FanOut({"wandb": Broken(), "file": FileTracker(run)})
        fan.log(1, {"a": 1.0})
        fan.log(2, {"a": 2.0})
        fan.close()
        assert [row["a"] for row in run.read_metrics()] == [1.0, 2.0]
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1
    assert "'wandb' failed (ConnectionError: no route)" in warnings[0]


def test_a_file_that_cannot_be_written_is_said_each_time_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder(tmp_path) as run, caplog.at_level(logging.WARNING):
        (tmp_path / "metrics.jsonl").mkdir()
        fan = build_trackers([], "p", "e", {}, run)
        fan.log(1, {})
        fan.log(2, {})
    assert len([r for r in caplog.records if "could not be written" in r.getMessage()]) == 2


def test_an_unknown_logger_lists_the_known_ones(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path) as run,
        pytest.raises(ConfigError, match="'wandbb'.*console, file, wandb, tensorboard"),
    ):
        build_trackers(["console", "wandbb"], "p", "e", {}, run)


@pytest.mark.parametrize(
    ("name", "module_name"),
    [(name, name) for name in ("wandb", "mlflow", "trackio", "swanlab")]
    + [("tensorboard", "torch.utils.tensorboard")],
)
def test_a_missing_package_is_named_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module_name: str
) -> None:
    monkeypatch.setitem(sys.modules, module_name, None)
    with RunFolder(tmp_path) as run, pytest.raises(MissingPackage, match=f"pip install .{name}>="):
        build_trackers(name, "p", "e", {}, run)


def test_tensorboard_files_hold_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunFolder(tmp_path) as run:
        fan = build_trackers("tensorboard", "p", "e", {}, run)
        fan.log(1, {"reward/mean": 0.25, "step": 1})
        fan.log(2, {"reward/mean": 0.75, "step": 2})
        fan.log_samples(2, [{"prompt": "1+1", "response": "2"}])
        fan.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("step")] == [(1, 1.0), (2, 2.0)]
    (sample,) = events.Tensors("validation/sample_0/text_summary")
    assert sample.step == 2 and b"**response**: 2" in sample.tensor_proto.string_val[0]


def test_a_registered_tracker_can_be_named_and_built_in_names_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_registered", {})
    seen: list[tuple[int, float]] = []

    @register_tracker("mine")
    def build(project: str, experiment: str, config: Mapping[str, Any], run: RunFolder) -> Any:
        class Mine(Broken):
            def log(self, step: int, metrics: Mapping[str, Any]) -> None:
                seen.append((step, metrics["a"]))

        return Mine()

    with RunFolder(tmp_path) as run:
        build_trackers(["mine"], "p", "e", {}, run).log(4, {"a": 1.0})
    assert seen == [(4, 1.0)]
    with pytest.raises(ConfigError, match="'console' is taken"):
        register_tracker("console")
