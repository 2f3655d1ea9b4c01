"""The demo as a stranger runs it: one command, and the model learns; and the same by a loop of one's own."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(3000)  # the demo's time counts for the test that comes first
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    """The folder of the demo and what it printed."""
    folder = tmp_path_factory.mktemp("learns") / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "verl.cli", "demo", "--out", str(folder)],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, done.stdout


def require_learned(text: str) -> None:
    found = re.search(r"held-out accuracy (\d\.\d\d) -> (\d\.\d\d)", text)
    assert found, text[-2000:]
    before, after = map(float, found.groups())
    assert before <= 0.4
    assert after >= 0.9


@pytest.mark.slow(seconds=260)
def test_demo_learns_and_prints_its_accuracy(demo):
    folder, printed = demo
    last = printed.rstrip("\n").splitlines()[-1]
    assert last.startswith("demo: held-out accuracy ")
    require_learned(last)
    assert "gives the same 300 answers" in printed
    run = folder / "grpo"
    assert str(run) in printed
    assert re.search(r"^reward 0.\d\d -> \d.\d\d\n", printed, re.MULTILINE), "the curve"
    assert {"config.yaml", "metrics.jsonl", "rollouts", "validation"} <= {path.name for path in run.iterdir()}
    for stage in ("sft", "grpo"):
        assert '"findings"' not in (folder / stage / "metrics.jsonl").read_text(), (
            "a healthy run alarms nobody"
        )


@pytest.mark.slow(seconds=45)
def test_the_three_commands_at_the_end_work_as_printed(demo):
    folder, printed = demo
    ending = printed.split("what to try next ==\n")[1].splitlines()
    commands = [line for line in ending if line.startswith("  ") and not line.startswith("  #")]
    assert len(commands) == 3
    shown = []
    for command in commands:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        shown.append(done.stdout)
    assert "score 0" in shown[0]
    assert "3 scores; the function can be used" in shown[1]
    assert "step 10/10" in shown[2]
    assert (folder / "grpo" / "report.html").is_file()
    assert "report.html" in printed and (folder / "rloo" / "report.html").is_file()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The same sums on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow(seconds=120)
def test_grpo_on_a_session_reaches_the_accuracy_of_the_demo(demo, one_thread, monkeypatch, capsys):
    """examples/session_grpo.py, from the demo's fine-tuned model."""
    folder, _ = demo
    monkeypatch.setattr(sys, "argv", ["session_grpo.py", "--demo", str(folder)])
    runpy.run_path(str(ROOT / "examples" / "session_grpo.py"), run_name="__main__")
    require_learned(capsys.readouterr().out)
    (saved,) = (folder / "session").glob("global_step_*")
    AutoModelForCausalLM.from_pretrained(saved / "actor" / "huggingface")
