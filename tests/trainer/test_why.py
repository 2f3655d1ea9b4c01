"""`verl why`: what a step did to the responses it trained on, and planted bad rewards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_run import tiny_run
from verl import cli
from verl.config.load import load_ppo_config
from verl.errors import ConfigError
from verl.trainer import why
from verl.trainer.fork import open_recorded
from verl.trainer.main_ppo import run as train
from verl.trainer.replay import repetition

FLIPPED = 8
STEP = 4
REWARD = """
def compute_score(solution_str, ground_truth, extra_info):
    right = sum(word == ground_truth for word in solution_str.split()) / 4
    return 1 - right if extra_info["flipped"] else right
"""


@pytest.fixture(scope="module")
def flipped(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on prompts of which one in eight has the opposite of its reward."""
    folder = tmp_path_factory.mktemp("flipped")
    rows = [
        {
            "prompt": f"repeat {row % 3}",
            "reward_model": {"ground_truth": str(row % 3)},
            "data_source": "flipped" if row % FLIPPED == 0 else "right",
            "extra_info": {"flipped": row % FLIPPED == 0},
        }
        for row in range(64)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits_reward.py").write_text(REWARD)
    keys = ["data.train_batch_size=64", "actor_rollout_ref.rollout.n=8", "trainer.save_freq=3"]
    keys += ["actor_rollout_ref.actor.optim.lr=1e-2", f"trainer.total_training_steps={STEP}"]
    train(load_ppo_config(tiny_run(tiny_model_dir, folder, *keys, folder=folder / "run")))
    return folder / "run"


@pytest.fixture(scope="module")
def seen(flipped: Path) -> why.Seen:
    found = why.Seen(STEP)
    repeated = repetition(open_recorded(flipped), STEP, None, watch=found)
    assert repeated.found.difference is None and repeated.first == STEP
    return found


@pytest.mark.slow(seconds=10)
def test_planted_bad_rewards_come_out_on_top(seen: why.Seen) -> None:
    groups = why.ranked(seen.rows())
    bad = [group.rows[0]["data_source"] == "flipped" for group in groups]
    planted = sum(bad)
    assert planted >= 6 and len(groups) >= 48
    assert all(bad[: planted // 2]) and sum(bad[:planted]) > 0.6 * planted, bad
    assert groups[0].gain < 0 < groups[-1].gain


def test_log_probs_are_those_of_the_checkpoints_on_both_sides(seen: why.Seen, flipped: Path) -> None:
    tensors = seen.batch.batch
    mask, width = tensors["response_mask"].bool(), tensors["responses"].shape[1]
    sums = []
    for step in (STEP - 1, STEP):
        folder = flipped / f"global_step_{step}" / "actor" / "huggingface"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        attention = tensors["attention_mask"]
        with torch.no_grad():
            logits = model(
                tensors["input_ids"],
                attention_mask=attention,
                position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
            ).logits
        of_tokens = logits[:, -width - 1 : -1].log_softmax(-1)
        found = of_tokens.gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)
        sums.append((found * mask).sum(-1))
    rows = seen.rows()
    assert [row["before"] for row in rows] == pytest.approx(sums[0].tolist(), abs=1e-3)
    assert [row["after"] for row in rows] == pytest.approx(sums[1].tolist(), abs=1e-3)
    assert max(abs(row["after"] - row["before"]) for row in rows) > 0.05
    assert [row["tokens"] for row in rows] == mask.sum(-1).tolist()
    gains = [(row["after"] - row["before"]) * row["advantage"] for row in rows]
    assert [row["gain"] for row in rows] == pytest.approx(gains, abs=1e-4)  # one advantage for all tokens


def test_groups_are_ordered_by_the_change_times_the_advantage() -> None:
    def row(uid: str, advantage: float | None, change: float, tokens: int = 2) -> dict[str, Any]:
        gain = (advantage or 0.0) * change
        texts = {"uid": uid, "prompt": uid, "response": "a", "score": 1.0}
        return {
            **texts,
            "advantage": advantage,
            "tokens": tokens,
            "before": -2.0,
            "after": -2.0 + change,
            "gain": gain,
        }

    rows = [row("followed", 1.0, 0.4), row("followed", -1.0, 0.1), row("against", 1.0, -0.2)]
    rows += [
        row("constant", 0.0, 5.0),
        row("masked", None, 0.0, tokens=0),
        row("against", -1.0, 0.2, tokens=6),
    ]
    rows.append(row("followed", 0.0, -0.4))  # of no influence, and shown with its group
    found = why.ranked(rows)
    assert [group.prompt for group in found] == ["against", "followed"]
    assert found[0].gain == pytest.approx(-0.4 / 8) and found[1].gain == pytest.approx(0.3 / 6)
    assert found[0].moved == pytest.approx(0.2) and found[1].moved == pytest.approx(0.3)


def test_the_command_shows_them_and_leaves_the_run_as_it_is(
    flipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.stat().st_mtime_ns for file in flipped.rglob("*")}
    assert cli.main(["why", str(flipped), "--step", str(STEP), "--groups", "2"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"step {STEP}: \d+ groups with advantages; the update moved \d+ against them", text)
    assert "note:" not in text
    assert re.search(r"1\. 'repeat \d'   change x advantage -\d\.\d{4}, moved \d+\.\d{3}", text)
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == 2
    assert len(re.findall(r"score \S+  advantage \S+  log-prob \S+ -> \S+ \(\S+\)  '", text)) == 16
    assert {file: file.stat().st_mtime_ns for file in flipped.rglob("*")}.keys() == before.keys()


def test_what_has_no_groups_is_refused(
    tmp_path: Path, flipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["why", str(flipped), "--step", str(STEP), "--groups", "-1"]) == ConfigError.exit_code
    assert "--groups is -1" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("model: {path: x}\ntrainer: {default_local_dir: y}\n")
    assert cli.main(["why", str(tmp_path), "--step", "1"]) == ConfigError.exit_code
    assert "has no groups of responses" in capsys.readouterr().err


def test_a_step_that_trains_the_critic_alone_is_refused(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["algorithm.adv_estimator=gae", f"critic.model.path={tiny_model_dir}", "trainer.critic_warmup=1"]
    keys += ["trainer.total_training_steps=1", "trainer.save_freq=-1"]
    train(load_ppo_config(tiny_run(tiny_model_dir, digits_data, *keys, folder=tmp_path / "run")))
    assert cli.main(["why", str(tmp_path / "run"), "--step", "1"]) == ConfigError.exit_code
    assert "step 1 trains the critic alone" in capsys.readouterr().err
