"""A stopped run resumes with the results of an uninterrupted one, through the code path of the real command."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import untimed
from verl.errors import VerlError
from verl.runtime import STOPPED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "extra",
    [
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        pytest.param(
            (
                "algorithm.adv_estimator=gae",
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.type=adaptive",
                "actor_rollout_ref.actor.optim.name=muon",
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
@pytest.mark.slow(seconds=8)
def test_sigterm_saves_and_the_same_command_resumes(overrides, tmp_path, fork_server):
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
    assert code == STOPPED, log.read_text()[-3000:]
    reached = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= reached < steps
    assert (tmp_path / "run" / f"global_step_{reached}" / "actor" / "huggingface" / "config.json").exists()

    assert command(reached + 1).wait(timeout=400) == 0, log.read_text()[-3000:]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, reached + 2))


def test_the_saved_model_is_a_hugging_face_folder(train, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train("trainer.total_training_steps=2")
    folder = tmp_path / "run" / "global_step_2" / "actor" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    text = tokenizer.apply_chat_template([{"role": "user", "content": "repeat 3"}], tokenize=False)
    assert torch.isfinite(model(**tokenizer(text, return_tensors="pt")).logits).all()


@pytest.mark.slow(seconds=2)
def test_resuming_restores_a_line_missing_in_the_metrics(train, tmp_path):
    """Killed after the checkpoint was committed and before its step was logged."""
    whole = train("trainer.total_training_steps=3", folder="whole")
    train("trainer.total_training_steps=2", folder="parts")
    metrics = tmp_path / "parts" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert untimed(train("trainer.total_training_steps=3", folder="parts")) == untimed(whole)


def test_a_checkpoint_contains_the_health_state_of_its_step(train, monkeypatch):
    from verl.checkpoint import CheckpointManager

    seen, save = [], CheckpointManager.save

    def watched(self, step, parts, state, **more):
        seen.append((step, state["health"]["steps"][-1][0]))
        return save(self, step, parts, state, **more)

    monkeypatch.setattr(CheckpointManager, "save", watched)
    train("trainer.total_training_steps=2", "trainer.save_freq=1")
    assert seen == [(1, 1), (2, 2)]


def forge(folder: Path, name: str, change: Callable[[dict], object]) -> None:
    """Other contents of a JSON file of a checkpoint, with the right checksums."""
    from verl.checkpoint.files import record_of
    from verl.checkpoint.manifest import read_manifest, write_manifest

    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))
    manifest = read_manifest(folder)
    files = {each: record_of(folder / each) for each in manifest.files}
    write_manifest(folder, replace(manifest, files=files), replace=True)


@pytest.mark.slow(seconds=4)
def test_an_unusable_newest_checkpoint_and_damaged_metrics_cost_one_step(train, tmp_path, caplog):
    """A forged state in the newest checkpoint; truncated and foreign lines in the metrics."""
    common = ("trainer.save_freq=1", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    whole = train(*common, "trainer.total_training_steps=3", folder="whole")
    run = tmp_path / "parts"
    train(*common, "trainer.total_training_steps=2", folder="parts")
    forge(run / "global_step_2", "trainer_state.json", lambda state: state["loader"].update(position="x"))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    damaged = [lines[0], lines[1][:700] + '{"step": "x"}\n', "[1]\n", lines[1]]
    (run / "metrics.jsonl").write_text("".join(damaged))
    assert untimed(train(*common, "trainer.total_training_steps=3", folder="parts")) == untimed(whole)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        sum("global_step_2 is skipped: The saved loader position is damaged" in each for each in warnings)
        == 1
    )
    assert sum("2 lines are left out" in each for each in warnings) == 1
    assert (run / "report.html").exists() and (run / "global_step_2.earlier").is_dir()


def test_an_invalid_state_leaves_the_loop_unchanged(overrides):
    import torch

    from verl.config.load import load_ppo_config
    from verl.trainer.assembly import build_loop, open_run

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return a == b

    cfg = load_ppo_config(overrides("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"))
    with open_run(cfg) as parts:
        loop = build_loop(cfg, parts)
        good = loop.state_dict()
        other = {
            **good,
            "step": 5,
            "policy_version": 7,
            "loader": {**good["loader"], "epoch": 1, "position": 16},
            "kl_controller": {"value": 0.5},
            "health": {"steps": [[4, {"reward/mean": 0.5}]], "last_spoke": {"x": 3}},
            "generator": torch.Generator().manual_seed(9).get_state(),
        }
        for name, value in [
            ("step", "x"),
            ("step", float("inf")),
            ("step", -1),
            ("step", True),
            ("policy_version", None),
            ("policy_version", 10**400),
            ("loader", "x"),
            ("loader", {**other["loader"], "position": float("inf")}),
            ("loader", {**other["loader"], "position": 10**6}),
            ("loader", {**other["loader"], "epoch": 10**400}),
            ("loader", {**other["loader"], "rows": 3}),
            ("kl_controller", {}),
            ("health", {"steps": [[4, {"reward/mean": "x"}]], "last_spoke": {}}),
            ("health", [1]),
            ("generator", [1]),
            ("generator", torch.zeros(1)),
            ("metrics", [1]),
        ]:
            with pytest.raises((VerlError, TypeError, ValueError, KeyError, RuntimeError)):
                loop.load_state_dict({**other, name: value})
            assert same(loop.state_dict(), good), (name, value)
        for name in good:
            with pytest.raises(KeyError):
                loop.load_state_dict({key: each for key, each in other.items() if key != name})
            assert same(loop.state_dict(), good), name
        loop.load_state_dict(other)
        assert not same(loop.state_dict(), good) and loop.step_number == 5
        loop.tracker.close()
        loop.workers.close()
