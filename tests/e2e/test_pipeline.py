"""Fine-tuning, preferences, rewards, merge and evaluation as one script (examples/pipeline/run.sh)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow(seconds=90), pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_step_starts_from_the_model_of_the_one_before(tmp_path):
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", str(ROOT / "examples/pipeline/run.sh"), str(out), "60", "12", "3"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    fine_tuning, preferences, rewards = (metrics(out / name) for name in ("sft", "dpo", "grpo"))
    assert fine_tuning[-1]["val/loss"] < fine_tuning[0]["train/loss"]
    assert preferences[0]["train/margin"] == pytest.approx(0.0, abs=1e-4)
    assert preferences[-1]["val/margin"] > 0.0
    # The merged folder gives the answers the trained policy gave.
    (name,) = (name for name in rewards[-1] if name.startswith("val-core/") and name.endswith("/mean@1"))
    scored = json.loads((out / "scores.json").read_text())
    assert f"{rewards[-1][name]:.6f}" in {f"{value:.6f}" for value in numbers(scored)}, (scored, rewards[-1])


def numbers(tree: object) -> list[float]:
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in numbers(value)]
    return [float(tree)] if isinstance(tree, int | float) else []
