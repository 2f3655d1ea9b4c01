"""A small command line for runs on the session's Ray cluster (`joined`, tests/conftest.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def overrides(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(*extra: str, folder: str = "run") -> list[str]:
        usual = ("data.train_batch_size=10", "trainer.total_training_steps=5")
        return tiny_run(tiny_model_dir, digits_data, *usual, *extra, folder=tmp_path / folder)

    return make


@pytest.fixture
def train(overrides: Callable[..., list[str]]) -> Callable[..., tuple[list[dict[str, Any]], Path]]:
    """Run the command's code path; the rows of metrics.jsonl and the run folder."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    def go(*extra: str, folder: str = "run") -> tuple[list[dict[str, Any]], Path]:
        result = run(load_ppo_config(overrides(*extra, folder=folder)))
        return read_metrics(result.folder), result.folder

    return go
