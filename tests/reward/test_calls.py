"""How often the reward function was called is known, and a run in which it never is says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from verl.config.load import load_ppo_config
from verl.config.schema import RewardConfig, WeightedRewardConfig
from verl.reward import RewardResult, RewardSample, build_reward_manager, register_reward_manager
from verl.reward.base import RewardManager
from verl.reward.managers import FACTORIES, naive

FUNCTIONS = """
def one(response):
    return 1.0

def broken(response):
    raise ValueError("no")

def batch(completions):
    return [1.0 for _ in completions]
"""


@pytest.mark.parametrize("in_process", [False, True])
def test_calls_are_counted_failed_ones_and_batches_included(tmp_path, in_process):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    cfg = RewardConfig(in_process=in_process)
    cfg.functions = [WeightedRewardConfig(path=str(path), name=name) for name in ("one", "broken", "batch")]
    manager = build_reward_manager(cfg, max_response_length=4)
    try:
        assert manager.take_calls() == 0
        for _ in range(2):
            for index in range(3):
                manager.submit(RewardSample(index, "", ""))
            manager.collect()
            assert manager.take_calls() == 3 + 3 + 1
        assert manager.take_calls() == 0
    finally:
        manager.close()


def test_a_judge_alone_has_no_calls_to_count():
    cfg = RewardConfig()
    cfg.judge.base_url, cfg.judge.model = "http://127.0.0.1:9/v1", "m"
    manager = build_reward_manager(cfg, max_response_length=4)
    assert manager.take_calls() is None
    manager.close()


class Remembered(RewardManager):
    """A user's manager that believes it knows every score already."""

    def __init__(self, inner: RewardManager) -> None:
        self.inner, self.indices = inner, list[int]()

    def submit(self, sample: RewardSample) -> None:
        self.indices.append(sample.index)

    def collect(self) -> dict[int, RewardResult]:
        indices, self.indices = self.indices, []
        return {index: RewardResult(float(index % 2)) for index in indices}

    def take_calls(self) -> int | None:
        return self.inner.take_calls()

    def close(self) -> None:
        self.inner.close()


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("manager", ["naive", "remembered"])
def test_a_run_says_when_its_function_is_never_called(
    manager, tiny_model_dir: Path, digits_data: Path, tmp_path, caplog
):
    from verl.trainer.main_ppo import run

    register_reward_manager("remembered")(lambda cfg, **arguments: Remembered(naive(cfg, **arguments)))
    keys = [
        f"data.train_files={digits_data}/train.jsonl",
        f"data.val_files={digits_data}/train.jsonl",
        "data.val_max_samples=3",
        "data.train_batch_size=4",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={digits_data}/digits_reward.py",
        f"reward.reward_manager.name={manager}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",  # its calls are not of the training step
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    try:
        with caplog.at_level(logging.INFO):
            result = run(load_ppo_config(keys))
    finally:
        FACTORIES.pop("remembered")
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    called = 8.0 if manager == "naive" else 0.0
    assert [row["reward/calls"] for row in rows if "reward/calls" in row] == [called, called]
    assert ("the reward function was not called" in caplog.text) == (manager == "remembered")
