"""The demo's curve, in a terminal and in piped output, and the commands printed at its end."""

import io
import sys

import pytest

from verl.demo import show
from verl.observe.console import SafeConsole, typed


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


def test_piped_output_ends_with_the_curve_in_plain_text(console):
    out = console(width=100_000, soft_wrap=True)
    steps_of(show.DemoTracker(45, "demo/grpo"))
    rows = out.getvalue().splitlines()
    assert sum(row.startswith("step ") for row in rows) == 16
    assert rows[-10] == "reward 0.02 -> 1.00" and rows[-1] == "." + rows[-1][1:44] + "|"
    assert rows[-9].split() == ["..::|"]
    assert out.getvalue().isascii()


def test_a_terminal_shows_the_curve_while_it_trains(console):
    out = console(width=80, height=24, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    tracker = show.DemoTracker(45, "demo/grpo")
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.75})
    assert "reward 0.75" in out.getvalue() and "█" in out.getvalue()
    tracker.close()


def test_commands_name_the_program_as_this_shell_finds_it(tmp_path, monkeypatch):
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert typed("view") == f"{scripts / 'python'} -m verl.cli view"
    (scripts / "verl").write_text("#!/bin/sh\n")
    (scripts / "verl").chmod(0o755)
    assert typed("view") == f"{scripts / 'verl'} view"
    monkeypatch.chdir(tmp_path)
    assert typed("view") == ".venv/bin/verl view"
    monkeypatch.setenv("PATH", str(scripts))
    assert typed("view") == "verl view"
