"""A short run of a recipe on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run

ONE_STEP = "trainer.total_training_steps=1"


@dataclass
class Finished:
    """What a run left behind."""

    folder: Path
    metrics: list[dict[str, Any]]

    def rollouts(self, step: int = 1) -> list[dict[str, Any]]:
        lines = (self.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def train(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> Callable[..., Finished]:
    """`verl train recipe=NAME ...` for one step, without the keys that the tiny run would set in the recipe's place."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    def go(name: str, *keys: str, folder: str = "run") -> Finished:
        line = tiny_run(tiny_model_dir, digits_data, ONE_STEP, folder=tmp_path / folder)
        own = ("actor_rollout_ref.rollout.n=", "algorithm.adv_estimator=")
        line = [key for key in line if not key.startswith(own)]
        result = run(load_ppo_config([f"recipe={name}", *line, *keys]))
        return Finished(result.folder, read_metrics(result.folder))

    return go
