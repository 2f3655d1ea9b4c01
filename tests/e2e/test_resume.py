"""A run that was stopped goes on as if it had not been: through the real command's code path."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def untimed(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(("timing", "perf/"))} for row in rows]


@pytest.mark.parametrize(
    "extra",
    [
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        pytest.param(
            (
                "algorithm.adv_estimator=gae",
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.type=adaptive",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["grpo", "ppo"],
)
def test_metrics_after_resuming_equal_those_of_an_uninterrupted_run(train, digits_data, extra):
    common = (
        *extra,
        "trainer.test_freq=2",
        f"data.val_files={digits_data}/val.jsonl",
        "algorithm.use_pf_ppo=True",
    )
    whole = train(*common, "trainer.total_training_steps=5", folder="whole")
    train(*common, "trainer.total_training_steps=3", folder="parts")
    parts = train(*common, "trainer.total_training_steps=5", folder="parts")
    by_step = {row["step"]: row for row in untimed(parts)}
    for row in untimed(whole):
        if row["step"] > 3:
            assert by_step[row["step"]] == row
    assert sorted(by_step) == [row["step"] for row in whole]


@pytest.mark.timeout(1200)
def test_sigterm_saves_and_the_same_command_goes_on(overrides, tmp_path, fork_server):
    steps = 100_000
    log = tmp_path / "log.txt"

    def command(steps: int) -> Any:
        arguments = overrides(f"trainer.total_training_steps={steps}")
        environment = {"PYTHONPATH": str(ROOT)}
        return fork_server.start("verl.trainer.main_ppo", arguments, output=log, environment=environment)

    process = command(steps)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    try:
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it does not end: {log.read_text()[-3000:]}")
    finally:
        process.kill()
    assert code == 0, log.read_text()[-3000:]
    reached = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= reached < steps
    assert (tmp_path / "run" / f"global_step_{reached}" / "actor" / "huggingface" / "config.json").exists()

    assert command(reached + 1).wait(timeout=400) == 0, log.read_text()[-3000:]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, reached + 2))


def test_the_saved_model_is_an_ordinary_folder_with_the_trained_weights(train, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train("trainer.total_training_steps=2")
    folder = tmp_path / "run" / "global_step_2" / "actor" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    text = tokenizer.apply_chat_template([{"role": "user", "content": "repeat 3"}], tokenize=False)
    assert torch.isfinite(model(**tokenizer(text, return_tensors="pt")).logits).all()


def test_a_checkpoint_without_its_line_in_the_metrics_brings_it_along(train, tmp_path):
    """Killed after the checkpoint got its name and before its step was logged."""
    whole = train("trainer.total_training_steps=3", folder="whole")
    train("trainer.total_training_steps=2", folder="parts")
    metrics = tmp_path / "parts" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert untimed(train("trainer.total_training_steps=3", folder="parts")) == untimed(whole)


def test_a_checkpoint_knows_the_health_of_its_own_step(train, monkeypatch):
    from verl.checkpoint import CheckpointManager

    seen, save = [], CheckpointManager.save

    def watched(self, step, parts, state, **more):
        seen.append((step, state["health"]["steps"][-1][0]))
        return save(self, step, parts, state, **more)

    monkeypatch.setattr(CheckpointManager, "save", watched)
    train("trainer.total_training_steps=2", "trainer.save_freq=1")
    assert seen == [(1, 1), (2, 2)]
