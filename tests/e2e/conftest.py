"""A short run of the real command's code path on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def overrides(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a small GRPO run; keyword-like extras override it."""

    def make(*extra: str, folder: str = "run") -> list[str]:
        return [
            f"data.train_files={digits_data}/train.jsonl",
            "data.train_batch_size=16",
            "data.max_prompt_length=16",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={tiny_model_dir}",
            "actor_rollout_ref.actor.optim.lr=3e-3",
            "actor_rollout_ref.rollout.n=4",
            "algorithm.adv_estimator=grpo",
            f"reward.custom_reward_function.path={digits_data}/digits_reward.py",
            "reward.in_process=True",
            "trainer.device=cpu",
            "trainer.logger=[]",
            f"trainer.default_local_dir={tmp_path}/{folder}",
            *extra,
        ]

    return make


@pytest.fixture
def train(overrides: Callable[..., list[str]]) -> Callable[..., list[dict[str, Any]]]:
    """Run and return the rows of metrics.jsonl."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    def go(*extra: str, folder: str = "run") -> list[dict[str, Any]]:
        result = run(load_ppo_config(overrides(*extra, folder=folder)))
        return read_metrics(result.folder)

    return go


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
