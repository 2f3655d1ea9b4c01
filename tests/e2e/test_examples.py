"""The Python API's example scripts run as they stand, on the demo's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory) -> Path:
    from verl.demo.model import build_model_folder

    folder = tmp_path_factory.mktemp("demo") / "model"
    build_model_folder(folder, seed=0)
    return folder


@pytest.fixture
def run_example(fork_server: Any, tmp_path: Path) -> Callable[..., str]:
    def run(name: str, *arguments: str) -> str:
        output, errors = tmp_path / "output.txt", tmp_path / "errors.txt"
        process = fork_server.start(
            ROOT / "examples" / "python_api" / name,
            arguments,
            output=output,
            errors=errors,
            environment={"PYTHONPATH": str(ROOT)},
        )
        status = process.wait(timeout=800)
        assert status == 0, output.read_text() + errors.read_text()
        return output.read_text()

    return run


@pytest.mark.slow(seconds=8)
def test_grpo_trainer(run_example, demo_model, tmp_path):
    out = run_example(
        "grpo.py", "--model", str(demo_model), "--out", str(tmp_path / "run"), "--prompts", "32"
    )
    assert "after 4 steps" in out
    assert (tmp_path / "run" / "metrics.jsonl").exists() and (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow(seconds=10)
def test_the_arguments_of_trl(run_example, demo_model, tmp_path):
    arguments = ("--model", str(demo_model), "--out", str(tmp_path / "run"))
    assert "after 1 steps" in run_example("trl_form.py", *arguments, "--steps", "1")
    assert "after 2 steps" in run_example("trl_form.py", *arguments, "--steps", "2", "--resume")
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.slow
def test_ppo_trainer(run_example, demo_model, tmp_path):
    out = run_example("ppo.py", "--model", str(demo_model), "--out", str(tmp_path / "run"))
    assert "after 8 steps" in out


@pytest.mark.slow
def test_own_loop_raises_the_reward(run_example, demo_model):
    out = run_example("own_loop.py", "--model", str(demo_model), "--steps", "12")
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in out.splitlines() if "reward" in line]
    assert len(rewards) == 12 and sum(rewards[-3:]) > sum(rewards[:3])
