"""The demo's chart: where points land, in a terminal and in piped output; and the commands printed at its end."""

import io
import sys

import pytest

from verl.demo import show
from verl.demo.curve import Curve
from verl.observe.console import SafeConsole


def rising(steps=20):
    """A reward from 0 to 1, validated at the beginning, in the middle and at the end."""
    curve = Curve(steps)
    for step in range(steps + 1):
        metrics = {"reward/mean": step / steps} if step else {}
        if step % 10 == 0:
            metrics["val-core/demo/acc/mean@1"] = step / steps
        curve.add(step, metrics)
    return curve


def test_points_are_where_the_axes_say():
    rows = rising().draw(28, 11, ascii_only=True).plain.split("\n")
    legend, chart, floor, steps = rows[0], rows[1:-2], rows[-2], rows[-1]
    assert legend.split() == ["*", "reward", "1.00", "o", "held-out", "accuracy", "1.00"]
    assert [row[:5].strip() for row in chart] == ["1.00", *[""] * 4, "0.50", *[""] * 4, "0.00"]
    assert floor.strip() == "+" + "-" * 21
    assert steps.split() == ["0", "step", "20"]
    # 21 columns for 21 steps, 11 rows for tenths: the reward of step s is s / 20.
    for step in range(0, 21, 2):
        assert chart[10 - step // 2][7 + step] == ("o" if step % 10 == 0 else "*"), step
    assert sum(row.count("*") + row.count("o") for row in chart) == 21


def test_braille_has_eight_dots_in_a_character_and_the_same_frame():
    drawn = rising(200).draw(80, 11)
    rows = drawn.plain.split("\n")
    assert len(rows) == 14 and max(map(len, rows)) == 80
    assert drawn.plain.count("●") == 1 + 21  # the legend and every tenth step
    dots = sum((ord(c) - 0x2800).bit_count() for row in rows[1:-2] for c in row if 0x2800 < ord(c) < 0x2900)
    assert dots > 100
    assert all(mark in rows[index] for mark, index in (("●", 1), ("●", 6), ("●", 11)))


def test_a_run_without_rewards_shows_its_loss():
    curve = Curve(4)
    for step, loss in enumerate((3.2, 2.0, 1.0, 0.5), start=1):
        curve.add(step, {"train/loss": loss})
    curve.add(4, {"val/loss": 0.6})
    text = curve.draw(60, 5).plain
    assert "training loss 0.50" in text and "validation loss 0.60" in text
    assert "4.00 ┤" in text


def test_nothing_is_drawn_without_numbers_or_space():
    curve = Curve(10)
    assert curve.draw(80, 11) is None
    curve.add(1, {"reward/mean": float("nan")})
    assert curve.draw(80, 11) is None
    curve.add(2, {"reward/mean": 0.5})
    assert curve.draw(12, 11) is None
    assert curve.draw(80, 11) is not None


@pytest.fixture
def console(monkeypatch):
    """Replaces the shared console by one that writes to memory."""

    def make(**options):
        out = io.StringIO()
        made = SafeConsole(file=out, **options)
        for module in ("verl.observe.console", "verl.demo.show"):
            monkeypatch.setattr(f"{module}.shared_console", lambda: made)
        return out

    return make


def steps_of(tracker):
    for step in range(1, 46):
        tracker.log(step, {"reward/mean": step / 45})
    tracker.close()


def test_piped_output_ends_with_the_chart_in_plain_text(console):
    out = console(width=100_000, soft_wrap=True)
    steps_of(show.DemoTracker(45, "demo/grpo"))
    rows = out.getvalue().splitlines()
    assert sum(row.startswith("step ") for row in rows) == 16
    assert rows[-1].split() == ["0", "step", "45"] and "* reward 1.00" in rows[-12]
    assert out.getvalue().isascii()


def test_a_terminal_shows_the_chart_while_it_trains(console):
    out = console(width=80, height=24, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    tracker = show.DemoTracker(45, "demo/grpo")
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.75})
    assert "reward 0.75" in out.getvalue() and "step 45" in out.getvalue()
    tracker.close()


def test_commands_name_the_program_as_this_shell_finds_it(tmp_path, monkeypatch):
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert show._program() == [str(scripts / "python"), "-m", "verl.cli"]
    (scripts / "verl").write_text("#!/bin/sh\n")
    (scripts / "verl").chmod(0o755)
    assert show._program() == [str(scripts / "verl")]
    monkeypatch.chdir(tmp_path)
    assert show._program() == [".venv/bin/verl"]
    monkeypatch.setenv("PATH", str(scripts))
    assert show._program() == ["verl"]
