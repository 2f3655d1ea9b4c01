"""The demo as a stranger runs it: one command, and the model learns."""

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.slow(seconds=260)
@pytest.mark.timeout(1200)
def test_demo_learns_and_prints_its_accuracy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "verl.cli", "demo", "--out", str(tmp_path / "demo")],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.rstrip("\n").splitlines()[-1]
    found = re.fullmatch(r"demo: held-out accuracy (\d\.\d\d) -> (\d\.\d\d)", last)
    assert found, last
    before, after = map(float, found.groups())
    assert before <= 0.4
    assert after >= 0.9
    assert "gives the same 300 answers" in done.stdout
    run = tmp_path / "demo" / "grpo"
    assert str(run) in done.stdout
    assert {"config.yaml", "metrics.jsonl", "rollouts", "validation"} <= {path.name for path in run.iterdir()}
