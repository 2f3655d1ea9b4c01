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
        timeout=1100,
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
@pytest.mark.timeout(1200)
def test_demo_learns_and_prints_its_accuracy(demo):
    folder, printed = demo
    last = printed.rstrip("\n").splitlines()[-1]
    assert last.startswith("demo: held-out accuracy ")
    require_learned(last)
    assert "gives the same 300 answers" in printed
    run = folder / "grpo"
    assert str(run) in printed
    assert {"config.yaml", "metrics.jsonl", "rollouts", "validation"} <= {path.name for path in run.iterdir()}
    for stage in ("sft", "grpo"):
        assert '"findings"' not in (folder / stage / "metrics.jsonl").read_text(), (
            "a healthy run alarms nobody"
        )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The same sums on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow(seconds=120)
@pytest.mark.timeout(1800)
def test_grpo_on_a_session_reaches_the_accuracy_of_the_demo(demo, one_thread, monkeypatch, capsys):
    """examples/session_grpo.py, from the demo's fine-tuned model."""
    folder, _ = demo
    monkeypatch.setattr(sys, "argv", ["session_grpo.py", "--demo", str(folder)])
    runpy.run_path(str(ROOT / "examples" / "session_grpo.py"), run_name="__main__")
    require_learned(capsys.readouterr().out)
    (saved,) = (folder / "session").glob("global_step_*")
    AutoModelForCausalLM.from_pretrained(saved / "actor" / "huggingface")
